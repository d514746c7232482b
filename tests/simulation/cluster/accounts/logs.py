"""Logs: an engine in which nothing has broken is shut down without a warning of anybody."""

from __future__ import annotations

from collections.abc import Iterator

from simulation.cluster.accounts.account import Account


class Logs(Account):
    """What is logged as a warning or as an error, in any process, from the beginning of the shutdown on."""

    def over(self) -> Iterator[str]:
        run = self.run
        has_broken = run.scenario.faults or any(each.kind == "break_worker" for each in run.scenario.operations)
        if run.shutdown_s and not has_broken:
            yield from (f"nothing has broken, and {each}" for each in run.logged if each.at_s >= run.shutdown_s)
