"""Anthropic's own client."""

from __future__ import annotations

import asyncio
from typing import Any

from anthropic import Anthropic, AsyncAnthropic, BadRequestError

from client_cases.cases import CHAT, FUNCTION, MESSAGES, PLAIN, SCHEMA, TOOLS, Server, Town, case

TOOL = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": SCHEMA}


def client_of(server: Server) -> Anthropic:
    """A client of a server."""
    return Anthropic(base_url=server.root, api_key=server.key, max_retries=0)


def ask(server: Server, **fields: Any) -> Any:
    """The message that answers."""
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 16, **fields}
    return client_of(server).messages.create(**asked)


@case("anthropic", "message, usage", PLAIN, CHAT, TOOLS)
def _(server: Server) -> None:
    message = ask(server, system="Be brief.")
    assert message.content[0].text
    assert message.usage.output_tokens > 0


@case("anthropic", "stream", PLAIN, CHAT, TOOLS)
def _(server: Server) -> None:
    with client_of(server).messages.stream(model=server.model, messages=MESSAGES, max_tokens=16) as stream:
        text = "".join(stream.text_stream)
        assert text == stream.get_final_message().content[0].text


@case("anthropic", "async message", PLAIN)
def _(server: Server) -> None:
    async def run() -> Any:
        async with AsyncAnthropic(base_url=server.root, api_key=server.key) as client:
            return await client.messages.create(model=server.model, messages=MESSAGES, max_tokens=4)

    assert asyncio.run(run()).content


@case("anthropic", "tools, auto", CHAT, TOOLS)
def _(server: Server) -> None:
    assert ask(server, tools=[TOOL]).content


@case("anthropic", "tools, any, and the result", CHAT, TOOLS)
def _(server: Server) -> None:
    # one call: a small model goes on with calls until it has no tokens left
    first = ask(server, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=400)
    call = first.content[-1]
    assert call.input["city"] in ("Ulm", "Bonn")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "No such town.", "is_error": True}
    turns = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert ask(server, tools=[TOOL], messages=turns).content


@case("anthropic", "tools, named, streamed", TOOLS)
def _(server: Server) -> None:
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 400, "tools": [TOOL]}
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    with client_of(server).messages.stream(**asked, tool_choice=choice) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    assert message.content[-1].input["city"] in ("Ulm", "Bonn")


@case("anthropic", "parse(), a Pydantic model", PLAIN, CHAT)
def _(server: Server) -> None:
    message = client_of(server).messages.parse(
        model=server.model, messages=MESSAGES, max_tokens=400, output_format=Town
    )
    assert isinstance(message.parsed_output, Town)


@case("anthropic", "count of tokens", PLAIN, CHAT)
def _(server: Server) -> None:
    counted = client_of(server).messages.count_tokens(model=server.model, messages=MESSAGES)
    usage = ask(server, max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@case("anthropic", "stop sequences, sampling", PLAIN)
def _(server: Server) -> None:
    message = ask(server, stop_sequences=["e"], max_tokens=60, extra_body={"temperature": 1.0, "top_k": 5})
    assert message.stop_reason in ("stop_sequence", "max_tokens", "end_turn")


@case("anthropic", "an error", PLAIN)
def _(server: Server) -> None:
    try:
        ask(server, messages=[])
    except BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error"  # noqa: PT017
    else:
        raise AssertionError("the request was answered")
