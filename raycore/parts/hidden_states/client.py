"""Adds to outputs the final hidden states of prompts, and those that tokens were sampled from.

Shape suffixes: N tokens of a report, D hidden size.
"""

from __future__ import annotations

# numpy's reshape is partially typed:
# pyright: reportUnknownMemberType=false
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from raycore.messages import TokenReport
from raycore.outputs import RequestOutput
from raycore.parts.hidden_states.values import NAME
from raycore.sampling_params import SamplingParams


class HiddenStates:
    """Implements `OutputPart`."""

    name: ClassVar[str] = NAME

    def is_asked(self, params: SamplingParams) -> bool:
        """Whether the request asks for states of its prompt or its output."""
        return params.return_hidden_states or params.return_prompt_hidden_states

    def begin(self, params: SamplingParams) -> StatesOfRequest:
        """Return what keeps a new request's states."""
        return StatesOfRequest(params)


class StatesOfRequest:
    """The states of one request. Implements `OutputAddition`."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._known: list[dict[int, NDArray[np.float32]]] = [{} for _ in range(params.n)]
        """Of each sequence, by position: float32[D]."""

    def take(self, index: int, report: TokenReport) -> None:
        """Note the states of tokens that haven't been computed before."""
        states_ND = np.frombuffer(report.data, np.float32).reshape(report.num_tokens, -1)
        for position, state in enumerate(states_ND, start=report.position):
            self._known[index].setdefault(position, state)

    def add_to(self, output: RequestOutput) -> None:
        """Set the states of the prompt, once all have come, and those of the outputs so far."""
        num_prompt = len(output.prompt_token_ids)
        if self._params.return_prompt_hidden_states:
            states = _matrix(self._known[0], 0, num_prompt)
            output.prompt_hidden_states = states if len(states) == num_prompt else None
        if self._params.return_hidden_states:
            for each in output.outputs:
                each.hidden_states = _matrix(self._known[each.index], num_prompt - 1, len(each.token_ids))


def _matrix(known: Mapping[int, NDArray[np.float32]], first: int, num: int) -> NDArray[np.float32]:
    """Return those of the `num` states from position `first` on that are known."""
    states = [known[position] for position in range(first, first + num) if position in known]
    return np.stack(states) if states else np.empty((0, 0), np.float32)
