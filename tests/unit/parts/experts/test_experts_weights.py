"""Which part of a checkpoint's experts each rank gets, under every name they have on disk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from expert_checkpoints import EXPERTS, HIDDEN, MIXTRAL, MOE, NAMES, QWEN, SIZE, make_tensors
from safetensors.torch import save_file

from raycore.errors import InvalidCheckpoint
from raycore.models.layer_part import ROWS
from raycore.parts.experts.models import ExpertChoice, ExpertNames, StackedNames
from raycore.parts.experts.weights import MoeWeights
from raycore.weights.layer_part_weights import MlpWeights
from raycore.weights.loader import load_decoder_weights, random_decoder_weights
from raycore.weights.share import WeightShare
from raycore.weights.staging import Staging


def stacked_experts(tensors: dict[str, torch.Tensor], spec, is_stacked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first layer's gate and up rows, and its down rows, of all experts."""
    if is_stacked:
        return tensors["model.layers.0.mlp.experts.gate_up_proj"], tensors["model.layers.0.mlp.experts.down_proj"]
    block, gate, up, down = NAMES[spec.architecture]
    of = [f"model.layers.0.{block}.experts.{expert}" for expert in range(EXPERTS)]
    gate_up = [torch.cat([tensors[f"{name}.{gate}.weight"], tensors[f"{name}.{up}.weight"]]) for name in of]
    return torch.stack(gate_up), torch.stack([tensors[f"{name}.{down}.weight"] for name in of])


