"""Layers that read the keys and values of others: what they keep, and where stages end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gemma4_config import CONFIG, GEMMA4, WITHOUT_INPUTS
from model_specs import spec_of
from safetensors.numpy import save_file

from raycore.checkpoint.stages import split_layers
from raycore.checkpoint.stored_model import fit_model
from raycore.checkpoint.tensor_shapes import model_tensors
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.models.mixers.sharing import sharing_by_layer


def test_layers_that_share_keys_and_values_have_neither_projections_nor_memory_for_them(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, GEMMA4, **CONFIG)
    assert [mixer.kept_by(layer) for layer, mixer in enumerate(spec.mixers)] == [0, 1, 2, 3, 4, 5, 4, 4, 5]
    assert [mixer.cached(spec, layer).kind for layer, mixer in enumerate(spec.mixers)] == [
        *(["window", "window", "full"] * 2),
        *["none"] * 3,
    ]
    own, shared = (set(spec.mixers[layer].tensors(spec)) for layer in (5, 8))
    projections = {f"self_attn.{each}.weight" for each in ("k_proj", "v_proj", "k_norm")}
    assert own - shared == projections
    assert [part.split_sizes(spec, expert_parallel=False) for part in spec.feed_forwards[5:7]] == [
        {"intermediate_size": 40},
        {"intermediate_size times 2": 80},
    ]
    # attention of a layer and of its source is one
    assert spec.attention_by_layer[8] is spec.attention_by_layer[5]
    assert spec.why_not("kv_transfer") == "has layers that read the keys and values of others"


def test_files_may_have_projections_that_layers_do_not_use(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, GEMMA4, **CONFIG)
    tensors = {name: np.ones(shape, np.float32) for name, shape in model_tensors(spec, lambda name: False)}
    unused = {f"self_attn.{each}.weight": np.ones(8, np.float32) for each in ("k_proj", "v_proj", "k_norm", "v_norm")}
    file = tmp_path / "model.safetensors"
    # the last layers read the keys and values of others
    for layer in (6, 7, 8):
        tensors |= {f"model.layers.{layer}.{name}": each for name, each in unused.items()}
    save_file(tensors, file)
    assert fit_model(spec, tmp_path).fitted_to is not None
    save_file(tensors | {"model.layers.5.self_attn.v_norm.weight": np.ones(16, np.float32)}, file)
    with pytest.raises(InvalidCheckpoint, match=r"wouldn't use: model.layers.5.self_attn.v_norm.weight"):
        fit_model(spec, tmp_path)


def test_stages_have_layers_together_that_share_keys_and_values(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, GEMMA4, **WITHOUT_INPUTS)
    assert [list(stage.layers) for stage in split_layers(spec, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    with pytest.raises(InvalidConfig, match=r"pipeline_layers=5,4 .*share keys and values.*\[1, 2, 3, 4, 9\]"):
        split_layers(spec, 2, [5, 4])
    with pytest.raises(InvalidConfig, match="pipeline_parallel_size=6 is more than"):
        split_layers(spec, 6)
    with pytest.raises(InvalidConfig, match=r"pipeline_parallel_size=2 .* inputs of their own"):
        split_layers(spec_of(tmp_path, GEMMA4, **CONFIG), 2)


def test_layers_that_are_alike_have_one_kind_of_attention(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, GEMMA4, **CONFIG)
    kinds = sharing_by_layer(spec)
    assert [next(at for at, each in enumerate(kinds) if each is own) for own in kinds] == [0, 0, 2, 0, 4, 5, 6, 6, 8]
    assert [kind.is_source for kind in kinds] == [layer in (4, 5) for layer in range(9)]
    assert len(spec.mixer_kinds) == 6
