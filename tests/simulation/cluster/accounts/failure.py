"""The failure of an engine: all its callers hear of it at once, whatever they wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raycore.client.request_table import RequestTable
from simulation.cluster.accounts.account import Account, Run
from simulation.world import kernel

_AT_ONCE_S = 5.0
"""Virtual seconds within which callers hear that their engine has failed."""


class Failure(Account):
    """When the driver's client has failed."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        global _account
        _account = self
        self._failed_s: float | None = None
        """None: it hasn't."""

    def note(self) -> None:
        """A client fails. On any thread of its process."""
        world = self.run.cluster.world
        if self._failed_s is None and world.current is not None and world.current.process is self.run.faults.driver:
            self._failed_s = world.now_s

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
