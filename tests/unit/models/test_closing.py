"""Feed-forward parts that end layers, and inputs of layers: their sizes, and what can't be used with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gemma4_config import CONFIG, GEMMA4, WITHOUT_INPUTS
from model_specs import spec_of

from raycore.checkpoint.stages import split_layers
from raycore.config.checks import check_prompt_embeds
from raycore.config.parallel import ParallelConfig
from raycore.errors import InvalidConfig
from raycore.models.closing import LayerInputsSpec


def test_embeddings_in_place_of_tokens_have_no_inputs_of_layers(tmp_path: Path) -> None:
    options = {"enable_prompt_embeds": True}
    check_prompt_embeds(options, ParallelConfig(), spec_of(tmp_path, GEMMA4, **WITHOUT_INPUTS))
    with pytest.raises(InvalidConfig, match=r"enable_prompt_embeds=True can't .* inputs of their own"):
        check_prompt_embeds(options, ParallelConfig(), spec_of(tmp_path, GEMMA4, **CONFIG))


def test_experts_are_refused_what_inputs_of_layers_are_refused(tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "use_double_wide_mlp": False, "num_experts": 3, "top_k_experts": 2}
    spec, without = (
        spec_of(tmp_path, GEMMA4, **each | experts | {"moe_intermediate_size": 24}) for each in (CONFIG, WITHOUT_INPUTS)
    )
    with pytest.raises(InvalidConfig, match=r"pipeline_parallel_size=2 .* inputs of their own"):
        split_layers(spec, 2)
    with pytest.raises(InvalidConfig, match=r"enable_prompt_embeds=True can't .* inputs of their own"):
        check_prompt_embeds({"enable_prompt_embeds": True}, ParallelConfig(), spec)
    assert len(split_layers(without, 2)) == 2


def test_ranks_divide_the_table_of_tokens_also_unevenly(tmp_path: Path) -> None:
    spec, part = spec_of(tmp_path, GEMMA4, **CONFIG), LayerInputsSpec(6, 101)
    rows = [part.vectors(spec, rank, 4)[0].parts[0] for rank in range(4)]
    assert [(each.start, each.num) for each in rows] == [(0, 25), (25, 25), (50, 25), (75, 26)]
    assert part.tensors(spec) == {
        "embed_tokens_per_layer.weight": (101, 54),
        "per_layer_model_projection.weight": (54, 32),
        "per_layer_projection_norm.weight": (6,),
    }


def test_layers_without_inputs_have_only_a_norm_and_a_number_more(tmp_path: Path) -> None:
    spec, without = (spec_of(tmp_path, GEMMA4, **each) for each in (CONFIG, WITHOUT_INPUTS))
    tensors, fewer = (set(each.feed_forwards[0].tensors(each)) for each in (spec, without))
    assert tensors - fewer == {
        "per_layer_input_gate.weight",
        "per_layer_projection.weight",
        "post_per_layer_input_norm.weight",
    }
    assert {"post_feedforward_layernorm.weight", "layer_scalar"} <= fewer
