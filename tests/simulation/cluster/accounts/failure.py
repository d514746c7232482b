"""The failure of an engine: all its callers hear of it at once, whatever they wait for, and it still lists its ranks.

Others see in the list where they were, and that they are gone, until the engine is shut down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raycore.client.request_table import RequestTable
from simulation.cluster.accounts.account import Account, Run
from simulation.cluster.operations.scaling import Scaling
from simulation.world import kernel

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

_AT_ONCE_S = 5.0
"""Virtual seconds within which callers hear that their engine has failed."""
_LOOK_S, _LOOKS_FOR_S = 0.005, 30.0
"""How often this looks at the list of ranks, and for how long: what is left of them has ended by then."""


class Failure(Account):
    """When the driver's client has failed."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        global _account
        _account = self
        self._failed_s: float | None = None
        """None: it hasn't."""
        self._llm: AsyncLLM | None = None
        self._listed: list[int] = []
        """The ranks that there were then."""

    def begin(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def note(self) -> None:
        """A client fails. On any thread of its process."""
        world = self.run.cluster.world
        if self._failed_s is None and world.current is not None and world.current.process is self.run.faults.driver:
            self._failed_s = world.now_s
            if self._llm is not None and self._llm._supervisor._cause is not None:
                self._listed = sorted(self._llm._manager.ranks)
                world.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Look at the list, and again soon."""
        world = self.run.cluster.world
        assert self._failed_s is not None
        if self._llm is None or self.run.shutdown_s or world.now_s > self._failed_s + _LOOKS_FOR_S or self._is_scaled:
            return
        listed = sorted(self._llm._manager.ranks)
        if listed != self._listed:
            self.problems.append(f"an engine of dp_ranks {self._listed} has failed, and lists {listed}")
        else:
            world.call_later(_LOOK_S, self._look)

    def stopped(self, llm: AsyncLLM) -> Iterator[str]:
        self._llm = None
        return iter(())

    @property
    def _is_scaled(self) -> bool:
        """Whether an operator has changed the number of ranks, which may go on for a while in an engine that fails."""
        return any(deed.operation.kind in Scaling.kinds for deed in self.run.recorder.deeds)

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        if self._listed and not self._is_scaled:
            states = {each.dp_rank: each.state for each in llm.ranks}
            if states != dict.fromkeys(self._listed, "gone"):
                yield f"an engine of dp_ranks {self._listed} has failed, and others are told of {states}"

    def over(self) -> Iterator[str]:
        failed_s = self._failed_s
        for record in self.run.recorder.records if failed_s is not None and self.run.front is None else ():
            if record.submitted_s is None or (record.ended_s is not None and record.ended_s <= failed_s):
                continue
            heard_s = self.run.cluster.world.now_s if record.ended_s is None else record.ended_s
            if heard_s - max(failed_s, record.submitted_s) > _AT_ONCE_S:
                yield f"{record.name} heard {heard_s - failed_s:.1f} s after its engine had failed"


_account: Failure | None = None
"""That of the present run."""
_original = RequestTable.fail_all


def _fail_all(self: RequestTable, *args: Any) -> Any:
    if _account is not None and kernel.the_world is not None:
        _account.note()
    return _original(self, *args)


RequestTable.fail_all = _fail_all