@pytest.mark.parametrize("spec", [QWEN, MIXTRAL], ids=lambda spec: spec.architecture)
@pytest.mark.parametrize("is_stacked", [False, True], ids=["single", "stacked"])
def test_each_rank_loads_its_part_of_the_experts(tmp_path: Path, spec, is_stacked):
    tensors = make_tensors(spec, is_stacked)
    save_file(tensors, tmp_path / "model.safetensors")
    gate_up_EFD, down_EDF = stacked_experts(tensors, spec, is_stacked)
    gate_EFD, up_EFD = gate_up_EFD.chunk(2, dim=1)
    for rank in range(2):
        split = load_decoder_weights(WeightShare(spec, torch.float32, rank, 2), tmp_path)
        sparse, dense, _ = (layer.feed_forward for layer in split.layers)
        assert isinstance(sparse, MoeWeights)
        assert isinstance(dense, MlpWeights)
        block = "mlp" if is_stacked else NAMES[spec.architecture][0]
        assert torch.equal(sparse.router_ED, tensors[f"model.layers.0.{block}.gate.weight"])
        rows = slice(rank * SIZE // 2, (rank + 1) * SIZE // 2)
        assert torch.equal(sparse.gate_up_EFD, torch.cat([gate_EFD[:, rows], up_EFD[:, rows]], dim=1))
        assert torch.equal(sparse.down_EDF, down_EDF[:, :, rows])
        share = MOE.whole_experts(rank, 2)
        whole = (
            load_decoder_weights(WeightShare(spec, torch.float32, rank, 2, experts=share), tmp_path)
            .layers[0]
            .feed_forward
        )
        assert isinstance(whole, MoeWeights)
        assert whole.first_expert == share.experts.start
        assert torch.equal(whole.gate_up_EFD, gate_up_EFD[list(share.experts)])
        assert torch.equal(whole.down_EDF, down_EDF[list(share.experts)])


BIASED_MOE = msgspec.structs.replace(
    MOE,
    router=ExpertChoice(has_bias=True),
    has_bias=True,
    names=ExpertNames(router="router"),
    is_interleaved=True,
    is_transposed=True,
)
BIASED = msgspec.structs.replace(QWEN, architecture="GptOssForCausalLM", moe=BIASED_MOE)


def interleaved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint with stacked experts as gpt-oss has them, with biases."""
    made = dict(tensors)
    for prefix in ("model.layers.0.mlp", "model.layers.2.mlp"):
        made[f"{prefix}.router.weight"] = made.pop(f"{prefix}.gate.weight")
        made[f"{prefix}.router.bias"] = torch.randn(EXPERTS)
        made[f"{prefix}.experts.gate_up_proj_bias"] = torch.randn(EXPERTS, 2 * SIZE)
        made[f"{prefix}.experts.down_proj_bias"] = torch.randn(EXPERTS, HIDDEN)
        gate_EFD, up_EFD = made[f"{prefix}.experts.gate_up_proj"].chunk(2, dim=1)
        alternating_EFD = torch.stack([gate_EFD, up_EFD], dim=2).flatten(1, 2)
        made[f"{prefix}.experts.gate_up_proj"] = alternating_EFD.transpose(1, 2).contiguous()
        made[f"{prefix}.experts.down_proj"] = made[f"{prefix}.experts.down_proj"].transpose(1, 2).contiguous()
    return made


@pytest.mark.parametrize("buffer_bytes", [None, 100], ids=["direct", "staged"])
def test_each_rank_loads_its_part_of_interleaved_experts_and_their_biases(tmp_path: Path, buffer_bytes):
    plain = make_tensors(QWEN, is_stacked=True)
    tensors = interleaved(plain)
    save_file(tensors, tmp_path / "model.safetensors")
    gate_EFD, up_EFD = plain["model.layers.0.mlp.experts.gate_up_proj"].chunk(2, dim=1)
    bias_EF = tensors["model.layers.0.mlp.experts.gate_up_proj_bias"]
    for rank in range(2):
        staging = None if buffer_bytes is None else Staging(torch.device("cpu"), buffer_bytes=buffer_bytes)
        share = WeightShare(BIASED, torch.float32, rank, 2)
        found = load_decoder_weights(share, tmp_path, staging=staging).layers[0].feed_forward
        assert isinstance(found, MoeWeights)
        rows = slice(rank * SIZE // 2, (rank + 1) * SIZE // 2)
        assert torch.equal(found.router_ED, plain["model.layers.0.mlp.gate.weight"])
        assert torch.equal(found.router_bias_E, tensors["model.layers.0.mlp.router.bias"])
        assert torch.equal(found.gate_up_EFD, torch.cat([gate_EFD[:, rows], up_EFD[:, rows]], dim=1))
        assert torch.equal(found.down_EDF, plain["model.layers.0.mlp.experts.down_proj"][:, :, rows])
        assert torch.equal(found.gate_up_bias_EF, torch.cat([bias_EF[:, 0::2][:, rows], bias_EF[:, 1::2][:, rows]], 1))
        assert (found.down_bias_ED is None) == (rank == 1), "the sum over ranks has it once"
    held = MOE.whole_experts(1, 2)
    share = WeightShare(BIASED, torch.float32, 1, 2, experts=held)
    whole = load_decoder_weights(share, tmp_path).layers[0].feed_forward
    assert torch.equal(whole.down_bias_ED, tensors["model.layers.0.mlp.experts.down_proj_bias"][list(held.experts)])


def test_stacked_experts_have_names_of_their_own_and_a_row_for_each_input(tmp_path: Path):
    plain = make_tensors(QWEN, is_stacked=True)
    stacked, tensors = StackedNames("sparse", "input.weight", "output.weight"), dict(plain)
    for old in ("model.layers.0.", "model.layers.2."):
        for name, new in (("gate_up_proj", stacked.gate_up), ("down_proj", stacked.down)):
            tensors[f"{old}sparse.{new}"] = tensors.pop(f"{old}mlp.experts.{name}").transpose(1, 2).contiguous()
        tensors[f"{old}sparse.gate.weight"] = tensors.pop(f"{old}mlp.gate.weight")
        tensors[f"{old}sparse.bias"] = torch.randn(1, EXPERTS)
    save_file(tensors, tmp_path / "model.safetensors")
    moe = msgspec.structs.replace(
        MOE,
        router=ExpertChoice(has_correction=True),
        names=ExpertNames(correction="bias", stacked=stacked),
        correction_shape=(1, ROWS),
        is_transposed=True,
    )
    spec = msgspec.structs.replace(QWEN, moe=moe)
    for rank in range(2):
        expected, found = (
            load_decoder_weights(WeightShare(each, torch.float32, rank, 2), path).layers[2].feed_forward
            for each, path in ((QWEN, write(tmp_path / "plain", plain)), (spec, tmp_path))
        )
        assert isinstance(expected, MoeWeights)
        assert isinstance(found, MoeWeights)
        assert torch.equal(found.gate_up_EFD, expected.gate_up_EFD)
        assert torch.equal(found.down_EDF, expected.down_EDF)
        assert torch.equal(found.router_ED, expected.router_ED)
        assert torch.equal(found.correction_E, tensors["model.layers.2.sparse.bias"][0])


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("is_stacked", [False, True], ids=["single", "stacked"])
def test_staged_experts_equal_those_read_directly(tmp_path: Path, is_stacked):
    save_file(make_tensors(MIXTRAL, is_stacked), tmp_path / "model.safetensors")
    for rank in range(2):
        direct = load_decoder_weights(WeightShare(MIXTRAL, torch.bfloat16, rank, 2), tmp_path)
        staging = Staging(torch.device("cpu"), buffer_bytes=100)
        staged = load_decoder_weights(WeightShare(MIXTRAL, torch.bfloat16, rank, 2), tmp_path, staging=staging)
        for expected, found in zip(direct.layers, staged.layers, strict=True):
            for name, tensor in vars(expected.feed_forward).items():
                assert not isinstance(tensor, torch.Tensor) or torch.equal(vars(found.feed_forward)[name], tensor)


def test_missing_experts_are_named(tmp_path: Path):
    tensors = make_tensors(MIXTRAL, is_stacked=False)
    del tensors["model.layers.2.block_sparse_moe.experts.1.w2.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"layers\.2\.block_sparse_moe\.experts\.1\.w2\.weight is missing"):
        load_decoder_weights(WeightShare(MIXTRAL, torch.float32), tmp_path)


def test_random_experts_do_not_depend_on_the_number_of_ranks():
    whole = random_decoder_weights(WeightShare(QWEN, torch.float32)).layers[2].feed_forward
    assert isinstance(whole, MoeWeights)
    parts = [
        random_decoder_weights(WeightShare(QWEN, torch.float32, experts=MOE.whole_experts(rank, 2)))
        .layers[2]
        .feed_forward
        for rank in range(2)
    ]
    assert torch.equal(torch.cat([part.gate_up_EFD for part in parts]), whole.gate_up_EFD)
