"""The kernels' checks in the benchmark of the GPU path find the interpreted kernels correct, and a wrong one not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import interpreted_triton  # before whatever imports Triton
import pytest
import torch
from gpu.checks import Checks
from gpu.kernels import Sizes, check_kernels
from gpu.latents import LatentSizes, check_latents
from gpu.states import TritonDelta, check_states

from raycore.kernels.gpu import rows
from raycore.kernels.gpu.latent_attention import LatentAttentionKernels
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.mamba2 import Mamba2Spec

SMALL = Sizes(
    dtype=torch.float32,
    num_tokens=12,
    dim=64,
    inner=48,
    vocab_size=300,
    num_rows=8,
    num_experts=4,
    per_token=2,
    expert_dim=24,
    head_dims=(16,),
    num_kv_heads=1,
    group=2,
    contexts=(1, 16, 130),
    chunks=((0, 20), (120, 5)),
)
LATENTS = LatentSizes(num_heads=(2,), rank=24, rotated_dim=8)
STATES = {
    "delta": DeltaSpec([True], 4, 16, 24, 3, num_k_heads=2, is_interleaved=True),
    "Mamba-2": Mamba2Spec([True], 4, 16, 24, 4, 2, has_conv_bias=True, least_time=0.2, longest_time=2.0),
}
FEW = dataclasses.replace(SMALL, num_rows=2, chunks=((0, 6), (120, 5)))
DEVICE = interpreted_triton.DEVICE.type


def test_the_benchmarks_kernel_checks_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks(print, DEVICE, tmp_path)
    check_kernels(checks, SMALL)
    assert checks.num_failed == 0, capsys.readouterr().out
    assert len(capsys.readouterr().out.splitlines()) == 13


def test_the_benchmarks_kernel_checks_find_a_wrong_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate_and_mul = rows.gate_and_mul
    monkeypatch.setattr(rows, "gate_and_mul", lambda gate, x: gate_and_mul(gate, x) * 1.001)
    checks = Checks(print, DEVICE, tmp_path)
    check_kernels(checks, dataclasses.replace(SMALL, head_dims=()))
    assert [line.split(":")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")] == [
        " gate_and_mul"
    ]


def test_the_benchmarks_checks_of_latents_and_states_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks(print, DEVICE, tmp_path)
    check_latents(checks, SMALL, LATENTS)
    check_states(checks, FEW, STATES)
    assert checks.num_failed == 0, capsys.readouterr().out
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_the_benchmarks_checks_of_latents_and_states_find_wrong_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attend, compute = LatentAttentionKernels.attend_tokens, TritonDelta.__call__

    def attend_wrongly(kernels, layer, fused_BX, locations, out_BX: torch.Tensor) -> None:
        attend(kernels, layer, fused_BX, locations, out_BX)
        out_BX *= 1.001

    monkeypatch.setattr(LatentAttentionKernels, "attend_tokens", attend_wrongly)
    monkeypatch.setattr(TritonDelta, "__call__", lambda *arguments: compute(*arguments) * 1.001)
    checks = Checks(print, DEVICE, tmp_path)
    check_latents(checks, SMALL, LATENTS)
    check_states(checks, FEW, {"delta": STATES["delta"]})
    assert [line.split(":")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")] == [
        " latent attention, 2 heads",
        " latent attention, 2 heads, batch-invariant",
        " delta",
    ]
