"""What callers and operators have seen. It stands outside of the simulated world: no fault can take it."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulation.scenario import Operation, Request


@dataclass
class Sequence:
    """One of a request's outputs."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """(name of the weights, first and end of their tokens), in order, once it has finished."""


@dataclass
class Record:
    """A request, and what its caller has got."""

    number: int
    request: Request
    sequences: list[Sequence] = field(default_factory=list)
    submitted_s: float | None = None
    ended_s: float | None = None
    is_aborted: bool = False
    error: BaseException | None = None
    """Why it failed."""
    problems: list[str] = field(default_factory=list)
    """What no caller may ever see."""

    @property
    def name(self) -> str:
        return f"r{self.number}"


@dataclass
class Deed:
    """What an operator did."""

    operation: Operation
    began_s: float
    ended_s: float | None = None
    error: BaseException | None = None


@dataclass
class Recorder:
    """All of a run."""

    records: list[Record] = field(default_factory=list)
    deeds: list[Deed] = field(default_factory=list)
    is_up: bool = False
    start_error: BaseException | None = None
    has_shut_down: bool = False
    unavailable: str | None = None
    """Why the engine takes no more requests, if it failed."""
