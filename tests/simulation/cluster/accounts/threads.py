"""Threads: few while an engine is idle, and none after its shutdown.

If nothing has broken, whoever shuts an engine down has waited for its threads: they don't end later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from raycore.engine.engine_actor import MAX_CLIENTS
from simulation.cluster.accounts.account import Account, Run, ranks_of
from simulation.cluster.kinds.masks import MASKED_WORKER
from simulation.world import kernel

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

OWN = "raycore"
"""How the names of the product's threads begin."""
LIFELINES = "raycore-lifeline-watch"
"""There is one for each process of a rank on the driver's node. All others have names of their own."""
OF_A_RANK = 1 + 1 + 1 + 4 + MAX_CLIENTS
"""Threads of concurrency groups: the default one, `run`, `io`, `utility` and `outputs`."""
OF_MASKS = 1 + 4
"""Of ranks that make masks: the one that makes them, and those that compile constraints."""
BESIDE = 2 + 3
"""The main thread and Ray's. The monitor of workers, the lifeline, and one more that may be about to end."""


LATE = (LIFELINES, "raycore-stat-loggers")
"""These may end later: the world looks for the first ones only now and then, and this program has the others itself."""


class Threads(Account):
    """How many threads the driver and the ranks have."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._has_stopped = False

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        parallel = llm.config.parallel
        of_a_rank = OF_A_RANK + BESIDE + (OF_MASKS if parallel.worker_cls == MASKED_WORKER else 0)
        num_processes = len(llm._manager.ranks) * (1 + parallel.world_size)
        for name, number in Counter(each.name for each in self._of_driver()).items():
            if name.startswith(OWN) and number > (num_processes if name == LIFELINES else 1):
                yield f"the driver has {number} threads {name}"
        for connection, process, _ in ranks_of(llm):
            running = [each.name for each in process.threads if not each.is_over]
            if len(running) > of_a_rank:
                yield f"dp_rank {connection.dp_rank} has {len(running)} threads: {sorted(running)}"

    def not_started(self) -> Iterator[str]:
        for each in self._of_driver():
            if each.name.startswith(OWN):
                yield f"the engine didn't start, and the thread {each.name} waits for {each.waits_for}"

    def stopped(self, llm: AsyncLLM) -> Iterator[str]:
        if not self._has_stopped and self.run.is_unbroken:
            names = sorted(each.name for each in self._of_driver() if each.is_parked)
            late = [each for each in names if each.startswith(OWN) and not each.startswith(LATE)]
            self.problems += [f"nothing has broken, and {each} goes on when the shutdown is over" for each in late]
        self._has_stopped = True
        for each in self._of_driver():
            # the streams of ranks that were left
            is_left = self.run.lacked_control_store and each.name.startswith("raycore-outputs")
            if each.name.startswith(OWN) and not is_left:
                yield f"the engine was shut down, and the thread {each.name} waits for {each.waits_for}"

    def _of_driver(self) -> Iterator[kernel.Thread]:
        thread = self.run.cluster.world.current
        assert thread is not None
        return (each for each in thread.process.threads if not each.is_over)
