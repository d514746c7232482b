"""Which linear layers get quantized weights, and what is said where that can't be."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raycore.config import EngineConfig, resolve
from raycore.errors import InvalidConfig
from raycore.layers import fp8_linear
from raycore.weights.linear_formats import (
    CONVERTED,
    EVERY_FP8,
    EVERY_INTEGERS,
    GROUPED_FP8,
    STORED_FP8,
    STORED_INTEGERS,
    LinearFormats,
)
from raycore.worker.format_choice import choose_formats
from raycore.worker.rank import WorkerRank
from raycore.worker.worker import Worker

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KEPT_FP8 = replace(GROUPED_FP8, stored=frozenset(["fp8"]))
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
STORED = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**NUMBERS, "strategy": "channel"},
                "input_activations": {**NUMBERS, "strategy": "token", "dynamic": True},
            }
        },
    }
}
ROUNDED = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
            }
        },
    }
}
INTEGERS = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
ORDERED = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.fixture(autouse=True)
def able_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that multiplies in fp8."""
    original = fp8_linear.unsupported_reason
    monkeypatch.setattr(
        fp8_linear, "unsupported_reason", lambda device: None if device.type == "cuda" else original(device)
    )


def config(path: Path, shape: dict[str, object] | None = None, **options: object) -> EngineConfig:
    (path / "config.json").write_text(json.dumps(SHAPE | (shape or {})))
    return resolve(str(path), **options)  # pyright: ignore


def chosen(
    config: EngineConfig, tp_size: int, device: torch.device, *, is_native: bool = True, shares_experts: bool = False
) -> LinearFormats:
    return choose_formats(config.model, tp_size, device, is_native=is_native, shares_experts=shares_experts)


def test_fp8_is_used_for_layers_stored_in_fp8_and_on_request_for_all(tmp_path: Path) -> None:
    assert chosen(config(tmp_path), 1, GPU) == CONVERTED
    assert chosen(config(tmp_path, quantization="fp8"), 2, GPU) == LinearFormats(others="fp8")
    assert chosen(config(tmp_path, STORED), 2, GPU) == STORED_FP8
    assert chosen(config(tmp_path, STORED, quantization="fp8"), 1, GPU) == EVERY_FP8


def test_stored_integers_are_used_on_cpus_with_native_kernels(tmp_path: Path) -> None:
    assert chosen(config(tmp_path), 1, CPU) == CONVERTED
    assert chosen(config(tmp_path, INTEGERS), 2, CPU) == STORED_INTEGERS
    assert chosen(config(tmp_path, INTEGERS, batch_invariant=True), 2, CPU) == STORED_INTEGERS
    assert chosen(config(tmp_path, quantization="int8"), 2, CPU) == LinearFormats(others="integers")
    assert chosen(config(tmp_path, INTEGERS, quantization="int8"), 1, CPU) == EVERY_INTEGERS


def test_rows_are_rounded_to_8_bits_on_request(tmp_path: Path) -> None:
    short = replace(STORED_INTEGERS, short_rows=True)
    assert chosen(config(tmp_path, INTEGERS, cpu_activation_dtype="auto"), 2, CPU) == STORED_INTEGERS
    assert chosen(config(tmp_path, INTEGERS, cpu_activation_dtype="int8"), 2, CPU) == short


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ({"device": CPU, "is_native": False}, "native kernels"),
        ({"device": GPU}, "need a CPU, and the device is 'cuda'"),
    ],
)
def test_rows_of_8_bits_are_refused_where_integers_cannot_be_used(tmp_path: Path, place, reason: str) -> None:
    asked = config(tmp_path, INTEGERS, cpu_activation_dtype="int8")
    with pytest.raises(InvalidConfig, match=f"cpu_activation_dtype='int8': .*{reason}.*Omit the option"):
        chosen(asked, 1, **place)


