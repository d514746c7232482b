"""What callers and operators have seen. It stands outside of the simulated world: no fault can take it."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulation.scenario import Operation, Request

if TYPE_CHECKING:
    from raycore.lora.request import LoRARequest
    from raycore.outputs import PositionLogprobs


@dataclass
class Sequence:
    """One of a request's outputs."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """(name of the weights, first and end of their tokens), in order, once it has finished."""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    """For each token, if the request asks for them."""
    hidden_states: list[bytes] = field(default_factory=list)
    """For each token, if the request asks for them."""
    pooled: bytes | None = None
    """The result of a request that pools."""


@dataclass
class Record:
    """A request, and what its caller has got."""

    number: int
    request: Request
    sequences: list[Sequence] = field(default_factory=list)
    came_s: float = 0.0
    """When it came. An API server that stands still takes it later."""
    submitted_s: float | None = None
    ended_s: float | None = None
    is_aborted: bool = False
    error: BaseException | None = None
    """Why it failed."""
    problems: list[str] = field(default_factory=list)
    """What no caller may ever see."""
    prompt_logprobs: Listed[PositionLogprobs | None] | None = None
    prompt_states: list[bytes] | None = None
    """The hidden states of the prompt's tokens."""
    adapter: LoRARequest | None = None
    """The one that its outputs name."""

    @property
    def name(self) -> str:
        return f"r{self.number}" if self.request_id is not None else f"unnamed {self.number}"

    @property
    def request_id(self) -> str | None:
        """What its caller calls it. None: the engine finds an id."""
        return None if "unnamed" in self.request.wants else f"r{self.number}"


@dataclass
class Deed:
    """What an operator did."""

    operation: Operation
    began_s: float
    ended_s: float | None = None
    error: BaseException | None = None
    result: object = None
    version: str = ""
    """What the weights were called then, if that matters."""


@dataclass
class Recorder:
    """All of a run."""

    records: list[Record] = field(default_factory=list)
    deeds: list[Deed] = field(default_factory=list)
    is_up: bool = False
    start_error: BaseException | None = None
    has_shut_down: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""
    unavailable: str | None = None
    """Why the engine takes no more requests, if it failed."""
