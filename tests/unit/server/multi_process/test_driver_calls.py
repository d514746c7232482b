"""Calls of an API server's process on the driver's engine: what crosses between them, without processes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from fake_engine import FakeEngine

from raycore.errors import EngineDeadError, InvalidInput, RaycoreError
from raycore.parts.adapters.server.adapters import OfferedAdapters
from raycore.server import ServerOptions
from raycore.server.dialects.responses.store import MemoryStore, Record
from raycore.server.http.errors import NotAllowed, NotFound
from raycore.server.multi_process.driver_calls import DriverCalls, run_call
from raycore.server.multi_process.reports import Report


async def exchange(engine: FakeEngine, method: str, store: MemoryStore | None = None, **arguments: object) -> object:
    """Make a call, and answer it as the driver does."""
    told: list[None] = []
    calls = DriverCalls(lambda: told.append(None))
    asked = asyncio.ensure_future(calls.call(method, **arguments))
    await asyncio.sleep(0)
    assert told == [None]
    assert calls.has_unsent()
    report = msgspec.msgpack.decode(msgspec.msgpack.encode(Report(calls=calls.take())), type=Report)
    assert not calls.has_unsent()
    (call,) = report.calls
    targets = engine, OfferedAdapters(engine, ServerOptions(("m",))), store or MemoryStore(8, 1 << 20)
    calls.finish(call.number, *await asyncio.to_thread(run_call, *targets, call))
    return await asked


def test_arguments_and_results_of_driver_calls_arrive(engine: FakeEngine) -> None:
    assert asyncio.run(exchange(engine, "wake_up", tags=["weights"])) is False
    assert asyncio.run(exchange(engine, "abort_requests", request_ids=["a", "b"])) == 2
    assert engine.calls == [("wake_up", ["weights"], True), ("abort_requests", ["a", "b"])]


def test_responses_and_events_are_stored_by_driver_calls(engine: FakeEngine) -> None:
    store = MemoryStore(8, 1 << 20)
    response = {"id": "a", "status": "in_progress", "previous_response_id": None, "output": []}
    record = msgspec.json.encode(Record(response, []))

    async def scenario() -> None:
        await exchange(engine, "add_response", store, record=record, keeps_events=True)
        assert await exchange(engine, "advance_response", store, response_id="a", events=[b"{}"], record=None)
        assert await exchange(engine, "load_responses", store, response_id="a", with_previous=True) == [record]
        assert await exchange(engine, "response_events", store, response_id="a", start=0) == ([b"{}"], True)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "arguments", "kind"),
    [
        ("sleep", {"level": 2, "mode": "abort"}, EngineDeadError),
        ("wake_up", {"tags": ["all"]}, InvalidInput),
        ("wake_up", {"limit": 3}, RaycoreError),
        ("load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, NotAllowed),
        ("load_lora_adapter", {"lora_name": "a", "lora_path": "a"}, InvalidInput),
        ("unload_lora_adapter", {"lora_name": "a"}, NotFound),
        ("load_responses", {"response_id": "a", "with_previous": True}, NotFound),
    ],
)
def test_errors_of_driver_calls_are_raised_in_the_server(
    engine: FakeEngine, method: str, arguments: dict[str, object], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        asyncio.run(exchange(engine, method, **arguments))


def test_the_answer_of_a_cancelled_driver_call_is_dropped() -> None:
    async def scenario() -> None:
        calls = DriverCalls(lambda: None)
        asked = asyncio.ensure_future(calls.call("is_paused"))
        await asyncio.sleep(0)
        (call,) = calls.take()
        asked.cancel()
        await asyncio.sleep(0)
        calls.finish(call.number, True, None)

    asyncio.run(scenario())
