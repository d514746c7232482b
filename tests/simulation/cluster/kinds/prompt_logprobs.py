"""Requests that ask how likely the tokens of their prompts are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from simulation.cluster.kinds.kind import Asked, Kind, Seen
from simulation.cluster.kinds.logprobs import as_told, taken
from simulation.scenario import Request
from simulation.worker import expected


class _PromptLogprobs(Kind):
    name = "prompt logprobs"
    engine_share = 0.3
    excludes = ("pieces",)

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> int:
        return draw.choice([0, 1, 2])

    def apply(self, value: int, request: Request, asked: Asked) -> None:
        asked.params["prompt_logprobs"] = value

    def problems(self, value: int, seen: Seen) -> Iterator[str]:
        told = seen.record.prompt_logprobs
        if seen.index > 0 or not seen.sequence.tokens:
            return
        num_prompt = len(seen.request.prompt_token_ids)
        if told is None or len(told) != num_prompt:
            yield f"there are {None if told is None else len(told)} logprobs of a prompt of {num_prompt} tokens"
            return
        own = [taken(each) if each else None for each in told]
        rights = [None, *map(as_told, expected.prompt_logprobs(seen.shape, seen.request, seen.weights[0]))]
        for position, (entry, right) in enumerate(zip(own, rights, strict=True)):
            if entry != right:
                yield f"the logprobs of position {position} of the prompt are {entry}, not {right}"
                return


KIND = _PromptLogprobs()
