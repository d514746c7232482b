"""The store of responses, by itself."""

from __future__ import annotations

import asyncio
import inspect

import msgspec
import pytest

from raycore.errors import InvalidRequest
from raycore.server.dialects.responses.store import SILENT_S, STORE_CALLS, MemoryStore, Record
from raycore.server.http.errors import NotFound
from raycore.server.multi_process.client_store import ClientStore


def record(name, status="completed", previous=None, text=""):
    response = {"id": name, "status": status, "previous_response_id": previous, "output": [{"id": f"o_{name}"}]}
    return msgspec.json.encode(Record(response, [{"id": f"i_{name}", "text": text}]))


def add(store, *args, keeps_events=False, **kwargs):
    asyncio.run(store.add_response(record(*args, **kwargs), keeps_events))


def ids(store, name, with_previous=True):
    found = asyncio.run(store.load_responses(name, with_previous))
    return [msgspec.json.decode(each, type=Record).response["id"] for each in found]


def status(store, name):
    (found,) = asyncio.run(store.load_responses(name, False))
    return msgspec.json.decode(found, type=Record).response["status"]


def test_a_chain_is_loaded_from_its_beginning():
    store = MemoryStore(8, 1 << 20)
    add(store, "a")
    add(store, "b", previous="a")
    add(store, "c", previous="b")
    assert ids(store, "c") == ["a", "b", "c"]
    assert ids(store, "c", with_previous=False) == ["c"]


def test_a_chain_whose_beginning_was_replaced_by_a_later_response_is_not_stored():
    store = MemoryStore(8, 1 << 20)
    add(store, "a")
    add(store, "b", previous="a")
    add(store, "a", previous="b")
    for name in "ab":
        with pytest.raises(NotFound, match="no longer stored"):
            ids(store, name)


def test_a_response_that_runs_is_not_replaced():
    now_s = [0.0]
    store = MemoryStore(8, 1 << 20, lambda: now_s[0])
    add(store, "a", "in_progress")
    with pytest.raises(InvalidRequest, match="request_id: response 'a' hasn't ended"):
        add(store, "a", "in_progress")
    now_s[0] = SILENT_S + 1
    add(store, "a", "queued")
    assert status(store, "a") == "queued"


def test_a_chain_that_is_used_stays():
    store = MemoryStore(3, 1 << 20)
    add(store, "a")
    add(store, "b", previous="a")
    add(store, "x")
    ids(store, "b")
    add(store, "y")
    assert ids(store, "b") == ["a", "b"]
    with pytest.raises(NotFound, match="'x'"):
        ids(store, "x")


def test_the_bytes_of_all_responses_are_limited():
    one = len(record("a", text="t" * 100))
    store = MemoryStore(8, 2 * one)
    for name in "abc":
        add(store, name, text="t" * 100)
    with pytest.raises(NotFound):
        ids(store, "a")
    assert ids(store, "b") == ["b"]
    add(store, "d", text="t" * 3 * one)
    assert ids(store, "b") == ["b"], "what is too large makes nothing else leave"
    with pytest.raises(NotFound):
        ids(store, "d")


def test_events_count_as_bytes_and_a_running_response_stays():
    store = MemoryStore(8, 1000)
    add(store, "a", status="in_progress", keeps_events=True)
    add(store, "b")
    assert asyncio.run(store.advance_response("a", [b"e" * 900], None))
    with pytest.raises(NotFound):
        ids(store, "b")
    assert asyncio.run(store.response_events("a", 0)) == ([b"e" * 900], True)
    assert asyncio.run(store.response_events("a", 1)) == ([], True)


def test_a_response_that_was_ended_goes_no_further():
    store = MemoryStore(8, 1 << 20)
    for name in "abc":
        add(store, name, status="in_progress")
        assert asyncio.run(store.advance_response(name, [], None))
    asyncio.run(store.cancel_response("a"))
    asyncio.run(store.delete_response("b"))
    assert asyncio.run(store.advance_response("c", [], record("c")))
    for name in "abc":
        assert not asyncio.run(store.advance_response(name, [], record(name)))
    assert (status(store, "a"), status(store, "c")) == ("cancelled", "completed")


def test_a_response_whose_process_has_ended_has_failed():
    now = [0.0]
    store = MemoryStore(8, 1 << 20, clock=lambda: now[0])
    add(store, "a", status="in_progress", keeps_events=True)
    now[0] = SILENT_S
    assert status(store, "a") == "in_progress"
    assert asyncio.run(store.advance_response("a", [], None))
    now[0] = 2 * SILENT_S + 1
    assert asyncio.run(store.response_events("a", 0)) == ([], False)
    assert status(store, "a") == "failed"


def test_items_are_found_in_any_order():
    store = MemoryStore(8, 1 << 20)
    add(store, "a")
    add(store, "b")
    found = asyncio.run(store.find_items(["o_b", "i_a", "o_a"]))
    assert [msgspec.json.decode(each)["id"] for each in found] == ["o_b", "i_a", "o_a"]
    asyncio.run(store.delete_response("a"))
    with pytest.raises(NotFound, match="'i_a'"):
        asyncio.run(store.find_items(["i_a"]))


def test_the_store_of_an_api_server_makes_the_same_calls_on_the_drivers():
    calls = []

    class Driver:
        async def call(self, method, **arguments):
            calls.append((method, arguments))

    for name in STORE_CALLS:
        of_driver = inspect.signature(getattr(MemoryStore, name)).parameters
        arguments = {parameter: object() for parameter in of_driver if parameter != "self"}
        asyncio.run(getattr(ClientStore(Driver()), name)(**arguments))
        assert calls[-1] == (name, arguments)
