"""Requests that ask how likely their tokens were."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from raycore.messages import TokenLogprobs
from raycore.outputs import PositionLogprobs
from simulation.cluster.kinds.kind import Asked, Kind, Seen
from simulation.scenario import Request
from simulation.worker import expected


def as_told(entry: TokenLogprobs) -> dict[int, tuple[float, int | None]]:
    """What callers get of a position: by token, how likely it was, and its rank."""
    told: dict[int, tuple[float, int | None]] = {entry.token_ids[0]: (entry.logprobs[0], entry.rank)}
    for rank, (token, logprob) in enumerate(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True), 1):
        told.setdefault(token, (logprob, rank))
    return told


def taken(position: PositionLogprobs) -> dict[int, tuple[float, int | None]]:
    """What a caller has got, in the same form."""
    return {token: (each.logprob, each.rank) for token, each in position.items()}


class _Logprobs(Kind):
    name = "logprobs"
    engine_share = 0.3

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> list[int]:
        """How many, and whether they come in few lists."""
        return [draw.choice([0, 1, 3]), draw.randrange(2)]  # all of the vocabulary would take long

    def apply(self, value: list[int], request: Request, asked: Asked) -> None:
        asked.params |= {"logprobs": value[0], "flat_logprobs": bool(value[1])}

    def problems(self, value: list[int], seen: Seen) -> Iterator[str]:
        own, tokens = seen.sequence.logprobs, seen.sequence.tokens
        if len(own) != len(tokens):
            yield f"there are {len(own)} logprobs of {len(tokens)} tokens"
            return
        for index, entry in enumerate(own):
            right = as_told(expected.logprobs(seen.shape, seen.request, tokens, index, seen.weights[index]))
            if taken(entry) != right:
                yield f"the logprobs of token {index} are {_short(entry)}, not {str(right)[:200]}"
                return


def _short(entry: PositionLogprobs) -> str:
    return str(taken(entry))[:200]


KIND = _Logprobs()
