"""Requests that ask for the hidden states of their outputs, or of their prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from simulation.cluster.kinds.kind import Asked, Kind, Seen
from simulation.scenario import Request
from simulation.worker import expected, sampling


class _HiddenStates(Kind):
    name = "hidden states"
    engine_share = 0.15
    excludes = ("pieces",)

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> str:
        return draw.choice(["prompt", "output"])

    def apply(self, value: str, request: Request, asked: Asked) -> None:
        asked.params["return_hidden_states" if value == "output" else "return_prompt_hidden_states"] = True

    def problems(self, value: str, seen: Seen) -> Iterator[str]:
        tokens, prompt = seen.sequence.tokens, seen.request.prompt_token_ids
        if value == "prompt":
            own, place = seen.record.prompt_states, slice(0, len(prompt))
            if seen.index > 0 or (own is None and not seen.is_whole):
                return
        else:
            own, place = seen.sequence.hidden_states, slice(len(prompt) - 1, len(prompt) - 1 + len(tokens))
        hidden = expected.hidden_states(seen.shape, seen.request, [*prompt, *tokens], seen.weights[0])
        right = [sampling.hidden_bytes(each) for each in hidden[place]]
        if own != right:
            yield f"the hidden states of its {value} are {len(own or ())} of {len(right)}, or other ones"


KIND = _HiddenStates()
