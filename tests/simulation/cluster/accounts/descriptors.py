"""Pipes, pidfds, sockets and files: few while an engine is idle, none of the driver's after its shutdown."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulation.cluster.accounts.account import Account, Run, ranks_of
from simulation.world import descriptors, memory
from simulation.world.kernel import Process
from simulation.world.sockets import End, Socket
from simulation.world.threads import world

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

OF_A_DOMAIN = 2
"""The pipe that wakes the monitor of ranks that fail together."""
OF_THE_NODE = 1
"""The connection to the raylet, whose end tells that the node has ended."""
OF_A_RANK = 0
"""Ranks watch their workers by Ray's calls alone."""
ENDED = 4
"""Connections that a reader of blocks keeps for the next read, which sees that the other side is gone."""


class Descriptors(Account):
    """Descriptors of the driver and of ranks, and real files of all simulated processes."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._files = _open_files()

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        # one pidfd for each process of a rank on the driver's node
        num_ranks, num_workers = len(llm._manager.ranks), llm.config.parallel.world_size
        most = OF_THE_NODE + num_ranks * (OF_A_DOMAIN + 1 + num_workers)
        if len(found := _of_this_process()) > most:
            yield f"the driver has {len(found)} descriptors, more than {most}"
        for connection, process, _ in ranks_of(llm):
            if len(found := descriptors.open_in(process)) > OF_A_RANK:
                yield f"dp_rank {connection.dp_rank} has the descriptors {found}"
        yield from _left()

    def not_started(self) -> Iterator[str]:
        if found := _of_this_process():
            yield f"the engine didn't start, and the driver has the descriptors {found}"

    def stopped(self, llm: AsyncLLM) -> Iterator[str]:
        if found := _of_this_process():
            yield f"the engine was shut down, and the driver has the descriptors {found}"
        here = world()
        assert here.current is not None
        process = here.current.process
        for address, listener in here.systems.get("listeners", {}).items():
            if listener.process() is process:
                yield f"the engine was shut down, and the driver listens at {address}"

    def over(self) -> Iterator[str]:
        if left := _open_files() - self._files:
            yield f"real files are open: {dict(left)}"


def _left() -> Iterator[str]:
    """What processes have open though nobody uses it, such as what is left of a read of blocks."""
    opened: dict[Process, list[Socket]] = {}
    for each in descriptors.all_open():
        if isinstance(each, End) and each.process is not None:
            opened.setdefault(each.process, []).append(each.socket)
    for process in world().processes:
        if process.has_ended or process.is_stopped:
            continue
        if found := memory.open_in(process):
            yield f"the engine is idle, and {process} has the descriptors {found} of shared memory"
        own = opened.get(process, ())
        if (number := sum(not each.is_used for each in own)) > 0:
            yield f"the engine is idle, and {process} has {number} sockets that are neither connected nor listen"
        if (number := sum(each.has_ended for each in own)) > ENDED:
            yield f"the engine is idle, and {process} has {number} connections whose other ends are closed"


def _of_this_process() -> list[int]:
    current = world().current
    assert current is not None
    return descriptors.open_in(current.process)


def _open_files() -> Counter[str]:
    """What the one real process has open, but for memory: that of killed processes lives on with their frames."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            found[name] += not name.startswith("/memfd:")
        except FileNotFoundError:  # the one by which the folder is read
            continue
    return found
