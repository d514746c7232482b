"""LangChain's package for OpenAI's API."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from client_cases.cases import CHAT, EMBEDS, PLAIN, TOOLS, Server, Town, case

ASKED = "Which town is warm?"


@tool
def get_weather(city: str) -> str:
    """The weather of a town."""
    return f"21 degrees in {city}"


def model_of(server: Server, **fields: Any) -> ChatOpenAI:
    """The server's model."""
    base = {"base_url": server.v1, "api_key": server.key, "model": server.model, "max_retries": 0}
    return ChatOpenAI(**base, **{"max_tokens": 16, **fields})


@case("langchain-openai", "invoke, usage", PLAIN, CHAT)
def _(server: Server) -> None:
    answer = model_of(server).invoke(ASKED)
    assert answer.content
    assert answer.usage_metadata["total_tokens"] > 0


@case("langchain-openai", "stream", PLAIN, CHAT)
def _(server: Server) -> None:
    assert "".join(chunk.content for chunk in model_of(server, stream_usage=True).stream(ASKED))


@case("langchain-openai", "ainvoke, batch", PLAIN)
def _(server: Server) -> None:
    assert asyncio.run(model_of(server).ainvoke(ASKED)).content
    assert len(model_of(server).batch(["a", "b"])) == 2


@case("langchain-openai", "bind_tools, auto", PLAIN, CHAT, TOOLS)
def _(server: Server) -> None:
    answer = model_of(server).bind_tools([get_weather]).invoke(ASKED)
    assert answer.content or answer.tool_calls or answer.invalid_tool_calls


@case("langchain-openai", "bind_tools, a named one, and the result", TOOLS)
def _(server: Server) -> None:
    asked = model_of(server, max_tokens=400, temperature=0).bind_tools([get_weather], tool_choice="get_weather")
    answer = asked.invoke(ASKED)
    assert answer.tool_calls or answer.invalid_tool_calls
    call = {"name": "get_weather", "args": {"city": "Ulm"}, "id": "call_1", "type": "tool_call"}
    turns = [HumanMessage(ASKED), AIMessage("", tool_calls=[call]), ToolMessage("21", tool_call_id="call_1")]
    assert model_of(server).bind_tools([get_weather]).invoke(turns)


@case("langchain-openai", "with_structured_output, json_schema", PLAIN, CHAT)
def _(server: Server) -> None:
    assert isinstance(model_of(server, max_tokens=400).with_structured_output(Town).invoke(ASKED), Town)


@case("langchain-openai", "with_structured_output, function_calling", CHAT, TOOLS)
def _(server: Server) -> None:
    asked = model_of(server, max_tokens=400).with_structured_output(Town, method="function_calling")
    assert isinstance(asked.invoke(ASKED), Town)


@case("langchain-openai", "log probabilities", PLAIN)
def _(server: Server) -> None:
    answer = model_of(server, logprobs=True, top_logprobs=1).invoke(ASKED)
    assert answer.response_metadata["logprobs"]["content"]


@case("langchain-openai", "completion", PLAIN)
def _(server: Server) -> None:
    model = OpenAI(base_url=server.v1, api_key=server.key, model=server.model, max_tokens=4)
    assert model.invoke("27 + 58 =")


@case("langchain-openai", "the Responses API", PLAIN)
def _(server: Server) -> None:
    assert model_of(server, use_responses_api=True).invoke(ASKED).content


@case("langchain-openai", "embeddings", EMBEDS)
def _(server: Server) -> None:
    base = {"base_url": server.v1, "api_key": server.key, "model": server.model}
    assert len(OpenAIEmbeddings(**base, check_embedding_ctx_length=False).embed_documents(["a", "b"])) == 2
