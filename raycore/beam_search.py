"""What beam search is asked for and what it gives. Names and meanings are vLLM's."""

from __future__ import annotations

__all__ = ["BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"]

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import msgspec

from raycore.errors import InvalidRequest
from raycore.lora.request import LoRARequest
from raycore.outputs import PositionLogprobs
from raycore.sampling_params import checked_int
from raycore.short_tracebacks import ends_traceback

_MAX_WIDTH = 1024


class BeamSearchParams(msgspec.Struct):
    """The `beam_width` most likely continuations are followed at every token, and the best ones returned.

    Raises:
        InvalidRequest: a parameter is invalid. The message names it.
    """

    beam_width: int
    """Number of sequences that are followed, and returned."""
    max_tokens: int
    """Maximum number of generated tokens."""
    ignore_eos: bool = False
    """Whether a sequence goes on after an end-of-sequence token."""
    temperature: float = 0.0
    """No effect: nothing is sampled."""
    length_penalty: float = 1.0
    """A sequence's score is its log probability, divided by its number of tokens, prompt and output together without an
    end-of-sequence token, to this power."""
    include_stop_str_in_output: bool = False
    """Whether the tokens and the text of a `RequestOutput` have the end-of-sequence token. A `BeamSearchSequence`
    always has it."""
    structured_outputs: Any = None
    """Not supported."""
    skip_special_tokens: bool = True

    @ends_traceback
    def __post_init__(self) -> None:
        for name, most in (("beam_width", _MAX_WIDTH), ("max_tokens", None)):
            value = checked_int(name, getattr(self, name))
            if value < 1 or (most is not None and value > most):
                raise InvalidRequest(f"{name}={value} isn't {'at least 1' if most is None else f'in [1, {most}]'}")
        for name in ("temperature", "length_penalty"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise InvalidRequest(f"{name}={value!r} isn't a number")
        if self.temperature < 0:
            raise InvalidRequest(f"temperature={self.temperature} is negative")
        if self.structured_outputs is not None:
            raise InvalidRequest("structured_outputs can't be used with beam search")


@dataclass
class BeamSearchSequence:
    """One of the best sequences."""

    tokens: list[int]
    """The prompt's tokens and the generated ones, with the end-of-sequence token if there is one."""
    logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    """For each generated token: the log probabilities of the most likely tokens there, twice as many as there are
    beams."""
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    """Sum of the log probabilities of the generated tokens."""
    text: str | None = None
    """The text of `tokens`."""
    finish_reason: str | None = None
    """`stop`, `length` or `abort`."""
    stop_reason: int | str | None = None
    """The end-of-sequence token."""


@dataclass
class BeamSearchOutput:
    """The result for one prompt."""

    sequences: list[BeamSearchSequence]
    """The best ones, in the order of their scores."""
