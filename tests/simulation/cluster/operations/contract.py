"""What each capability of operators says of itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from raycore.errors import InvalidInput
from raycore.llm import AsyncLLM
from simulation.cluster.records import Deed, Record
from simulation.scenario import Operation

NEVER_S = float("inf")


class Capability:
    """Something that operators can do. The defaults draw, excuse and demand nothing."""

    kinds: ClassVar[tuple[str, ...]]
    """The kinds of operations that it performs. Most have the names of the calls that they make."""
    weight: ClassVar[int] = 1
    """How often it is drawn, compared to others."""
    within_s: ClassVar[float] = 1300.0
    """Virtual seconds within which a call ends. It waits up to 300 s for a rank that doesn't answer, perhaps twice, and
    before for a call of the other operator that does."""
    survives_losses: ClassVar[bool] = False
    """Whether the loss of a rank, which is replaced, is no error of a call."""
    has_one_operator: ClassVar[bool] = False
    """Whether only the first operator does it: its calls belong together, and the product can't tell whose they are."""

    def draw(self, draw: random.Random, at_s: float, options: Mapping[str, Any]) -> list[Operation]:
        """What an operator does from `at_s` on. `options`: of the engine."""
        return []

    async def perform(self, llm: AsyncLLM, deed: Deed) -> None:
        """Make the call. What judges have to know goes into the deed."""
        await getattr(llm, deed.operation.kind)(**deed.operation.arguments)

    def cures(self, llm: AsyncLLM, performed: Iterable[str]) -> list[Operation]:
        """What has to be done so that requests go on, once operators have ended. Asked again until there are none.

        `performed`: the kinds of operations that there were.
        """
        return []

    def aborts(self, operation: Operation, name: str) -> bool:
        """Whether the request with this name may end by it, if it runs meanwhile."""
        return False

    def fails(self, deed: Deed, record: Record, error: BaseException) -> bool:
        """Whether a request that runs meanwhile may fail so."""
        return False

    def refuses(self, deed: Deed, history: History) -> bool | None:
        """Whether the engine has to refuse the call, as `InvalidInput`. None: it may, or it may not."""
        return False

    def excuses(self, deed: Deed, error: BaseException, history: History) -> bool:
        """Whether a call that isn't refused may fail so, in an engine that goes on."""
        return history.has_broken_by(deed)

    def problems(self, deed: Deed, history: History) -> Iterator[str]:
        """What is wrong with what a call has returned."""
        return iter(())

    def holds(self, deed: Deed, history: History) -> Iterable[tuple[float, float]]:
        """In which time no token may be computed, because this call said so."""
        return ()


@dataclass(frozen=True)
class History:
    """What operators have done to an engine, by when it began."""

    deeds: Sequence[Deed]
    broken_s: Sequence[float]
    """When something has broken."""
    options: Mapping[str, Any]
    """The engine's."""

    @property
    def has_broken(self) -> bool:
        """Whether anything has broken meanwhile."""
        return bool(self.broken_s)

    def has_broken_by(self, deed: Deed) -> bool:
        """Whether anything had broken before the end of a deed, which may explain it."""
        return any(each <= end_of(deed) for each in self.broken_s)


@dataclass(frozen=True)
class Condition:
    """Something that deeds begin and end. Deeds that overlap may have come in either order."""

    may_begin: Callable[[Deed], bool]
    begins: Callable[[Deed], bool]
    """Of deeds that may begin it: whether this one surely has."""
    may_end: Callable[[Deed], bool]
    ends: Callable[[Deed], bool]
    for_s: float = NEVER_S
    """After so long, it may have ended by itself."""

    def may_hold(self, history: History, during: Deed) -> bool:
        """Whether it may have been so at some moment of a deed."""
        return any(
            self.may_begin(first)
            and first.began_s <= end_of(during)
            and (not self.ends(first) or end_of(first) >= during.began_s)
            and not any(
                self.ends(each) and each.began_s >= end_of(first) and end_of(each) <= during.began_s
                for each in history.deeds
            )
            for first in history.deeds
            if first is not during
        )

    def must_hold(self, history: History, during: Deed) -> bool:
        """Whether it was so from the begin to the end of a deed."""
        return any(
            self.may_begin(first)
            and self.begins(first)
            and end_of(first) <= during.began_s
            and end_of(during) - first.began_s < self.for_s
            and not any(
                self.may_end(each) and end_of(each) >= first.began_s and each.began_s < end_of(during)
                for each in history.deeds
                if each is not first and each is not during
            )
            for first in history.deeds
            if first is not during
        )

    def until(self, history: History, deed: Deed) -> float:
        """Until when it surely holds after a deed that has begun it."""
        ends = (
            each.began_s
            for each in history.deeds
            if each is not deed and self.may_end(each) and end_of(each) > deed.began_s
        )
        return min(deed.began_s + self.for_s, min(ends, default=NEVER_S))


def end_of(deed: Deed) -> float:
    """When a deed has ended. One that hasn't goes on for ever."""
    return NEVER_S if deed.ended_s is None else deed.ended_s


def is_done(deed: Deed) -> bool:
    """Whether it has ended without an error."""
    return deed.ended_s is not None and deed.error is None


def is_refused(deed: Deed) -> bool:
    """Whether the engine has found it invalid, and has changed nothing."""
    return isinstance(deed.error, InvalidInput)


def may_refuse(*conditions: tuple[Condition, bool], history: History, deed: Deed) -> bool | None:
    """Whether a call is refused that needs these conditions to be so or not so. For `Capability.refuses`."""
    answers: list[bool | None] = []
    for condition, needed in conditions:
        may, must = condition.may_hold(history, deed), condition.must_hold(history, deed)
        if needed:
            answers.append(True if not may else False if must else None)
        else:
            answers.append(True if must else None if may else False)
    return True if True in answers else None if None in answers else False


def operation(at_s: float, kind: str, **arguments: Any) -> Operation:
    return Operation(at_s=round(at_s, 4), kind=kind, arguments=arguments)
