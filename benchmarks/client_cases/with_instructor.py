"""Instructor, which makes Pydantic models of answers."""

from __future__ import annotations

from typing import Any

import instructor
from openai import OpenAI

from client_cases.cases import CHAT, MESSAGES, PLAIN, TOOLS, Server, Town, case


def parsed(server: Server, mode: instructor.Mode, **fields: Any) -> Any:
    """The model of the answer."""
    client = instructor.from_openai(OpenAI(base_url=server.v1, api_key=server.key, max_retries=0), mode=mode)
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 400, "max_retries": 0, **fields}
    return client.chat.completions.create(response_model=Town, **asked)


@case("instructor", "tools", PLAIN, CHAT, TOOLS)
def _(server: Server) -> None:
    assert isinstance(parsed(server, instructor.Mode.TOOLS), Town)


@case("instructor", "strict tools", TOOLS)
def _(server: Server) -> None:
    assert isinstance(parsed(server, instructor.Mode.TOOLS_STRICT), Town)


@case("instructor", "JSON schema", PLAIN, CHAT)
def _(server: Server) -> None:
    assert isinstance(parsed(server, instructor.Mode.JSON_SCHEMA), Town)


@case("instructor", "part by part", CHAT, TOOLS)
def _(server: Server) -> None:
    client = instructor.from_openai(
        OpenAI(base_url=server.v1, api_key=server.key, max_retries=0), mode=instructor.Mode.JSON_SCHEMA
    )
    parts = client.chat.completions.create_partial(
        model=server.model, messages=MESSAGES, max_tokens=400, response_model=Town
    )
    assert list(parts)[-1].name in ("Ulm", "Bonn")
