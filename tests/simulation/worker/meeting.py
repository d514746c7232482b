"""Where the workers of ranks that share experts meet: in each step, and when their number changes."""

from __future__ import annotations

from typing import Any

from simulation.world import kernel


class Room:
    """The workers of the same number of all ranks. All of them come in each round, and none leaves before the last."""

    def __init__(self, address: str, size: int) -> None:
        self._address, self._size = address, size
        self._brought: dict[int, Any] = {}
        """By member: what it has brought to the round that is under way."""
        self._waiting: list[tuple[kernel.Thread, list[dict[int, Any]]]] = []

    def meet(self, member: int, brought: Any, timeout_s: float) -> dict[int, Any]:
        """Wait for all members. Returns what each has brought.

        Raises:
            TimeoutError: they haven't come within `timeout_s` seconds. Names those who have.
        """
        self._brought[member] = brought
        if len(self._brought) == self._size:
            found, self._brought = self._brought, {}
            waiting, self._waiting = self._waiting, []
            for thread, told in waiting:
                told.append(found)
                _world().unpark(thread)
            return found
        told: list[dict[int, Any]] = []
        current = _world().current
        assert current is not None
        self._waiting.append((current, told))
        if not told:
            _world().park(f"the other {self._size - 1} workers at {self._address}", timeout_s)
        if not told:
            here = sorted(self._brought)
            raise TimeoutError(f"only {here} of {self._size} workers came to {self._address} within {timeout_s:g} s")
        return told[0]


def room_at(address: str, worker: int, size: int) -> Room:
    """The room of the workers with this number in their ranks, for a group of `size` ranks."""
    if size == 1:
        return Room(address, size)
    rooms: dict[tuple[str, int], Room] = vars(_world()).setdefault("_rooms", {})
    return rooms.setdefault((address, worker), Room(address, size))


def _world() -> kernel.World:
    assert kernel.the_world is not None, "ranks share experts in a world only"
    return kernel.the_world
