"""Accounts: what has to add up in an engine, looked at while it is idle, after its shutdown, and at the end.

Each is in a module of its own, with its bounds and their reasons. `simulation.cluster.planted` has a fault for each, by
which it is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from simulation.cluster.accounts.aborts import Aborts
from simulation.cluster.accounts.account import Account, Run
from simulation.cluster.accounts.api_servers import APIServers
from simulation.cluster.accounts.caches import Caches
from simulation.cluster.accounts.callbacks import Callbacks
from simulation.cluster.accounts.callers import Callers
from simulation.cluster.accounts.compilations import Compilations
from simulation.cluster.accounts.connectors import Connectors
from simulation.cluster.accounts.control import Control
from simulation.cluster.accounts.descriptors import Descriptors
from simulation.cluster.accounts.drafts import Drafts
from simulation.cluster.accounts.durations import Durations
from simulation.cluster.accounts.ends import Ends
from simulation.cluster.accounts.exports import Exports
from simulation.cluster.accounts.failure import Failure
from simulation.cluster.accounts.lent_blocks import LentBlocks
from simulation.cluster.accounts.loads import Loads
from simulation.cluster.accounts.logs import Logs
from simulation.cluster.accounts.losses import Losses
from simulation.cluster.accounts.metrics import Metrics
from simulation.cluster.accounts.once import Once
from simulation.cluster.accounts.queues import Queues
from simulation.cluster.accounts.ranks import Ranks
from simulation.cluster.accounts.reserved import Reserved
from simulation.cluster.accounts.routes import Routes
from simulation.cluster.accounts.serving import Serving
from simulation.cluster.accounts.shutdown import Shutdown
from simulation.cluster.accounts.spread import Spread
from simulation.cluster.accounts.threads import Threads
from simulation.cluster.accounts.waits import Waits
from simulation.cluster.accounts.wanted_ranks import WantedRanks
from simulation.cluster.records import Record

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

KINDS: tuple[type[Account], ...] = (
    Ranks, Callers, Once, Metrics, Queues, Threads, Descriptors, Serving, Shutdown, Durations, Waits, APIServers,
    Loads, Exports, Compilations, Failure, WantedRanks, Caches, Drafts, Spread, LentBlocks, Logs, Aborts, Connectors,
    Callbacks, Ends, Routes, Reserved, Control, Losses,
)  # fmt: skip
_FIRST_LOOK_S, _LONGEST_PAUSE_S = 0.005, 1.0
"""Virtual seconds between two looks: at first little, so that most engines are shut down as soon as they are idle."""


class Accounts:
    """All accounts of a run."""

    def __init__(self, run: Run, kinds: Sequence[type[Account]] = KINDS) -> None:
        self.run = run
        self._world = run.cluster.world
        self._all = [kind(run) for kind in kinds]
        self._of_outputs = [each for each in self._all if type(each).output is not Account.output]

    def begin(self, llm: AsyncLLM) -> None:
        """The engine is up."""
        for account in self._all:
            account.begin(llm)

    def output(self, record: Record, output: Any) -> None:
        """A caller gets this output."""
        for account in self._of_outputs:
            account.output(record, output)

    def idle(self, llm: AsyncLLM) -> None:
        """All callers and operators are done. Waits while anything is wrong, but not for ever."""
        self._look(lambda account: self._idle(account, llm), lambda account: account.settles_s)
        self.run.shutdown_s = self._world.now_s

    def before_shutdown(self) -> None:
        """Let break what breaks just before the shutdown of the engine."""
        wait_s = self.run.faults.before_shutdown()
        if wait_s > 0:
            self._world.park("the shutdown", wait_s)
            self.run.shutdown_s = self._world.now_s

    def _idle(self, account: Account, llm: AsyncLLM) -> Iterator[str]:
        yield from account.idle(llm)
        front = self.run.front
        for engine in front.engines() if front is not None and account.is_of_clients else ():
            yield from account.idle(engine)

    def not_started(self) -> None:
        """The start of the engine has failed. Waits as `idle` does."""
        self._look(lambda account: account.not_started(), lambda account: account.ends_s)

    def stopped(self, llm: AsyncLLM) -> None:
        """The engine was shut down. Waits as `idle` does."""
        self._look(lambda account: account.stopped(llm), lambda account: account.ends_s)

    def over(self) -> Iterator[str]:
        """All that was wrong."""
        for account in self._all:
            yield from account.problems
            yield from account.over()

    def _look(self, at: Callable[[Account], Iterator[str]], limit_s: Callable[[Account], float]) -> None:
        began_s, pause_s, left = self._world.now_s, _FIRST_LOOK_S, list(self._all)
        while True:
            wrong = [(account, found) for account in left if (found := list(at(account)))]
            left = []
            for account, found in wrong:
                if self._world.now_s - max(began_s, self.run.faults.over_s) < limit_s(account):
                    left.append(account)
                else:
                    account.problems += found
            if not left:
                return
            self._world.park("accounts to be settled", pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
