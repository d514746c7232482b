"""Which requests are on which rank. Pure. So what concerns a rank needn't look at the requests of all."""

from __future__ import annotations

from collections.abc import Iterable


class RequestsByRank:
    """The ids of the requests on each rank, by dp_rank. Not thread-safe."""

    def __init__(self) -> None:
        self._ids: dict[int, dict[str, None]] = {}
        """Of those ranks that have any."""

    def move(self, request_id: str, old: int | None, new: int | None) -> None:
        """Note that a request leaves the rank `old`, and that `new` has it now. None: no rank."""
        if old is not None:
            left = self._ids.get(old, {})
            left.pop(request_id, None)
            if not left:
                self._ids.pop(old, None)
        if new is not None:
            self._ids.setdefault(new, {})[request_id] = None

    def clear(self) -> None:
        """Forget all requests."""
        self._ids.clear()

    def on(self, dp_ranks: Iterable[int]) -> list[str]:
        """The ids of the requests on these ranks, in the order in which they came to each."""
        return [request_id for dp_rank in dp_ranks for request_id in self._ids.get(dp_rank, ())]

    def has_any_on(self, dp_ranks: Iterable[int]) -> bool:
        """Whether there are requests on one of these ranks."""
        return any(dp_rank in self._ids for dp_rank in dp_ranks)

    def counts(self) -> dict[int, int]:
        """Number of requests on each rank, by dp_rank. Leaves out ranks without requests."""
        return {dp_rank: len(request_ids) for dp_rank, request_ids in self._ids.items()}
