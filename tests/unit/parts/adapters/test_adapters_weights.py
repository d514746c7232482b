"""The parts of an adapter on all ranks together are the adapter that PEFT wrote."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from configs import SPEC
from families import make_checkpoint
from peft import PeftModel
from peft_adapters import adapted_modules, save_adapter, save_demo_adapter
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stages import Stage, split_layers
from raycore.errors import InvalidAdapter
from raycore.models.feed_forward import DENSE
from raycore.models.linears import FusedLinear
from raycore.models.spec import LinearShape, ModelSpec
from raycore.parts.adapters.checkpoint.spec import LoraSpec
from raycore.parts.adapters.weights import LoraLinear, LoraWeights, largest_lora_bytes, load_lora_weights
from raycore.weights.loader import random_decoder_weights
from raycore.weights.share import WeightShare

CPU = torch.device("cpu")
ADAPTERS: dict[str, dict[str, Any]] = {
    "of all projections": {},
    "of some": {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"], "layers_to_transform": [1]},
    # square roots of these ranks, and so all numbers, are exact
    "with patterns": {
        "rank_pattern": {"q_proj": 16, "v_proj": 1, r"layers\.1\.mlp\.(up|down)_proj": 1, "0.self_attn.o_proj": 16},
        "alpha_pattern": {"k_proj": 2, "layers.0.*": 32},
        "use_rslora": True,
    },
}


@pytest.fixture(scope="module", params=ADAPTERS)
def adapter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PeftModel]:
    """An adapter's directory, and the model from which PEFT wrote it."""
    path = tmp_path_factory.mktemp("adapter")
    return path, save_adapter(path, **ADAPTERS[request.param])


def load(
    path: Path,
    tp_rank: int = 0,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
    stage: Stage | None = None,
    spec: ModelSpec = SPEC,
) -> LoraWeights:
    lora = LoraSpec.read(path, spec, 16)
    return load_lora_weights(WeightShare(spec, dtype, tp_rank, tp_size, stage), lora, path)


