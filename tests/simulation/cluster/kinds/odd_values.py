"""Requests with values that can't be sent, which are refused, or that can't be read by the rank, which fail alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from raycore.client.inputs import ParsedPrompt
from raycore.errors import InvalidRequest, RequestFailed
from raycore.llm import AsyncLLM
from simulation.cluster.kinds.kind import Asked, Kind
from simulation.cluster.operations.contract import operation
from simulation.cluster.records import Record
from simulation.scenario import Operation, Request

if TYPE_CHECKING:
    from simulation.cluster.kinds.kind import Perform


class _Thing:
    def __repr__(self) -> str:
        return "<a thing>"  # without an address, for the story


_UNSENDABLE: dict[str, Any] = {
    "half of a character": {"name": "\ud800"},
    "half of a character in a key": {"\udfff": 1},
    "a large number": {"number": [1, 2**64]},
    "an object": {"object": {"inner": _Thing()}},
}
"""By name: extra arguments that nothing can be made of on the way."""
_UNREADABLE: dict[str, Callable[[ParsedPrompt], object]] = {
    "a token that is a truth": lambda prompt: prompt.token_ids.append(True),
    "a place that is a text": lambda prompt: setattr(prompt, "second_text", "here"),
    "a place that is a fraction": lambda prompt: setattr(prompt, "second_text", 1.5),
}
"""By name: what is wrong with a prompt that nobody has looked at before the client, which doesn't need these values."""


async def _with_unreadable(
    value: str, perform: Perform, llm: AsyncLLM, asked: Asked, record: Record
) -> AsyncIterator[Any]:
    prompt = ParsedPrompt(None, list(asked.prompt["prompt_token_ids"]))
    _UNREADABLE[value](prompt)
    unread: Any = dataclasses.replace(asked, prompt=prompt)  # pyright: ignore[reportArgumentType]
    async for output in perform(llm, unread, record):
        yield output


class _OddValues(Kind):
    name = "odd values"
    engine_share = 0.12
    request_share = 0.25
    excludes = ("refused", "adapter", "constraint", "pieces", "slow pieces", "embeddings", "pooled")

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> str:
        return draw.choice([*_UNSENDABLE, *_UNREADABLE, *_UNREADABLE])

    def operations(self, draw: random.Random, requests: Iterable[Request]) -> list[Operation]:
        """Requests wait in a pause, so that a rank gets some of them in one message with others."""
        moments = [each.at_s for each in requests if each.wants.get(self.name) in _UNREADABLE]
        if not moments or draw.random() < 0.5:
            return []
        at_s = draw.choice(moments)
        return [
            operation(max(0.0, at_s - draw.uniform(0.0, 1.0)), "pause_generation", mode="keep"),
            operation(at_s + draw.uniform(0.0, 1.0), "resume_generation"),
        ]

    def apply(self, value: str, request: Request, asked: Asked) -> None:
        if value in _UNSENDABLE:
            asked.params["extra_args"] = _UNSENDABLE[value]
            asked.error = InvalidRequest, "extra_args"
        else:
            asked.perform = partial(_with_unreadable, value, asked.perform)
            asked.error = RequestFailed, "the engine can't decode the request"


KIND = _OddValues()
