"""The table of cases, and what every case needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

TOOLS, PLAIN, CHAT, EMBEDS = "tools", "plain", "chat", "embeds"
"""The kinds of models: the template renders tools, as Hermes' does; a small one whose template ignores tools; a chat
model with its own template; and one of embeddings."""


MARK = "@case "
"""Begins the lines that have a result."""


class Server(NamedTuple):
    """The server that is asked."""

    root: str
    """Its address, without a path."""
    model: str
    key: str
    tokenizer: str
    """The directory of the model's tokenizer."""

    @property
    def v1(self) -> str:
        """The address of OpenAI's API."""
        return f"{self.root}/v1"


class Case(NamedTuple):
    """One use of a library. It fails if it raises."""

    library: str
    name: str
    kinds: tuple[str, ...]
    """The models with which it is run."""
    run: Callable[[Server], Any]


CASES: list[Case] = []


def case(library: str, name: str, *kinds: str) -> Callable[[Callable[[Server], Any]], Callable[[Server], Any]]:
    """Add a function to the table."""

    def add(run: Callable[[Server], Any]) -> Callable[[Server], Any]:
        CASES.append(Case(library, name, kinds, run))
        return run

    return add


class Town(BaseModel):
    """A town. Without further fields, which a small model would go on and on with."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Ulm", "Bonn"]
    is_warm: bool


MESSAGES = [{"role": "user", "content": "Which town is warm? Answer as asked."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Ulm", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "The weather of a town.", "parameters": SCHEMA}
OPENAI_TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}


def quiet() -> None:
    """Keep libraries from reaching for the network."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "DSPY_CACHEDIR": os.environ.get("TMPDIR", "/tmp"),
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "*",
    }
