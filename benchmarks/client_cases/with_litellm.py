"""LiteLLM, which passes requests of OpenAI's form on to providers."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import litellm

from client_cases.cases import CHAT, EMBEDS, MESSAGES, OPENAI_TOOL, PLAIN, TOOLS, Server, Town, case


def chat(server: Server, provider: str = "hosted_vllm", **fields: Any) -> Any:
    """The answer to a chat."""
    base = {"model": f"{provider}/{server.model}", "api_base": server.v1, "api_key": server.key}
    return litellm.completion(**base, **{"messages": MESSAGES, "max_tokens": 16, "num_retries": 0, **fields})


@case("litellm", "chat as of vLLM", PLAIN, CHAT)
def _(server: Server) -> None:
    assert chat(server).choices[0].message.content


@case("litellm", "chat as of OpenAI", PLAIN)
def _(server: Server) -> None:
    assert chat(server, "openai").usage.total_tokens > 0


@case("litellm", "streamed chat", PLAIN, CHAT)
def _(server: Server) -> None:
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content


@case("litellm", "async chat", PLAIN)
def _(server: Server) -> None:
    model = f"hosted_vllm/{server.model}"
    asked = {"model": model, "api_base": server.v1, "api_key": server.key, "messages": MESSAGES, "max_tokens": 4}
    assert asyncio.run(litellm.acompletion(**asked)).choices


@case("litellm", "tools, auto", PLAIN, TOOLS)
def _(server: Server) -> None:
    assert chat(server, tools=[OPENAI_TOOL], tool_choice="auto").choices


@case("litellm", "tools, required", CHAT, TOOLS)
def _(server: Server) -> None:
    answer = chat(server, tools=[OPENAI_TOOL], tool_choice="required", max_tokens=400)
    # LiteLLM leaves additionalProperties out, so that a small model goes on with further fields until it has no tokens
    # left. The required one comes first.
    arguments = answer.choices[0].message.tool_calls[0].function.arguments
    assert re.match(r'\{\s*"city"\s*:\s*"(Ulm|Bonn)"', arguments), arguments


@case("litellm", "response_format, a Pydantic model", PLAIN, CHAT)
def _(server: Server) -> None:
    answer = chat(server, response_format=Town, max_tokens=400)
    Town.model_validate_json(answer.choices[0].message.content)


@case("litellm", "log probabilities", PLAIN)
def _(server: Server) -> None:
    assert chat(server, logprobs=True, top_logprobs=1, max_tokens=2).choices[0].logprobs


@case("litellm", "completion", PLAIN)
def _(server: Server) -> None:
    base = {"model": f"hosted_vllm/{server.model}", "api_base": server.v1, "api_key": server.key}
    assert litellm.text_completion(prompt="27 + 58 =", max_tokens=4, **base).choices[0].text


@case("litellm", "Anthropic's messages", PLAIN)
def _(server: Server) -> None:
    base = {"model": f"hosted_vllm/{server.model}", "api_base": server.v1, "api_key": server.key}
    answer = asyncio.run(litellm.anthropic.messages.acreate(messages=MESSAGES, max_tokens=8, **base))
    assert answer["content"]


@case("litellm", "embeddings", EMBEDS)
def _(server: Server) -> None:
    base = {"model": f"hosted_vllm/{server.model}", "api_base": server.v1, "api_key": server.key}
    assert len(litellm.embedding(input=["a", "b"], **base).data) == 2
