"""A worker is healthy if its device computes, also if that is a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raycore.worker import health
from raycore.worker.health import check_device
from raycore.worker.worker import Worker

CPU = torch.device("cpu")


def check(device: torch.device = CPU) -> None:
    """Check a worker on a device."""
    Worker.check_health(SimpleNamespace(device=device))  # pyright: ignore[reportArgumentType]


def test_a_device_that_computes_is_healthy() -> None:
    check()
    check_device(CPU)


def test_a_device_that_computes_wrongly_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(3, dtype=torch.int64)

    monkeypatch.setattr(health.torch, "arange", wrong)
    with pytest.raises(
        RuntimeError, match=r"cpu computes wrongly: the sum of 0 to 131071 is 8589869056, and it found 0"
    ):
        check()


def test_a_device_that_fails_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("not enough memory: you tried to allocate 1048576 bytes")

    monkeypatch.setattr(health.torch, "arange", fail)
    with pytest.raises(RuntimeError, match="not enough memory"):
        check()
