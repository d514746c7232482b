"""The layer of a checkpoint that predicts further tokens: which tensors it has, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import make_checkpoint
from mtp_checkpoints import MTP_FAMILIES, MtpCheckpoint
from safetensors.torch import load_file, save_file

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model, fit_mtp
from raycore.errors import InvalidCheckpoint
from raycore.models.spec import ModelSpec
from raycore.parts.drafts.checkpoint.mtp import MtpSpec, mtp_spec


@pytest.fixture(params=["glm4_moe", "qwen3_5"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MtpCheckpoint(request.param, tmp_path).path


def head_at(path: Path) -> tuple[ModelSpec, MtpSpec]:
    found = mtp_spec(load_model_spec(path))
    assert found is not None
    return found


def test_tensors_of_the_layer_are_compared_with_config_json(path: Path) -> None:
    spec, head = head_at(path)
    assert fit_mtp(spec, head, path).fitted_to == fit_model(load_model_spec(path), path).fitted_to
    names, file = head.tensors(spec), path / "model.safetensors"
    tensors = load_file(file)
    projection, own = f"{names.projection}.weight", f"{names.layer}post_attention_layernorm.weight"
    for changed, message in (
        ({projection: tensors[projection][:, :-1].contiguous()}, r"has shape \(64, 127\), but config.json implies"),
        (
            {f"{names.layer}more.weight": torch.ones(3)},
            "1 tensor that the layer that predicts .*: .*more",
        ),
        ({own: None}, f"lacks 1 tensor .*{own}"),
    ):
        others = {name: each for name, each in (tensors | changed).items() if each is not None}
        save_file(others, file)
        with pytest.raises(InvalidCheckpoint, match=message):
            fit_mtp(spec, head, path)
    save_file({name: each for name, each in tensors.items() if not name.startswith(names.own)}, file)
    with pytest.raises(
        InvalidCheckpoint, match=r"has no tensor .*, the layer that predicts further tokens, with which"
    ):
        fit_mtp(spec, head, path)


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_the_layer_is_not_the_models(family: str, tmp_path: Path) -> None:
    """The model's own files may have it, and no layer too many is taken for it."""
    path = MtpCheckpoint(family, tmp_path).path
    fitted = fit_model(load_model_spec(path), path)
    if MTP_FAMILIES[family].layer.startswith("mtp."):
        tensors = load_file(path / "model.safetensors")
        extra = {f"model.layers.{fitted.num_layers}.input_layernorm.weight": torch.ones(64)}
        save_file(tensors | extra, path / "model.safetensors")
        with pytest.raises(InvalidCheckpoint, match=f"the files have {fitted.num_layers + 1} layers"):
            fit_model(load_model_spec(path), path)


def test_embeddings_of_the_layers_own_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_5", tmp_path)
    config = json.loads((path / "config.json").read_text())
    for change, is_own in (
        ({}, True),
        ({"mtp_num_hidden_layers": 0}, False),
        ({"mtp_use_dedicated_embeddings": True}, False),
    ):
        (path / "config.json").write_text(json.dumps(config | change))
        assert (load_model_spec(path).mtp is not None) == is_own
