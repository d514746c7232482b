"""Responses that are stored, continued, listed, deleted, and run in the background."""

from __future__ import annotations

import asyncio

import pytest
from responding import CALL, TOOL, Responder, events_of, shown

from raycore.server.dialects.responses import background
from raycore.server.dialects.responses.store import MemoryStore

PATH = "/v1/responses"


@pytest.fixture(autouse=True)
def tells_often(monkeypatch):
    monkeypatch.setattr(background, "TELL_S", 0.01)


def call(responder, method, path, body=None, **kwargs):
    return responder.client.call(method, path, body, **kwargs)


async def ended(responder, response_id):
    """The response in the background, once it has ended."""
    while True:
        response = (await call(responder, "GET", f"{PATH}/{response_id}")).json
        if response["status"] not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.005)


def test_a_stored_response_can_be_had_until_it_is_deleted():
    responder = Responder()
    response = responder.answer()
    path = f"{PATH}/{response['id']}"
    assert responder.client.get(path).json == response
    deleted = asyncio.run(call(responder, "DELETE", path))
    assert deleted.json == {"id": response["id"], "object": "response", "deleted": True}
    assert responder.client.get(path).error == (404, "invalid_request_error", "response_id")
    assert asyncio.run(call(responder, "DELETE", path)).status == 404


def test_a_streamed_response_is_stored_when_its_last_event_comes():
    responder = Responder()
    response = responder.events()[-1]["response"]
    assert responder.client.get(f"{PATH}/{response['id']}").json == response


@pytest.mark.parametrize("path", ["", "/input_items", "/cancel"])
def test_what_is_not_stored_does_not_exist(path):
    responder = Responder()
    response = responder.answer(store=False)
    answer = asyncio.run(call(responder, "POST" if path == "/cancel" else "GET", f"{PATH}/{response['id']}{path}"))
    assert answer.error == (404, "invalid_request_error", "response_id")
    assert response["id"] in answer.json["error"]["message"]


def test_a_response_continues_an_earlier_one():
    responder = Responder(CALL)
    first = responder.answer("When?", instructions="Be brief.", tools=[TOOL])
    call_id = first["output"][0]["call_id"]
    responder.engine.text = "Noon."
    output = [{"type": "function_call_output", "call_id": call_id, "output": "12:00"}]
    second = responder.answer(output, previous_response_id=first["id"], tools=[TOOL])
    assert second["previous_response_id"] == first["id"]
    for words in ("When?", '"city": "Ulm"', "12:00"):
        assert words in responder.last_prompt
    assert "Be brief." not in responder.last_prompt
    prompt = responder.prompt("Why?", previous_response_id=second["id"])
    assert [prompt.index(words) for words in ("When?", "12:00", "Noon.", "Why?")] == sorted(
        prompt.index(words) for words in ("When?", "12:00", "Noon.", "Why?")
    )


def test_a_chain_with_a_missing_response_cannot_be_continued():
    responder = Responder()
    first = responder.answer()
    second = responder.answer(previous_response_id=first["id"])
    assert asyncio.run(call(responder, "DELETE", f"{PATH}/{first['id']}")).status == 200
    answer = responder.post(previous_response_id=second["id"])
    assert answer.error == (400, "invalid_request_error", "previous_response_id")
    assert answer.json["error"]["code"] == "previous_response_not_found"
    assert first["id"] in answer.json["error"]["message"]


def test_items_can_be_referred_to():
    responder = Responder()
    (message,) = responder.answer()["output"]
    prompt = responder.prompt([{"type": "item_reference", "id": message["id"]}, {"role": "user", "content": "Why?"}])
    assert prompt.index("Seven.") < prompt.index("Why?")
    assert responder.prompt([{"id": message["id"]}, {"role": "user", "content": "Why?"}]) == prompt
    answer = responder.post([{"type": "item_reference", "id": "msg_0"}])
    assert (answer.status, answer.json["error"]["param"]) == (404, "input")


def test_an_item_is_in_a_conversation_only_once():
    responder = Responder()
    first = responder.answer()
    answer = responder.post(first["output"], previous_response_id=first["id"])
    assert answer.error == (400, "invalid_request_error", "input")


