"""Nobody waits for ever: neither a caller, nor an operator, nor the program that starts or ends an engine."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from simulation.cluster import kinds
from simulation.cluster.accounts.account import Account, Run
from simulation.cluster.judges import REQUEST_S
from simulation.world.kernel import OutOfTime, Thread

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

LONGEST_S = REQUEST_S
"""Virtual seconds after the last fault within which each call ends. Of the product's own deadlines, those for the start
of a rank are the longest, 300 s: one such wait may have begun just before, and its next attempt comes after it."""
_LOOK_S = 60.0
"""Virtual seconds between two looks."""


class Waits(Account):
    """Calls that are open."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._began_s: float | None = 0.0
        """Since when the driver starts or ends the engine. None: it does neither."""
        self._what = "the engine's start"
        self._look_later()

    def begin(self, llm: AsyncLLM) -> None:
        self._began_s = None

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        self._what, self._began_s = "the engine's shutdown", self.run.cluster.world.now_s
        return iter(())

    def not_started(self) -> Iterator[str]:
        self._began_s = None
        return iter(())

    def stopped(self, llm: AsyncLLM) -> Iterator[str]:
        self._began_s = None
        return iter(())

    def _look_later(self) -> None:
        self.run.cluster.world.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        world = self.run.cluster.world
        driver = self.run.faults.driver
        if driver is not None and driver.has_ended:
            return
        over_s, latest_s = self.run.faults.over_s, world.now_s - LONGEST_S
        late = [what for what, since_s in self._open() if max(since_s, over_s) < latest_s]
        if not late:
            self._look_later()
            return
        waits = [f"{thread}: {_wait_of(thread)}" for thread, _ in world.waiting() if thread.process is driver]
        self.problems.append("\n    ".join([f"{', '.join(late)} never ended, though all faults are over:", *waits]))
        raise OutOfTime("a call is open that never ends")

    def _open(self) -> Iterator[tuple[str, float]]:
        """What hasn't ended, and since when."""
        recorder = self.run.recorder
        if self._began_s is not None:
            yield self._what, self._began_s
        for record in recorder.records:
            if record.submitted_s is not None and record.ended_s is None:
                yield record.name, record.submitted_s + kinds.waits_s(record.request)
        for deed in recorder.deeds:
            if deed.ended_s is None:
                yield deed.operation.kind, deed.began_s


def _wait_of(thread: Thread) -> str:
    """What a thread waits for and where, and each task of its event loop."""
    frames = traceback.extract_stack(thread.body.gr_frame)
    own = [frame for frame in frames if "/simulation/world/" not in frame.filename][-6:]
    places = [f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})" for frame in own]
    loop: Any = thread._loop
    tasks = [] if loop is None else [f"a task in {' > '.join(_awaited_by(task.get_coro()))}" for task in loop._tasks]
    return "\n        ".join([f"{thread.waits_for}, in {' > '.join(places)}", *tasks])


def _awaited_by(coroutine: Any) -> Iterator[str]:
    while coroutine is not None and hasattr(coroutine, "cr_await"):
        frame = coroutine.cr_frame
        yield f"{coroutine.__qualname__}" + ("" if frame is None else f":{frame.f_lineno}")
        coroutine = coroutine.cr_await
