"""The kernels' checks in the benchmark of the GPU path find the interpreted kernels correct, and a wrong one not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import interpreted_triton  # before whatever imports Triton
import pytest
import torch
from gpu_checks import Checks
from gpu_kernels import Sizes, check_kernels

from raycore.kernels.gpu import rows

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
DEVICE = interpreted_triton.DEVICE.type


def test_the_benchmarks_kernel_checks_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks(print, DEVICE, tmp_path)
    check_kernels(checks, SMALL)
    assert checks.num_failed == 0, capsys.readouterr().out
    assert len(capsys.readouterr().out.splitlines()) == 12


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