def delta(linear: LoraLinear | None, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """What the adapter adds to a rank's weight of a fused layer."""
    delta_OI = torch.zeros(num_outputs, num_inputs)
    for part in linear.parts if linear else ():
        rows = slice(part.first_output, part.first_output + part.b_RO.shape[1])
        delta_OI[rows] += part.b_RO.t() @ linear.a_RI[part.first_row : part.first_row + part.rank]
    return delta_OI


def put_together(ranks: list[LoraWeights], layer: int, spec: ModelSpec = SPEC) -> dict[str, torch.Tensor]:
    """What the adapter adds to the whole weights of a layer's projections. Ranks that share rows must agree."""
    found = {
        each.name: torch.full((each.total, linear.inputs.total), torch.nan)
        for linear in linears(spec, layer, 0, 1)
        for each in linear.outputs
    }
    for tp_rank, rank in enumerate(ranks):
        for linear in linears(spec, layer, tp_rank, len(ranks)):
            sizes = [each.num for each in linear.outputs]
            assert linear.adapted is not None
            added_OI = delta(rank.layers[layer].get(linear.adapted), sum(sizes), linear.inputs.num)
            for each, part_OI in zip(linear.outputs, added_OI.split(sizes), strict=True):
                there = found[each.name][each.part, linear.inputs.part]
                assert (there.isnan() | (there == part_OI)).all()
                there.copy_(part_OI)
    return found


def linears(spec: ModelSpec, layer: int, tp_rank: int, tp_size: int) -> list[FusedLinear]:
    """The linear layers of a rank that adapters may change."""
    mixed = spec.mixers[layer].adapted_linears(spec, tp_rank, tp_size)
    return [*mixed.values(), *DENSE.linears(spec, tp_rank, tp_size)]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_together_add_the_lora_delta_of_peft(adapter: tuple[Path, PeftModel], tp_size: int) -> None:
    """With 4 ranks, two neighbors hold the same key-value head."""
    path, model = adapter
    ranks = [load(path, tp_rank, tp_size) for tp_rank in range(tp_size)]
    modules = adapted_modules(model)
    for layer in range(SPEC.num_layers):
        for name, found in put_together(ranks, layer).items():
            module = modules.get((layer, name))
            expected = torch.zeros_like(found) if module is None else module.get_delta_weight("default")
            assert torch.equal(found, expected), (layer, name)
            assert (module is None) == (not found.any())


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_together_add_the_matrices_of_a_gguf_file(
    adapter: tuple[Path, PeftModel], tp_size: int, tmp_path: Path
) -> None:
    """It has one alpha, and other orders of the rows of queries and keys."""
    pytest.importorskip("gguf", reason="needs the extra gguf")
    from gguf_files import write_gguf_adapter  # it needs gguf

    path, model = adapter
    model.get_base_model().config.save_pretrained(str(tmp_path))
    file = write_gguf_adapter(tmp_path, path, "llama3", tmp_path / "adapter.gguf")
    ranks = [load(file, tp_rank, tp_size) for tp_rank in range(tp_size)]
    for (layer, name), module in adapted_modules(model).items():
        a_RI, b_OR = module.lora_A["default"].weight, module.lora_B["default"].weight
        found = put_together(ranks, layer)[name]
        assert torch.equal(found, (b_OR @ a_RI * 8 / len(a_RI)).detach()), (layer, name)


@pytest.mark.parametrize("family", ["granite", "phi3"])
def test_a_gguf_file_has_the_matrices_of_peft(family: str, tmp_path: Path) -> None:
    """Of projections that share a tensor, too."""
    pytest.importorskip("gguf", reason="needs the extra gguf")
    from gguf_files import write_gguf_adapter  # it needs gguf

    checkpoint = make_checkpoint(family, tmp_path)
    path, _ = save_demo_adapter(tmp_path, 1, checkpoint)
    file = write_gguf_adapter(checkpoint, path, family, tmp_path / "adapter.gguf")
    spec = load_model_spec(checkpoint)
    expected, found = load(path, spec=spec), load(file, spec=spec)
    for one, other in zip(expected.layers, found.layers, strict=True):
        assert one.keys() == other.keys()
        for own, given in ((one[name], other[name]) for name in one):
            assert torch.equal(own.a_RI, given.a_RI)
            assert all(torch.equal(a.b_RO, b.b_RO) for a, b in zip(own.parts, given.parts, strict=True))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_lora_parts_have_the_sizes_of_the_ranks_weights(adapter: tuple[Path, PeftModel], tp_size: int) -> None:
    path, _ = adapter
    for tp_rank in range(tp_size):
        own = random_decoder_weights(WeightShare(SPEC, torch.float32, tp_rank, tp_size))
        for layer, weights in zip(load(path, tp_rank, tp_size).layers, own.layers, strict=True):
            for linear, weight_OI in (
                (layer.get("qkv"), weights.mixer.qkv_OD),
                (layer.get("o"), weights.mixer.o_DO),
                (layer.get("gate_up"), weights.feed_forward.gate_up_FD),
                (layer.get("down"), weights.feed_forward.down_DF),
            ):
                if linear is not None:
                    assert linear.a_RI.shape == (sum(part.rank for part in linear.parts), weight_OI.shape[1])
                    assert linear.a_RI.is_contiguous()
                    last = linear.parts[-1]
                    assert last.first_row + last.rank == len(linear.a_RI)
                    assert last.first_output + last.b_RO.shape[1] <= len(weight_OI)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_together_add_the_lora_delta_to_linear_layers_with_any_name(
    adapter: tuple[Path, PeftModel], tp_size: int
) -> None:
    """In a network of transformers, whose plan says which layers are divided, and how."""
    path, model = adapter
    names = {"q_proj": "outputs", "up_proj": "outputs", "o_proj": "inputs", "down_proj": "inputs"}
    linears = {
        name: LinearShape(module.out_features, module.in_features, names.get(name.rpartition(".")[2]))
        for name, module in LlamaForCausalLM(model.config).named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    spec = msgspec.structs.replace(
        SPEC, implementation="transformers", linears=linears, tensor_parallel_sizes=[1, 2, 4]
    )
    ranks = [load(path, tp_rank, tp_size, spec=spec) for tp_rank in range(tp_size)]
    adapted = adapted_modules(model)
    assert ranks[0].named.keys() == {f"model.layers.{layer}.{name}" for layer, name in adapted}
    for (layer, projection), module in adapted.items():
        name = f"model.layers.{layer}.{projection}"
        divided, own = linears[name].divided, [rank.named[name] for rank in ranks]
        parts = [linear.parts[0].b_RO.t() @ linear.a_RI for linear in own]
        found = torch.cat(parts, 0 if divided == "outputs" else 1) if divided else parts[-1]
        assert torch.equal(found, module.get_delta_weight("default")), name
    shares = [WeightShare(spec, torch.float32, tp_rank, tp_size) for tp_rank in range(tp_size)]
    for share, rank in zip(shares, ranks, strict=True):
        num_bytes = sum(each.a_RI.nbytes + each.parts[0].b_RO.nbytes for each in rank.named.values())
        if len(adapted) == len(linears) and len({module.r["default"] for module in adapted.values()}) == 1:
            assert largest_lora_bytes(share, 4) == num_bytes
        assert largest_lora_bytes(share, 16) >= num_bytes


def test_lora_parts_are_in_the_order_of_the_fused_layer(tmp_path: Path) -> None:
    save_adapter(tmp_path, target_modules=["v_proj", "q_proj"], rank_pattern={"q_proj": 3})
    qkv = load(tmp_path, tp_rank=1, tp_size=2).layers[0]["qkv"]
    assert [(part.first_row, part.rank, part.first_output) for part in qkv.parts] == [(0, 3, 0), (3, 4, 24)]
    assert [part.b_RO.shape for part in qkv.parts] == [(3, 16), (4, 8)]


def test_a_stage_loads_the_lora_matrices_of_its_own_layers(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    whole = load(tmp_path)
    for index, stage in enumerate(split_layers(SPEC, 2)):
        (layer,) = load(tmp_path, stage=stage).layers
        down, expected = layer["down"], whole.layers[index]["down"]
        assert torch.equal(down.a_RI, expected.a_RI)
        assert torch.equal(down.parts[0].b_RO, expected.parts[0].b_RO)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_lora_matrices_are_scaled_in_float32_and_then_rounded(tmp_path: Path, stored: torch.dtype) -> None:
    save_adapter(tmp_path, lora_alpha=3, r=7)
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name: (torch.randn(tensor.shape)).to(stored) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    down = load(tmp_path, dtype=torch.bfloat16).layers[1]["down"]
    prefix = "base_model.model.model.layers.1.mlp.down_proj"
    assert torch.equal(down.a_RI, tensors[f"{prefix}.lora_A.weight"].bfloat16())
    assert torch.equal(down.parts[0].b_RO.t(), (tensors[f"{prefix}.lora_B.weight"].float() * (3 / 7)).bfloat16())


@pytest.mark.parametrize(
    ("number", "dtype"), [(math.nan, torch.float32), (math.inf, torch.bfloat16), (7e4, torch.float16)]
)
@pytest.mark.parametrize("matrix", ["A", "B"])
def test_lora_matrices_with_infinity_or_nan_are_refused(
    tmp_path: Path, matrix: str, number: float, dtype: torch.dtype
) -> None:
    save_adapter(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = f"base_model.model.model.layers.1.mlp.down_proj.lora_{matrix}.weight"
    tensors[name][1, 2] = number
    save_file(tensors, file)
    message = rf"adapter_model\.safetensors: {re.escape(name)} has numbers that are infinite or NaN in {str(dtype)[6:]}"
    with pytest.raises(InvalidAdapter, match=message):
        load(tmp_path, dtype=dtype)


def test_an_adapter_that_changes_after_it_was_read_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    lora = LoraSpec.read(tmp_path, SPEC, 16)
    save_adapter(tmp_path, r=5)
    for damage in (lambda: None, (tmp_path / "adapter_model.safetensors").unlink):
        damage()
        with pytest.raises(InvalidAdapter, match="the adapter has changed since its description was read: "):
            load_lora_weights(WeightShare(SPEC, torch.float32), lora, tmp_path)


def test_adapters_fit_models_whose_heads_do_not_add_up_to_the_hidden_size(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(SPEC, head_dim=12, num_kv_heads=1)
    modules = adapted_modules(save_adapter(tmp_path, spec))
    ranks = [load(tmp_path, tp_rank, 2, spec=spec) for tp_rank in range(2)]
    for name, found in put_together(ranks, 1, spec).items():
        assert torch.equal(found, modules[1, name].get_delta_weight("default")), name


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_memory_reserved_for_adapters_is_that_of_one_with_all_modules(tmp_path: Path, tp_size: int) -> None:
    save_adapter(tmp_path, r=5)
    weights = load(tmp_path, 0, tp_size)
    linears = [each for layer in weights.layers for each in layer.values()]
    num_bytes = sum(each.a_RI.nbytes + sum(part.b_RO.nbytes for part in each.parts) for each in linears)
    assert num_bytes == largest_lora_bytes(WeightShare(SPEC, torch.float32, 0, tp_size), 5)
