"""`AsyncLLM` has vLLM's names, and makes the calls of `LLM` on threads of their own."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

from waiting import LONG_S

from raycore import AsyncLLM


def engine(**parts: object) -> AsyncLLM:
    llm = object.__new__(AsyncLLM)
    llm._parts = SimpleNamespace(**parts)  # pyright: ignore
    return llm


def test_scale_elastic_ep_scales() -> None:
    calls: list[tuple[int, float]] = []
    llm = engine(supervisor=SimpleNamespace(scale=lambda *args: calls.append(args)))
    asyncio.run(llm.scale_elastic_ep(3))
    asyncio.run(llm.scale_elastic_ep(2, drain_timeout=0))
    assert calls == [(3, 300), (2, 0)]


def test_an_async_call_blocks_no_event_loop_and_continues_when_it_is_cancelled() -> None:
    is_called, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def resume() -> None:
        is_called.set()
        assert may_end.wait(LONG_S)
        has_ended.set()

    async def scenario() -> None:
        call = asyncio.ensure_future(engine(pauses=SimpleNamespace(resume=resume)).resume_generation())
        while not is_called.is_set():
            await asyncio.sleep(0)
        call.cancel()
        assert (await asyncio.gather(call, return_exceptions=True))[0].__class__ is asyncio.CancelledError

    asyncio.run(scenario())
    may_end.set()
    assert has_ended.wait(LONG_S)


def test_the_state_of_an_engine_has_vllms_names() -> None:
    llm = engine()
    llm.clients = SimpleNamespace(num_unfinished_requests=2)  # pyright: ignore
    aborted: list[object] = []
    llm._client = SimpleNamespace(  # pyright: ignore
        failure=None, unavailable_reason=None, abort=lambda ids, notify: aborted.append((ids, notify))
    )
    assert (llm.is_running, llm.errored, llm.is_stopped) == (True, False, False)
    assert llm.output_processor.has_unfinished_requests()
    assert llm.output_processor.get_num_unfinished_requests() == llm.get_num_unfinished_requests() == 2
    asyncio.run(llm.abort("a"))
    asyncio.run(llm.abort(["b", "c"]))
    assert aborted == [(["a"], True), (["b", "c"], True)]
    error = ValueError("gone")
    llm._client = SimpleNamespace(failure=error, unavailable_reason="gone")  # pyright: ignore
    assert (llm.is_running, llm.errored, llm.is_stopped, llm.dead_error) == (False, True, True, error)
