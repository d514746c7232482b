"""Futures in the place of the refs of ranks' replies."""

from __future__ import annotations

from concurrent import futures
from concurrent.futures import Future
from typing import Any

import pytest


def use_futures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver wait for futures where it waits for refs."""
    monkeypatch.setattr("raycore.control.replies.wait", _wait)
    monkeypatch.setattr("raycore.control.replies.get", lambda ref: ref.result())


def _wait(refs: list[Future[Any]], num_returns: int, timeout_s: float) -> tuple[list[Any], list[Any]]:
    done, _ = futures.wait(refs, timeout_s, return_when=futures.FIRST_COMPLETED)
    return [ref for ref in refs if ref in done], [ref for ref in refs if ref not in done]
