"""Which backend computes attention, what the cache stores, and what is said if that can't be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import interpreted_triton  # noqa: F401  # before whatever imports Triton
import pytest
import torch
from native_kernels import needs_kernels

from raycore.errors import InvalidConfig
from raycore.kernels import library
from raycore.layers import fp8_linear
from raycore.models.mixers.spec import HeadShape, IndexShape
from raycore.worker.attention_backend import (
    choose_attention_backend,
    choose_cache_dtype,
    choose_divided_backend,
    choose_operations_backend,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS = HeadShape(num_heads=8, num_kv_heads=2, head_dim=64)


def choose(asked: str, device: torch.device, heads: HeadShape = HEADS, block_size: int = 16) -> str:
    return choose_attention_backend(asked, device, [heads], block_size, torch.float32)


def test_a_gpu_gets_the_triton_backend() -> None:
    assert choose("auto", CUDA) == choose("triton", CUDA) == "triton"
    assert choose("torch", CUDA) == "torch"


@needs_kernels
def test_a_cpu_gets_the_native_backend() -> None:
    assert choose("auto", CPU) == choose("native", CPU) == "native"
    assert choose("torch", CPU) == "torch"


@pytest.mark.parametrize(("asked", "device"), [("native", CUDA), ("triton", CPU)])
def test_a_backend_for_another_device_is_refused(asked: str, device: torch.device) -> None:
    with pytest.raises(InvalidConfig, match=f"attention_backend='{asked}' isn't for device='{device.type}'"):
        choose(asked, device)


def test_sizes_that_kernels_lack_go_to_torch_unless_the_kernels_were_asked_for(caplog) -> None:
    heads = HeadShape(num_heads=8, num_kv_heads=2, head_dim=512)
    assert choose("auto", CUDA, heads) == "torch"
    assert choose_operations_backend("auto", CUDA) == "triton"
    assert "the head dimension is 512" in caplog.text
    with pytest.raises(InvalidConfig, match="'triton': the head dimension is 512"):
        choose("triton", CUDA, heads)


@needs_kernels
def test_sizes_that_the_native_kernels_lack_go_to_torch() -> None:
    assert choose("auto", CPU, block_size=7) == "torch"
    with pytest.raises(InvalidConfig, match="don't support head_dim=64 with block_size=7"):
        choose("native", CPU, block_size=7)


LATENTS = HeadShape(num_heads=128, num_kv_heads=1, head_dim=576, latent_rank=512)
HEADS = HeadShape(num_heads=8, num_kv_heads=4, head_dim=64)
IMAGES = SimpleNamespace(is_bidirectional=False)
BIDIRECTIONAL = SimpleNamespace(is_bidirectional=True)
BY_AXES = [None, SimpleNamespace(sections=(4, 2, 2))]


def of_attention(heads: HeadShape) -> list[SimpleNamespace]:
    """What layers have for attention with these heads."""
    return [SimpleNamespace(heads=lambda spec, tp_size: heads)]


@pytest.mark.parametrize(
    ("backend", "parts", "expected"),
    [
        ("native", {}, "native"),
        ("triton", {}, "triton"),
        ("torch", {"attentions": of_attention(LATENTS)}, "torch"),
        ("native", {"attentions": of_attention(LATENTS)}, "native"),
        ("triton", {"attentions": of_attention(LATENTS)}, "torch"),
        ("native", {"vision": IMAGES}, "native"),
        ("native", {"vision": IMAGES, "rotations": BY_AXES}, "torch"),
        ("native", {"vision": BIDIRECTIONAL}, "torch"),
        ("triton", {"vision": BIDIRECTIONAL, "rotations": BY_AXES}, "triton"),
    ],
)
def test_what_kernels_cannot_do_with_a_share_of_the_keys_goes_to_torch(backend: Any, parts: dict, expected: str):
    spec: Any = SimpleNamespace(**{"attentions": of_attention(HEADS), "vision": None, "rotations": [None]} | parts)
    assert choose_divided_backend(backend, "auto", spec) == expected
    if expected != backend:
        with pytest.raises(InvalidConfig, match=f"attention_backend='{backend}': with context parallelism"):
            choose_divided_backend(backend, backend, spec)


WIDE = HeadShape(num_heads=4, num_kv_heads=1, head_dim=592, latent_rank=528)


@needs_kernels
def test_latent_attention_gets_kernels_unless_latents_are_too_large(caplog) -> None:
    assert choose("auto", CPU, LATENTS, block_size=7) == "native"
    assert choose("auto", CUDA, LATENTS) == "triton"
    assert choose("auto", CPU, WIDE) == choose("auto", CUDA, WIDE) == "torch"
    assert "the native kernels don't support kv_lora_rank=528 with 64 rotated elements" in caplog.text
    assert "kv_lora_rank=528 with 64 rotated elements: the GPU kernels expect even numbers" in caplog.text


INDEX = IndexShape(2, 64, 4, is_adjacent=True, num_rotated=32)


@needs_kernels
def test_the_log_says_that_no_kernels_attend_to_what_is_selected(caplog) -> None:
    assert choose("auto", CUDA, replace(LATENTS, index=INDEX)) == "torch"
    assert "no kernels for device='cuda' attend to selected tokens (index_topk)" in caplog.text
    assert choose("auto", CPU, replace(LATENTS, index=INDEX)) == "native"
    assert choose("auto", CPU, replace(HEADS, index=INDEX)) == "torch"
    assert "no kernels for device='cpu' attend to selected blocks (index_topk_blocks)" in caplog.text


@pytest.mark.parametrize(
    ("asked", "backend", "device"), [("int8_per_token_head", "native", CPU), ("fp8", "triton", CUDA)]
)
def test_latents_are_not_kept_in_8_bits(asked, backend, device) -> None:
    assert choose_cache_dtype("auto", backend, device, torch.float16, LATENTS) == torch.float16
    with pytest.raises(InvalidConfig, match=f"kv_cache_dtype='{asked}': the cache of latent attention"):
        choose_cache_dtype(asked, backend, device, torch.float16, LATENTS)


def test_an_installation_without_native_kernels_gets_the_torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    assert choose("auto", CPU) == choose_operations_backend("auto", CPU) == "torch"
    with pytest.raises(InvalidConfig, match="native kernels can't be used"):
        choose("native", CPU)


@needs_kernels
def test_the_backend_of_operations_is_the_one_asked_for() -> None:
    assert choose_operations_backend("torch", CPU) == choose_operations_backend("torch", CUDA) == "torch"
    assert choose_operations_backend("native", CPU) == "native"


def test_the_cache_has_the_models_dtype_or_the_8_bits_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_linear, "why_no_fp8", lambda device: None)
    assert choose_cache_dtype("auto", "torch", CPU, torch.float16, HEADS) == torch.float16
    assert choose_cache_dtype("int8_per_token_head", "native", CPU, torch.float16, HEADS) == torch.int8
    assert choose_cache_dtype("fp8", "triton", CUDA, torch.float16, HEADS) == torch.float8_e4m3fn
    assert choose_cache_dtype("fp8_e4m3", "triton", CUDA, torch.float16, HEADS) == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("asked", "backend", "device", "reason"),
    [
        ("int8_per_token_head", "torch", CPU, "needs attention_backend='native'.*by 'torch' on 'cpu'.*the error says"),
        ("int8_per_token_head", "triton", CUDA, "needs attention_backend='native'.*on 'cuda'. Use 'fp8'"),
        ("fp8", "torch", CUDA, "needs attention_backend='triton'.*by 'torch' on 'cuda'.*the error says"),
        ("fp8", "native", CPU, "needs attention_backend='triton'.*on 'cpu'. Use 'int8_per_token_head'"),
        ("fp8_e4m3", "triton", CUDA, "the GPU is old"),
    ],
)
def test_a_cache_dtype_that_the_backend_cannot_read_is_refused(
    asked, backend, device, reason: str, monkeypatch
) -> None:
    monkeypatch.setattr(fp8_linear, "why_no_fp8", lambda device: "the GPU is old")
    with pytest.raises(InvalidConfig, match=f"kv_cache_dtype='{asked}'.*{reason}"):
        choose_cache_dtype(asked, backend, device, torch.float16, HEADS)
