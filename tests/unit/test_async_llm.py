"""`AsyncLLM` has vLLM's names."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from raycore import AsyncLLM


def test_scale_elastic_ep_scales() -> None:
    calls: list[tuple[int, float]] = []
    llm = object.__new__(AsyncLLM)
    llm._calls = SimpleNamespace(scale=lambda *args: calls.append(args))  # pyright: ignore
    asyncio.run(llm.scale_elastic_ep(3))
    asyncio.run(llm.scale_elastic_ep(2, drain_timeout=0))
    assert calls == [(3, 300), (2, 0)]
