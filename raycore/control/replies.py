"""Waits for the replies of ranks that may be lost meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ray.exceptions import RayError

from raycore.errors import EngineDeadError
from raycore.ray_api import cause_of, get, has_ended, wait
from raycore.system import time

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.cluster.rank import Rank
    from raycore.cluster.supervisor import Supervisor

GRACE_S = 2.0
"""How many seconds longer than the driver a rank waits, so that the driver reports a rank that is late."""
_POLL_INTERVAL_S = 0.5

T = TypeVar("T")


class Replies(Generic[T]):
    """What ranks have replied. Ranks that were lost are in no list."""

    def __init__(self) -> None:
        self.results: list[tuple[Rank, T]] = []
        self.errors: list[tuple[Rank, BaseException]] = []
        """What ranks have raised."""
        self.late: list[Rank] = []
        """Ranks that haven't replied in time."""


def take_replies(asked: dict[ObjectRef[T], Rank], timeout_s: float, is_over: Callable[[], bool]) -> Replies[T]:
    """Wait for the replies of ranks.

    Args:
        timeout_s: how long they may take.
        is_over: asked again and again. If it returns True, those that haven't replied count as late.
    """
    replies = Replies[T]()
    waiting = list(asked)
    deadline_s = time.monotonic() + timeout_s
    while waiting and time.monotonic() < deadline_s and not is_over():
        done, waiting = wait(waiting, num_returns=1, timeout_s=_POLL_INTERVAL_S)
        for ref in done:
            try:
                replies.results.append((asked[ref], get(ref)))
            except RayError as error:
                if not has_ended(error):
                    replies.errors.append((asked[ref], cause_of(error)))
    replies.late = [asked[ref] for ref in waiting]
    return replies


def ask_ranks(
    ranks: Iterable[Rank],
    method: str,
    arguments: Callable[[Rank], tuple[Any, ...]],
    timeout_s: float,
    supervisor: Supervisor,
) -> Replies[Any]:
    """Call a utility of ranks, and wait for their replies until the engine ends.

    Args:
        arguments: gives those for a rank.
        timeout_s: how long they may take.
    """
    asked = {rank.actor.utility.remote(method, arguments(rank), {}, timeout_s + GRACE_S): rank for rank in ranks}
    return take_replies(asked, timeout_s, lambda: supervisor.has_ended)


def check_running(supervisor: Supervisor) -> None:
    """Raise EngineDeadError if the engine has failed or was shut down."""
    if supervisor.has_ended:
        raise supervisor.wait(0.0) or EngineDeadError("the engine was shut down")
