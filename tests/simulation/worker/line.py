"""How the workers of one rank depend on each other: stages wait for the ones before, and all compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from raycore.messages import StepPlan, StepResult
from raycore.system import time
from raycore.worker.rank import WorkerRank
from simulation.worker import complaints
from simulation.world import kernel

_UNTIL_TOLD_S = 1.0
"""A worker that notices the end of another one waits for so long before it says so: the failure comes first."""


class _Table:
    """What the workers of a rank have told each other."""

    def __init__(self) -> None:
        self.ready_s: dict[int, dict[int, float]] = {}
        """By worker and step: when its part of the step is computed."""
        self.first: dict[int, tuple[int, bytes]] = {}
        """By step: the worker that has computed it first, and what it has sampled."""
        self.members: dict[int, kernel.Process] = {}
        self.waiting: list[kernel.Thread] = []


class Line:
    """One worker's place. Each worker computes the whole model, so that a stage only waits for others' results.

    A stage computes a step when the one before has. The first one needs the tokens that the last one has sampled.
    """

    def __init__(self, rank: WorkerRank, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        world = _world()
        tables: dict[str | None, _Table] = world.systems.setdefault("lines of workers", {})
        self._table = tables.setdefault(rank.distributed_init, _Table())
        self._own: dict[int, float] = {}
        self._table.ready_s[rank.worker] = self._own
        assert world.current is not None
        process = world.current.process
        self._table.members[rank.worker] = process
        process.on_end.append(lambda _: self._wake())
        self._sampled_in: dict[int, int] = {}
        """By slot: the step that has sampled its last token. Only of the first of several stages."""

    def wait_for_others(self, plan: StepPlan) -> float:
        """Wait for what a step needs of other stages. Returns the time at which all of it is computed.

        Raises:
            ConnectionError: the worker that should have computed it has ended.
            TimeoutError: it hasn't told so in time.
        """
        rank = self._rank
        if rank.pp_size == 1:
            return 0.0
        if rank.pp_rank:
            return self._wait(rank.worker - rank.tp_size, plan.step)
        slots = np.frombuffer(plan.slots, np.int32).tolist()
        for request in plan.new_requests:
            self._sampled_in.pop(request.slot, None)
        needed = max((self._sampled_in.get(slot, 0) for slot in slots), default=0)
        return self._wait(rank.worker + (rank.pp_size - 1) * rank.tp_size, needed) if needed else 0.0

    def tell(self, plan: StepPlan, result: StepResult, sampled: list[int], ready_s: float) -> None:
        """Note what this worker has computed. `ready_s`: when its device will have."""
        for slot in sampled if self._rank.pp_size > 1 and not self._rank.pp_rank else ():
            self._sampled_in[slot] = plan.step
        self._own[plan.step] = ready_s
        self._wake()
        other, tokens = self._table.first.setdefault(plan.step, (self._rank.worker, result.token_ids))
        if tokens != result.token_ids:
            here, there = (np.frombuffer(each, np.int32).tolist() for each in (result.token_ids, tokens))
            complaints.disagrees(
                f"{self._rank.label} has sampled {here} in step {plan.step}, and worker {other} {there}"
            )

    def _wait(self, worker: int, step: int) -> float:
        table, world, until_s = self._table, _world(), time.monotonic() + self._timeout_s
        thread = world.current
        assert thread is not None
        table.waiting.append(thread)
        try:
            while step not in table.ready_s.get(worker, ()):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"worker {worker} hasn't computed step {step} within {self._timeout_s:g} s")
                if self._has_ended(worker):
                    time.sleep(_UNTIL_TOLD_S)
                    raise ConnectionError(f"worker {worker} has ended")
                world.park(f"step {step} of worker {worker}", left_s)
        finally:
            table.waiting.remove(thread)
        return table.ready_s[worker][step]

    def _has_ended(self, worker: int) -> bool:
        """Whether the process of a worker has ended, and not with its machine, from which nobody hears anything."""
        process = self._table.members.get(worker)
        machine: Any = None if process is None else process.machine
        return process is not None and process.has_ended and not getattr(machine, "is_lost", False)

    def _wake(self) -> None:
        for thread in self._table.waiting:
            _world().unpark(thread)


def _world() -> kernel.World:
    assert kernel.the_world is not None, "a rank has several workers in a world only"
    return kernel.the_world