@pytest.mark.parametrize(
    ("shape", "options", "fragments"),
    [
        ({}, {}, ["has no weights in integers: omit it"]),
        (STORED, {}, ["has no weights in integers: omit it"]),
        ({}, {"quantization": "int8"}, ["quantization='int8' rounds inputs to 8 bits without it: omit it"]),
        (ROUNDED, {}, ["says that inputs are rounded to 8 bits, each token's with one scale: omit it"]),
        (ORDERED, {}, ["are of similar inputs (desc_act or actorder)", "omit it"]),
        (INTEGERS, {"device": "cuda"}, ["needs a CPU", "device='cuda'"]),
        (INTEGERS, {"attention_backend": "torch"}, ["attention_backend='native'", "attention_backend='torch'"]),
    ],
)
def test_rows_of_8_bits_are_refused_at_once_where_they_have_no_meaning(
    tmp_path: Path, shape, options, fragments
) -> None:
    with pytest.raises(InvalidConfig) as raised:
        config(tmp_path, shape, cpu_activation_dtype="int8", **options)
    for fragment in ("cpu_activation_dtype='int8'", *fragments):
        assert fragment in str(raised.value)


def test_models_with_experts_keep_integers_on_cpus_unless_experts_move(tmp_path: Path, caplog) -> None:
    model = config(tmp_path, INTEGERS | MOE)
    assert chosen(model, 2, CPU) == STORED_INTEGERS
    assert chosen(config(tmp_path, MOE, quantization="int8"), 2, CPU) == LinearFormats(others="integers")
    assert not caplog.records
    assert chosen(model, 1, CPU, shares_experts=True) == CONVERTED
    assert "weights in integers are converted: experts move between ranks" in caplog.text
    with pytest.raises(InvalidConfig, match=r"quantization='int8': experts move between ranks.*Omit the option"):
        chosen(config(tmp_path, MOE, quantization="int8"), 1, CPU, shares_experts=True)


def test_groups_of_similar_inputs_are_converted_unless_weights_are_rounded_anew(tmp_path: Path, caplog) -> None:
    assert chosen(config(tmp_path, ORDERED, quantization="int8"), 1, CPU) == LinearFormats(others="integers")
    assert not caplog.records
    assert chosen(config(tmp_path, ORDERED), 1, CPU) == CONVERTED
    assert "weights in integers are converted: the inputs of a group aren't neighbors" in caplog.text


@pytest.mark.parametrize(
    ("shape", "options"), [({}, {"device": "cpu"}), ({}, {"batch_invariant": True}), (MOE, {}), ({}, {})]
)
def test_fp8_means_the_format_of_a_checkpoint_that_has_it(tmp_path: Path, caplog, shape, options) -> None:
    model = config(tmp_path, STORED | shape, quantization="fp8", **options)
    assert model.model.quantization == (None if shape or options else "fp8")
    assert chosen(model, 1, CPU) == KEPT_FP8
    assert not caplog.records


BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def test_fp8_is_kept_with_scales_of_groups_on_cpus_with_native_kernels(tmp_path: Path, caplog) -> None:
    for shape in ({}, MOE):
        assert chosen(config(tmp_path, STORED | shape), 2, CPU) == KEPT_FP8
        assert chosen(config(tmp_path, BLOCKS | shape), 2, CPU) == replace(KEPT_FP8, stored=frozenset(["fp8_blocks"]))
    assert chosen(config(tmp_path, STORED, batch_invariant=True), 1, CPU) == KEPT_FP8
    assert chosen(config(tmp_path, STORED, quantization="int8"), 1, CPU) == replace(CONVERTED, others="integers")
    assert not caplog.records
    assert chosen(config(tmp_path, BLOCKS), 1, GPU) == CONVERTED
    assert "weights in fp8, in blocks, are converted: no kernel here multiplies with a scale for each" in caplog.text


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ({"is_native": False}, "products of fp8 need raycore's native kernels"),
        ({"shares_experts": True}, "enable_expert_parallel=True"),
    ],
)
def test_fp8_is_converted_where_native_kernels_cannot_multiply_it(tmp_path: Path, caplog, place, reason: str) -> None:
    assert chosen(config(tmp_path, BLOCKS | MOE), 1, CPU, **place) == CONVERTED
    assert reason in caplog.text


