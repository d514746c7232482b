"""Where the workers of ranks that share experts meet: in each step, and when their number changes."""

from __future__ import annotations

from typing import Any

from simulation.worker import complaints
from simulation.world import kernel

LATE_S = 1.0
"""Virtual seconds within which ranks come to a step that one has begun: with the slowest messages and steps. A rank
that hasn't been told of the wave comes when it has requests of its own, or never."""


class Room:
    """The workers of the same number of all ranks. All of them come in each round, and none leaves before the last."""

    def __init__(self, address: str, size: int) -> None:
        self._address, self._size = address, size
        self._brought: dict[int, Any] = {}
        """By member: what it has brought to the round that is under way."""
        self._waiting: list[tuple[kernel.Thread, list[dict[int, Any]]]] = []
        self._processes: dict[int, kernel.Process] = {}
        """By member: the process that has come for it."""

    def meet(self, member: int, brought: Any, timeout_s: float, late_s: float | None = None) -> dict[int, Any]:
        """Wait for all members. Returns what each has brought.

        `late_s`: for how many seconds to wait at most if nothing breaks. Later, there is a complaint. None: any number.

        Raises:
            TimeoutError: they haven't come within `timeout_s` seconds. Names those who have.
        """
        current = _world().current
        assert current is not None
        self._processes[member] = current.process
        self._brought[member] = brought
        if len(self._brought) == self._size:
            found, self._brought = self._brought, {}
            waiting, self._waiting = self._waiting, []
            for thread, told in waiting:
                told.append(found)
                _world().unpark(thread)
            return found
        told: list[dict[int, Any]] = []
        self._waiting.append((current, told))
        if late_s is not None:
            _world().call_later(late_s, lambda: told or self._complain(member, current, late_s))
        if not told:
            _world().park(f"the other {self._size - 1} workers at {self._address}", timeout_s)
        if not told:
            here = sorted(self._brought)
            raise TimeoutError(f"only {here} of {self._size} workers came to {self._address} within {timeout_s:g} s")
        return told[0]

    def _complain(self, member: int, waiting: kernel.Thread, late_s: float) -> None:
        """Unless somebody has ended, as the ranks of a server do that shuts down."""
        missing = [process for each, process in self._processes.items() if each not in self._brought]
        if not any(process.has_ended for process in (waiting.process, *missing)):
            here = sorted(self._brought)
            complaints.fails(
                f"worker {member} has waited {late_s:g} s in a step: of {self._size}, only {here} have come"
            )


def room_at(address: str, worker: int, size: int) -> Room:
    """The room of the workers with this number in their ranks, for a group of `size` ranks."""
    if size == 1:
        return Room(address, size)
    rooms: dict[tuple[str, int], Room] = vars(_world()).setdefault("_rooms", {})
    return rooms.setdefault((address, worker), Room(address, size))


def _world() -> kernel.World:
    assert kernel.the_world is not None, "ranks share experts in a world only"
    return kernel.the_world
