"""Streams that fail, and clients that leave."""

from __future__ import annotations

import asyncio

import pytest

from raycore.errors import EngineDeadError, RequestFailed

PATHS = {
    "/v1/completions": {"prompt": ["27 + 58 =", "1"]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "1"}]},
}
ERRORS = [
    (EngineDeadError("dp0 is gone\nTraceback: secret"), 503, "service_unavailable_error"),
    (RequestFailed("two ranks failed\nTraceback: secret"), 500, "server_error"),
    (RuntimeError("secret"), 500, "server_error"),
    (TimeoutError("secret"), 500, "server_error"),  # an OSError, as that of a connection that is gone
]


def failing_at(error, place):
    def at_token(index):
        if index == place:
            raise error

    return at_token


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("error", "status", "kind"), ERRORS)
def test_a_failure_during_a_stream_is_sent_as_an_error_event(client, engine, path, error, status, kind):
    engine.at_token = failing_at(error, 3)
    answer = client.post(path, PATHS[path] | {"stream": True})
    assert answer.status == 200
    *parts, last = answer.events
    assert parts
    assert all(part["choices"] for part in parts)
    assert last["error"]["type"] == kind
    assert "secret" not in answer.body.decode()
    assert engine.num_underway == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("error", "status", "kind"), ERRORS)
def test_a_failure_before_the_first_event_has_its_own_status(client, engine, path, is_stream, error, status, kind):
    engine.at_token = failing_at(error, 0)
    if isinstance(error, RuntimeError | OSError):
        with pytest.raises(type(error)):  # the server's outermost middleware answers, and raises it again for the log
            client.post(path, PATHS[path] | {"stream": is_stream})
    else:
        answer = client.post(path, PATHS[path] | {"stream": is_stream})
        assert answer.error == (status, kind, None)
        assert "secret" not in answer.body.decode()
    assert engine.num_underway == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("is_stream", "leave_after"), [(False, 0), (True, 0), (True, 2)])
def test_the_requests_of_a_client_that_disconnects_are_aborted(client, engine, path, is_stream, leave_after):
    async def run():
        never = asyncio.Event()
        engine.at_token = lambda index: None if index < 2 else never.wait()
        await client.call("POST", path, PATHS[path] | {"stream": is_stream}, leave_after=leave_after)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert engine.num_underway == 0
    assert engine.aborted == engine.request_ids
