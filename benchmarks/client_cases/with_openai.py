"""OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError, OpenAI

from client_cases.cases import CHAT, EMBEDS, MESSAGES, OPENAI_TOOL, PLAIN, TOOLS, Server, Town, case

NAMED = {"type": "function", "function": {"name": "get_weather"}}


def chat(server: Server, **fields: Any) -> Any:
    """The answer to a chat."""
    client = OpenAI(base_url=server.v1, api_key=server.key, max_retries=0)
    return client.chat.completions.create(**{"model": server.model, "messages": MESSAGES, "max_tokens": 16, **fields})


def complete(server: Server, **fields: Any) -> Any:
    """The answer to a completion."""
    client = OpenAI(base_url=server.v1, api_key=server.key, max_retries=0)
    return client.completions.create(**{"model": server.model, "prompt": "27 + 58 =", "max_tokens": 4, **fields})


def arguments(answer: Any) -> dict[str, Any]:
    """Those of the answer's first call."""
    return json.loads(answer.choices[0].message.tool_calls[0].function.arguments)


@case("openai", "chat", PLAIN, CHAT, TOOLS)
def _(server: Server) -> None:
    answer = chat(server)
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@case("openai", "streamed chat, usage", PLAIN, CHAT, TOOLS)
def _(server: Server) -> None:
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0


@case("openai", "async chat", PLAIN)
def _(server: Server) -> None:
    async def ask() -> Any:
        async with AsyncOpenAI(base_url=server.v1, api_key=server.key) as client:
            return await client.chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=4)

    assert asyncio.run(ask()).choices


@case("openai", "null and unknown fields", PLAIN)
def _(server: Server) -> None:
    nulls = dict.fromkeys(("tools", "tool_choice", "functions", "stop", "logit_bias", "seed", "n", "stream", "user"))
    assert chat(server, extra_body={**nulls, "an_unknown_field": 1}).choices


@case("openai", "tools, auto", PLAIN, CHAT, TOOLS)
def _(server: Server) -> None:
    message = chat(server, tools=[OPENAI_TOOL], tool_choice="auto").choices[0].message
    assert message.content or message.tool_calls


@case("openai", "tools, required", PLAIN, CHAT, TOOLS)
def _(server: Server) -> None:
    answer = chat(server, tools=[OPENAI_TOOL], tool_choice="required", max_tokens=400)
    assert arguments(answer)["city"] in ("Ulm", "Bonn")


@case("openai", "tools, named", CHAT, TOOLS)
def _(server: Server) -> None:
    answer = chat(server, tools=[OPENAI_TOOL], tool_choice=NAMED, max_tokens=400)
    assert arguments(answer)["city"] in ("Ulm", "Bonn")


@case("openai", "tools, streamed", CHAT, TOOLS)
def _(server: Server) -> None:
    chunks = chat(server, tools=[OPENAI_TOOL], tool_choice="required", max_tokens=400, stream=True)
    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "get_weather"
    assert json.loads("".join(call.function.arguments or "" for call in calls if call.index == 0))["city"]


@case("openai", "tools, parallel", TOOLS)
def _(server: Server) -> None:
    answer = chat(server, tools=[OPENAI_TOOL], tool_choice="auto", parallel_tool_calls=True)
    assert answer.choices


@case("openai", "a tool's result", PLAIN, CHAT, TOOLS)
def _(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
    ]
    assert chat(server, messages=turns, tools=[OPENAI_TOOL]).choices[0].message


@case("openai", "parse(), a Pydantic model", PLAIN, CHAT)
def _(server: Server) -> None:
    client = OpenAI(base_url=server.v1, api_key=server.key)
    answer = client.chat.completions.parse(model=server.model, messages=MESSAGES, response_format=Town, max_tokens=400)
    assert isinstance(answer.choices[0].message.parsed, Town)


@case("openai", "structured_outputs, a regular expression", PLAIN)
def _(server: Server) -> None:
    answer = chat(server, extra_body={"structured_outputs": {"regex": "[0-9]{3}"}})
    assert answer.choices[0].message.content.isdigit()


@case("openai", "log probabilities of a chat", PLAIN, CHAT)
def _(server: Server) -> None:
    content = chat(server, logprobs=True, top_logprobs=2, max_tokens=2).choices[0].logprobs.content
    assert len(content) == 2
    assert len(content[0].top_logprobs) == 2


@case("openai", "log probabilities of a completion, echo", PLAIN, CHAT)
def _(server: Server) -> None:
    logprobs = complete(server, logprobs=1, echo=True, max_tokens=1).choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


@case("openai", "several prompts, n", PLAIN)
def _(server: Server) -> None:
    assert len(complete(server, prompt=["a", "b"], n=2, temperature=1.0).choices) == 4


@case("openai", "token ids", PLAIN, CHAT)
def _(server: Server) -> None:
    choice = complete(server, prompt=[5, 6, 7], extra_body={"return_token_ids": True}).choices[0]
    assert choice.token_ids
    assert choice.prompt_token_ids == [5, 6, 7]


@case("openai", "the list of models", PLAIN)
def _(server: Server) -> None:
    client = OpenAI(base_url=server.v1, api_key=server.key)
    assert server.model in [model.id for model in client.models.list()]


@case("openai", "an error", PLAIN)
def _(server: Server) -> None:
    try:
        chat(server, temperature=-1)
    except BadRequestError as error:
        assert "temperature" in str(error)  # noqa: PT017
    else:
        raise AssertionError("the request was answered")


@case("openai", "responses", PLAIN, CHAT)
def _(server: Server) -> None:
    client = OpenAI(base_url=server.v1, api_key=server.key, max_retries=0)
    answer = client.responses.create(model=server.model, input="Hello", max_output_tokens=16)
    assert answer.output_text


@case("openai", "embeddings", EMBEDS)
def _(server: Server) -> None:
    client = OpenAI(base_url=server.v1, api_key=server.key)
    first, second = client.embeddings.create(model=server.model, input=["a", "b"]).data
    assert len(first.embedding) == len(second.embedding) > 1