@pytest.mark.parametrize(
    "described", [{"quant_method": "modelopt", "quant_algo": "FP8"}, {"quant_method": "fbgemm_fp8"}]
)
def test_the_option_may_say_what_the_checkpoint_says(tmp_path: Path, described: dict[str, str]) -> None:
    method = described["quant_method"]
    assert config(tmp_path, {"quantization_config": described}, quantization=method).model.quantization is None
    with pytest.raises(
        InvalidConfig, match=rf"quantization={method!r}, but .*weights are stored as 'compressed-tensors'"
    ):
        config(tmp_path, STORED, quantization=method)


def test_experts_in_mxfp4_are_kept_on_cpus_unless_they_move(tmp_path: Path, caplog) -> None:
    stored = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    model = config(tmp_path, stored)
    assert chosen(model, 2, CPU) == STORED_INTEGERS
    assert not caplog.records
    assert chosen(model, 1, GPU) == chosen(model, 1, CPU, shares_experts=True) == CONVERTED
    assert "the checkpoint's weights in 4-bit floating point are converted" in caplog.text
    assert "need a CPU" in caplog.text
    assert "enable_expert_parallel=True" in caplog.text


@pytest.mark.parametrize(
    ("device", "is_native", "reason"),
    [(CPU, False, "native kernels"), (GPU, True, "need a CPU, and the device is 'cuda'")],
)
def test_int8_is_refused_where_integers_cannot_be_used(tmp_path: Path, device, is_native: bool, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"quantization='int8'.*{reason}"):
        chosen(config(tmp_path, quantization="int8"), 1, device, is_native=is_native)


@pytest.mark.parametrize(
    ("wanted", "shape", "options", "fragments"),
    [
        ("fp8", {}, {"device": "cpu"}, ["needs a GPU", "device='cpu'"]),
        ("fp8", {}, {"batch_invariant": True}, ["batch_invariant=True"]),
        ("fp8", MOE, {}, ["Qwen3MoeForCausalLM", "experts"]),
        ("int8", {}, {"device": "cuda"}, ["needs a CPU", "device='cuda'"]),
        ("int8", {"architectures": ["GptOssForCausalLM"]}, {}, ["GptOssForCausalLM", "experts", "row for each input"]),
    ],
)
def test_options_that_contradict_quantization_are_refused_at_once(
    tmp_path: Path, wanted, shape, options, fragments
) -> None:
    with pytest.raises(InvalidConfig) as raised:
        config(tmp_path, shape, quantization=wanted, **options)
    for fragment in (f"quantization='{wanted}'", *fragments):
        assert fragment in str(raised.value)


def test_sizes_that_fp8_products_lack_are_named(tmp_path: Path) -> None:
    model = config(tmp_path, {"intermediate_size": 104}, quantization="fp8").model
    with pytest.raises(InvalidConfig, match=r"multiples of 16.*tensor_parallel_size=2.* 52 feed-forward dimensions"):
        choose_formats(model, 2, GPU, is_native=False, shares_experts=False)


def test_a_worker_on_a_cpu_refuses_fp8(tmp_path: Path) -> None:
    worker = Worker(config(tmp_path, quantization="fp8"), WorkerRank(0, 0, 1, 0, 1))
    with pytest.raises(InvalidConfig, match=r"quantization='fp8'.*need a GPU, and the device is 'cpu'"):
        worker.init_device()


@pytest.mark.parametrize(
    ("shape", "options", "device", "reason"),
    [
        ({}, {"batch_invariant": True}, "cuda:0", "batch_invariant=True"),
        (MOE, {}, "cuda:0", "experts"),
        ({"hidden_size": 24}, {}, "cuda:0", "24 hidden dimensions"),
    ],
)
def test_weights_stored_in_fp8_are_converted_if_fp8_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shape, options, device: str, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(config(tmp_path, STORED | shape, **options), 1, torch.device(device)) == CONVERTED
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("shape", "device", "reason"), [({}, GPU, "need a CPU"), ({}, CPU, "native kernels"), (MOE, CPU, "native kernels")]
)
def test_stored_integers_are_converted_without_native_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shape, device, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(config(tmp_path, INTEGERS | shape), 1, device, is_native=False) == CONVERTED
    assert "the checkpoint's weights in integers are converted" in caplog.text
    assert "instead of at least" in caplog.text
    assert reason in caplog.text
