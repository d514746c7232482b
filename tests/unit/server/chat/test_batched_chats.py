"""Several conversations in one request: a choice for each."""

from __future__ import annotations

import asyncio

import pytest
from asgi_client import Client
from fake_engine import FakeEngine

from raycore.server import ServerOptions, build_app
from raycore.server.generation.jobs import gathered

PATH = "/v1/chat/completions/batch"
FIRST = [{"role": "user", "content": "How many?"}]
SECOND = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def asked(engine: FakeEngine, **body: object):
    options = ServerOptions(("fake",), chat_template=TEMPLATE, max_sequences=3)
    return Client(build_app(engine, options)).post(PATH, {"messages": [FIRST, SECOND], **body})


def test_each_conversation_has_a_choice_and_the_usage_is_that_of_all():
    engine = FakeEngine("Seven.")
    answer = asked(engine, max_tokens=20, logprobs=True).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Seven.", "Seven."]
    prompts = [engine.tokenizer.decode(ids) for ids in engine.asked]
    assert sorted(prompts) == ["system: Be brief.\nuser: Why?\n", "user: How many?\n"]
    single = [Client(build_app(engine, ServerOptions(("fake",), chat_template=TEMPLATE))) for _ in "ab"]
    usages = [
        client.post("/v1/chat/completions", {"messages": messages}).json["usage"]
        for client, messages in zip(single, (FIRST, SECOND), strict=True)
    ]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(each[name] for each in usages)
    assert all(choice["logprobs"]["content"] for choice in answer["choices"])


def test_each_conversation_is_a_request_of_its_own_to_the_engine():
    engine = FakeEngine("Seven.")
    answer = asked(engine, request_id="mine").json
    assert answer["id"] == "chatcmpl-mine"
    assert sorted(engine.request_ids) == ["chatcmpl-mine_0", "chatcmpl-mine_1"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": FIRST}, "messages"),
        ({"messages": [FIRST] * 4}, "messages"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_makes_no_sense_for_several_conversations_is_refused(body, param):
    engine = FakeEngine("Seven.")
    assert asked(engine, **body).error == (400, "invalid_request_error", param)
    assert not engine.asked


def test_fields_without_effect_may_have_their_defaults():
    body = {"n": 1, "stream": False, "tools": [], "tool_choice": "none", "use_beam_search": False}
    assert asked(FakeEngine("Seven."), **body).status == 200


def test_if_a_conversation_is_too_long_none_is_run():
    engine = FakeEngine("Seven.", max_model_len=60)
    answer = asked(engine, messages=[FIRST, [{"role": "user", "content": "long " * 100}]])
    assert answer.error == (400, "invalid_request_error", "messages")
    assert not engine.asked


def test_cancelling_a_request_cancels_all_conversations():
    ended: list[str] = []

    async def call(name: str) -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)
        return name

    async def leave() -> None:
        task = asyncio.ensure_future(gathered([call("a"), call("b")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert ended == ["a", "b"]