def test_the_items_of_a_response_are_listed_in_pages():
    responder = Responder()
    first = responder.answer([{"role": "user", "content": "a", "id": "msg_a"}, {"role": "user", "content": "b"}])
    second = responder.answer("c", previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    listed = responder.client.get(f"{path}?order=asc").json
    assert shown(listed["data"]) == [("message", text) for text in ("a", "b", "Seven.", "c")]
    ids = [item["id"] for item in listed["data"]]
    assert ids[0] == "msg_a"
    assert (listed["object"], listed["first_id"], listed["last_id"], listed["has_more"]) == (
        "list",
        "msg_a",
        ids[3],
        False,
    )
    page = responder.client.get(f"{path}?limit=2&after={ids[3]}").json
    assert [item["id"] for item in page["data"]] == [ids[2], ids[1]]
    assert page["has_more"]
    assert responder.client.get(f"{path}?limit=2&after={ids[1]}").json["has_more"] is False
    for query, param in (("limit=0", "limit"), ("after=x", "after"), ("order=up", "order")):
        assert responder.client.get(f"{path}?{query}").error == (400, "invalid_request_error", param)


def test_responses_used_longest_ago_make_room():
    responder = Responder(max_stored_responses=2)
    first, second = responder.answer(), responder.answer()
    assert responder.client.get(f"{PATH}/{first['id']}").status == 200
    third = responder.answer()
    statuses = [responder.client.get(f"{PATH}/{each['id']}").status for each in (first, second, third)]
    assert statuses == [200, 404, 200]


def test_a_server_may_store_nothing():
    responder = Responder(max_stored_responses=0)
    response = responder.answer()
    assert response["store"] is False
    assert responder.client.get(f"{PATH}/{response['id']}").status == 404
    assert responder.post(background=True).error == (400, "invalid_request_error", "background")


def test_a_request_that_is_too_large_to_store_is_refused():
    responder = Responder(max_stored_response_bytes=500)
    assert responder.post("x" * 600).error == (400, "invalid_request_error", "store")
    assert responder.post("x" * 600, store=False).status == 200


def test_a_response_in_the_background_can_be_polled():
    responder = Responder("Seven." * 5)

    async def scenario():
        asked = (await call(responder, "POST", PATH, {"input": "How many?", "background": True})).json
        assert (asked["status"], asked["background"], asked["output"]) == ("queued", True, [])
        assert (await call(responder, "GET", "/load")).json == {"server_load": 1}
        response = await ended(responder, asked["id"])
        assert (await call(responder, "GET", "/load")).json == {"server_load": 0}
        streamed = await call(responder, "GET", f"{PATH}/{asked['id']}?stream=true")
        assert streamed.status == 404
        return response

    response = asyncio.run(scenario())
    assert (response["status"], shown(response["output"])) == ("completed", [("message", "Seven." * 5)])


def test_a_response_in_the_background_outlives_its_stream_which_can_be_had_again():
    responder = Responder("Seven." * 20)
    responder.engine.at_token = lambda index: asyncio.sleep(0.002)

    async def scenario():
        asked = {"input": "How many?", "background": True, "stream": True}
        begun = events_of(await call(responder, "POST", PATH, asked, leave_after=8))
        response_id = begun[0]["response"]["id"]
        path = f"{PATH}/{response_id}?stream=true&starting_after={begun[-1]['sequence_number']}"
        rest = events_of(await call(responder, "GET", path))
        response = await ended(responder, response_id)
        again = events_of(await call(responder, "GET", f"{PATH}/{response_id}?stream=true"))
        return begun, rest, again, response

    begun, rest, again, response = asyncio.run(scenario())
    assert not responder.engine.aborted
    kinds = ["response.created", "response.queued", "response.in_progress", "response.output_item.added"]
    assert [event["type"] for event in begun[:4]] == kinds
    assert [event["response"]["status"] for event in begun[:3]] == ["queued", "queued", "in_progress"]
    assert begun + rest == again
    assert again[-1]["type"] == "response.completed"
    assert again[-1]["response"] == response


def test_a_response_in_the_background_can_be_cancelled():
    responder = Responder("Seven." * 400)
    responder.engine.at_token = lambda index: asyncio.sleep(0.001)

    async def scenario():
        asked = (await call(responder, "POST", PATH, {"input": "How many?", "background": True})).json
        await asyncio.sleep(0.05)
        path = f"{PATH}/{asked['id']}"
        assert (await call(responder, "POST", PATH, {"input": "?", "previous_response_id": asked["id"]})).status == 400
        cancelled = (await call(responder, "POST", f"{path}/cancel")).json
        assert cancelled["status"] == "cancelled"
        assert (await call(responder, "POST", f"{path}/cancel")).json == cancelled
        assert (await call(responder, "GET", path)).json == cancelled
        while responder.engine.num_underway:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.03)
        assert (await call(responder, "GET", path)).json == cancelled

    asyncio.run(scenario())
    assert len(responder.engine.aborted) == 1


