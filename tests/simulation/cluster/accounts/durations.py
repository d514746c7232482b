"""How long things take: each has a deadline that follows from the product's own ones.

Only what nothing else holds up is measured: what waits for requests, or for another call, may take as long as these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from raycore.config import EngineConfig, resolve
from simulation.cluster.accounts.account import Account, Run
from simulation.cluster.anywhere import MODEL
from simulation.cluster.driver import OPTIONS
from simulation.cluster.operations.contract import end_of
from simulation.cluster.records import Deed

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

_SLACK_S = 5.0
"""For messages, and for the ends of processes: with the slowest delays, they take so long."""
_SILENT_S = 16.0
"""Until Ray takes a node for dead that is silent."""
_KILLED_S = 2 * 5.0
"""For killed ranks to end, and once more."""
_STANDBYS_S, _THREADS_S = 5.0, 2.0
"""For these to end."""
_CALM_S = 4.5
"""For messages, ends of processes and removals of groups if all react. Each wait for those that don't is 5 s long."""
_CONNECTS_S = 1.5
"""After so long, the product knows that the control store is gone: it gives a connection a second."""
_OVERTAKES_S = 0.1
"""A call that begins so much later may come first: its thread was quicker."""


class Deadline(NamedTuple):
    """For how long something may take."""

    limit_s: Callable[[EngineConfig], float]
    reason: str


_CHANGE = Deadline(
    lambda config: 2 * max(config.recovery.step_timeout_s, _SILENT_S) + _SLACK_S,
    "a rank that is stuck is noticed within step_timeout_s, and one whose node is silent is dead soon",
)
DEADLINES = {
    "the start": Deadline(
        lambda config: config.recovery.placement_timeout_s + config.executor.init_timeout_s + _KILLED_S + _SLACK_S,
        "room has placement_timeout_s, ranks have init_timeout_s, and those that fail are killed",
    ),
    "the shutdown": Deadline(
        lambda config: config.executor.shutdown_timeout_s + _KILLED_S + _STANDBYS_S + _THREADS_S + _SLACK_S,
        "ranks have shutdown_timeout_s, what remains of them is killed, and nothing waits for Ray",
    ),
    "a shutdown in which nothing has broken": Deadline(
        lambda config: _CALM_S, "ranks that react stop at once, and nobody waits any longer for what has come"
    ),
    "a request, after the end of its engine's node": Deadline(
        lambda config: _SLACK_S, "the engine has failed then, and nobody waits for its ranks"
    ),
    **dict.fromkeys(("pause_generation", "resume_generation", "sleep", "wake_up"), _CHANGE),
}
"""By what is measured."""


class Durations(Account):
    """See the module."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._config = resolve(MODEL, None, **OPTIONS | run.scenario.options)
        self._has_stopped = False

    def begin(self, llm: AsyncLLM) -> None:
        self.problems += self._late("the start", self.run.cluster.world.now_s)

    def not_started(self) -> Iterator[str]:
        if not self._has_stopped:
            self._has_stopped = True
            self.problems += self._late("the start", self.run.cluster.world.now_s)
        return iter(())

    def stopped(self, llm: AsyncLLM) -> Iterator[str]:
        if not self._has_stopped:
            self._has_stopped = True
            began_s, now_s = self.run.shutdown_s, self.run.cluster.world.now_s
            self.problems += self._late("the shutdown", now_s - began_s - self._held_up_s(began_s, now_s))
            if self.run.is_unbroken:
                self.problems += self._late("a shutdown in which nothing has broken", now_s - began_s)
        return iter(())

    def over(self) -> Iterator[str]:
        for deed in self.run.recorder.deeds:
            if deed.ended_s is not None and self._is_measured(deed):
                held_s = self._held_up_s(deed.began_s, deed.ended_s)
                yield from self._late(deed.operation.kind, deed.ended_s - deed.began_s - held_s)
        ends_s = [at_s for at_s, fault in self.run.faults.struck if fault.kind == "end own raylet"]
        for record in self.run.recorder.records if ends_s else ():
            if record.submitted_s is not None and record.ended_s is not None:
                took_s = record.ended_s - max(record.submitted_s, ends_s[0])
                yield from self._late("a request, after the end of its engine's node", took_s)

    def _late(self, what: str, took_s: float) -> Iterator[str]:
        limit_s = DEADLINES[what].limit_s(self._config)
        if took_s > limit_s:
            yield f"{what}, took {took_s:.1f} s, more than {limit_s:g}: {DEADLINES[what].reason}"

    def _is_measured(self, deed: Deed) -> bool:
        """Whether a deed has a deadline, and waits for no request and for no other call."""
        if deed.operation.kind not in DEADLINES or deed.operation.arguments.get("mode") == "wait":
            return False
        latest_s = deed.began_s + _OVERTAKES_S
        others = (each for each in self.run.recorder.deeds if each is not deed)
        return not any(each.began_s <= latest_s and end_of(each) >= deed.began_s for each in others)

    def _held_up_s(self, began_s: float, ended_s: float) -> float:
        """For how long Ray's control store may have held up what was done in this time.

        A shutdown that finds it gone doesn't wait for it. Other calls do, and one that has already begun.
        """
        held_s = 0.0
        for at_s, fault in self.run.faults.struck:
            is_found = began_s == self.run.shutdown_s and fault.kind == "restart gcs" and at_s + _CONNECTS_S <= began_s
            if fault.kind in ("stall gcs", "restart gcs") and not is_found:
                held_s += max(0.0, min(ended_s, at_s + fault.for_s) - max(began_s, at_s))
        return held_s
