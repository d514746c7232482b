"""Which linear layers get fp8 weights, and what is said where that can't be."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from raycore.config import EngineConfig, resolve
from raycore.errors import InvalidConfig
from raycore.model import fp8_linear
from raycore.worker.fp8_layers import choose_fp8
from raycore.worker.rank import WorkerRank
from raycore.worker.worker import Worker

GPU = torch.device("cuda", 0)
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
INTEGERS = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
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


def test_all_layers_if_asked_and_stored_ones_without_asking(tmp_path: Path) -> None:
    assert choose_fp8(config(tmp_path).model, 1, GPU) == "none"
    assert choose_fp8(config(tmp_path, quantization="fp8").model, 2, GPU) == "all"
    assert choose_fp8(config(tmp_path, STORED).model, 2, GPU) == "stored"
    assert choose_fp8(config(tmp_path, STORED, quantization="fp8").model, 1, GPU) == "all"


@pytest.mark.parametrize(
    ("shape", "options", "fragments"),
    [
        ({}, {"device": "cpu"}, ["needs a GPU", "device='cpu'"]),
        ({}, {"batch_invariant": True}, ["batch_invariant=True"]),
        (MOE, {}, ["Qwen3MoeForCausalLM", "experts"]),
    ],
)
def test_what_cannot_be_together_is_refused_at_once(tmp_path: Path, shape, options, fragments) -> None:
    with pytest.raises(InvalidConfig) as raised:
        config(tmp_path, shape, quantization="fp8", **options)
    for fragment in ("quantization='fp8'", *fragments):
        assert fragment in str(raised.value)


def test_sizes_that_cannot_be_multiplied_are_named(tmp_path: Path) -> None:
    model = config(tmp_path, {"intermediate_size": 104}, quantization="fp8").model
    with pytest.raises(InvalidConfig, match=r"multiples of 16.*tensor_parallel_size=2.* 52 feed-forward dimensions"):
        choose_fp8(model, 2, GPU)


def test_a_worker_on_a_cpu_refuses(tmp_path: Path) -> None:
    worker = Worker(config(tmp_path, quantization="fp8"), WorkerRank(0, 0, 1, 0, 1))
    with pytest.raises(InvalidConfig, match=r"quantization='fp8'.*need a GPU, and the device is 'cpu'"):
        worker.init_device()


@pytest.mark.parametrize(
    ("shape", "options", "device", "reason"),
    [
        ({}, {}, "cpu", "need a GPU"),
        ({}, {"batch_invariant": True}, "cuda:0", "batch_invariant=True"),
        (MOE, {}, "cuda:0", "experts"),
        ({"hidden_size": 24}, {}, "cuda:0", "24 hidden dimensions"),
    ],
)
def test_stored_weights_are_converted_where_fp8_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shape, options, device: str, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_fp8(config(tmp_path, STORED | shape, **options).model, 1, torch.device(device)) == "none"
    assert reason in caplog.text


def test_integers_are_converted_everywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for device in ("cpu", "cuda:0"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert choose_fp8(config(tmp_path, INTEGERS).model, 1, torch.device(device)) == "none"
        assert "integer weights (quant_method='gptq') are converted" in caplog.text
    assert choose_fp8(config(tmp_path, INTEGERS, quantization="fp8").model, 1, GPU) == "all"


@pytest.mark.parametrize("stored", [STORED, INTEGERS])
def test_quantized_weights_are_not_saved_as_sharded_state(tmp_path: Path, stored: dict[str, object]) -> None:
    worker = Worker(config(tmp_path, stored), WorkerRank(0, 0, 1, 0, 1))
    with pytest.raises(InvalidConfig, match=r"quantized weights, which save_sharded_state\(\) can't write"):
        worker.save_sharded_state(str(tmp_path / "saved"))
