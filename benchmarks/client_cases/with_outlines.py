"""Outlines, with its models for vLLM's servers and OpenAI's."""

from __future__ import annotations

from typing import Any, Literal

import openai
import outlines
from outlines.types import Regex

from client_cases.cases import CHAT, PLAIN, Server, Town, case

ASKED = "Which town is warm?"


def model_of(server: Server) -> Any:
    """The model as one of a vLLM server."""
    client = openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0)
    return outlines.from_vllm(client, server.model)


@case("outlines", "text", PLAIN, CHAT)
def _(server: Server) -> None:
    assert model_of(server)(ASKED, max_tokens=8)


@case("outlines", "a Pydantic model", PLAIN, CHAT)
def _(server: Server) -> None:
    Town.model_validate_json(model_of(server)(ASKED, Town, max_tokens=400))


@case("outlines", "a choice", PLAIN, CHAT)
def _(server: Server) -> None:
    assert model_of(server)(ASKED, Literal["Ulm", "Bonn"], max_tokens=20) in ("Ulm", "Bonn")


@case("outlines", "a regular expression", PLAIN)
def _(server: Server) -> None:
    assert model_of(server)(ASKED, Regex("[0-9]{3}"), max_tokens=20).isdigit()


@case("outlines", "stream", PLAIN)
def _(server: Server) -> None:
    assert "".join(model_of(server).stream(ASKED, max_tokens=8))


@case("outlines", "a Pydantic model, as of OpenAI", CHAT)
def _(server: Server) -> None:
    client = openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0)
    Town.model_validate_json(outlines.from_openai(client, server.model)(ASKED, Town, max_tokens=400))