@pytest.mark.parametrize("is_other_process", [False, True])
def test_a_response_in_the_background_keeps_its_id_while_it_runs(is_other_process):
    store = MemoryStore(8, 1 << 20)
    responder = Responder("Seven." * 20, store)
    responder.engine.at_token = lambda index: asyncio.sleep(0.002)
    other = Responder(store=store) if is_other_process else responder

    async def scenario():
        asked = {"input": "How many?", "background": True, "request_id": "same"}
        first = (await call(responder, "POST", PATH, asked)).json
        second = await call(other, "POST", PATH, asked)
        response = await ended(responder, first["id"])
        while (await call(responder, "GET", "/load")).json["server_load"]:
            await asyncio.sleep(0.005)
        return second, response, (await call(responder, "POST", PATH, asked)).status

    second, response, status = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert second.error == (400, "invalid_request_error", "request_id")
    assert "resp_same" in second.json["error"]["message"]
    assert (response["status"], shown(response["output"])) == ("completed", [("message", "Seven." * 20)])
    assert status == 200


def test_a_response_continues_no_conversation_that_it_is_in():
    responder = Responder()
    first = responder.answer(request_id="a")
    second = responder.answer(previous_response_id=first["id"])
    answer = responder.post(request_id="a", previous_response_id=second["id"])
    assert answer.error == (400, "invalid_request_error", "request_id")
    assert "'resp_a'" in answer.json["error"]["message"]
    assert responder.answer(previous_response_id=second["id"])["status"] == "completed"


def test_only_responses_in_the_background_can_be_cancelled():
    responder = Responder()
    answer = asyncio.run(call(responder, "POST", f"{PATH}/{responder.answer()['id']}/cancel"))
    assert answer.error == (400, "invalid_request_error", None)


@pytest.mark.parametrize("way", ["cancel", "delete"])
def test_another_process_can_end_a_response_in_the_background(way):
    store = MemoryStore(8, 1 << 20)
    here, there = Responder("Seven." * 400, store), Responder(store=store)
    here.engine.at_token = lambda index: asyncio.sleep(0.001)

    async def scenario():
        asked = {"input": "How many?", "background": True, "stream": True}
        begun = events_of(await call(here, "POST", PATH, asked, leave_after=5))
        path = f"{PATH}/{begun[0]['response']['id']}"
        follows = asyncio.ensure_future(call(there, "GET", f"{path}?stream=true"))
        await asyncio.sleep(0.05)
        answer = await call(there, *(("DELETE", path) if way == "delete" else ("POST", f"{path}/cancel")))
        assert answer.status == 200
        while here.engine.num_underway:
            await asyncio.sleep(0.005)
        return events_of(await follows), (await call(there, "GET", path)).status

    followed, status = asyncio.run(scenario())
    assert len(here.engine.aborted) == 1
    assert [event["type"] for event in followed][:2] == ["response.created", "response.queued"]
    assert followed[-1]["type"] == ("error" if way == "delete" else "response.output_text.delta")
    assert status == (404 if way == "delete" else 200)


def test_a_failure_in_the_background_is_the_response():
    responder = Responder()

    def fail(index):
        raise RuntimeError("secret")

    responder.engine.at_token = fail

    async def scenario():
        asked = (await call(responder, "POST", PATH, {"input": "How many?", "background": True})).json
        return await ended(responder, asked["id"])

    response = asyncio.run(scenario())
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "internal error; see the server's log"}
