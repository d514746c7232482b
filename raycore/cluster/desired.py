"""What all ranks of an engine have to have and to do: one value, and the lock under which it is replaced.

The value is absolute: it says what a rank has to have, not what has changed. So a rank that joins needs only the latest
one (`following.py`), and no history.

An operation changes the value for all ranks in three steps. It begins, with `asking()`, or with `together()` if no
other such change may go on meanwhile. `change()` replaces the value, and says which ranks have to be asked: those that
were told of the value before. The change ends when they have answered.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from raycore.activity import RUNNING, Activity
from raycore.messages import WeightVersion
from raycore.parts.adapters.values import NONE_ADDED, AddedAdapters
from raycore.system import threading

if TYPE_CHECKING:
    from raycore.cluster.rank import Rank


class DesiredWeights(msgspec.Struct, frozen=True):
    """The weights that an engine's ranks have to have."""

    version: WeightVersion
    path: str | None
    """The checkpoint that has these weights. None: only ranks have them."""
    key: str = ""
    """What all ranks know them by, if they came from no checkpoint: see `parts/transfers/connectors/identity.py`."""
    is_missing: bool = False
    """Whether nobody has them, as the engine has woken up without reading any. The next update has to bring all."""


class Desired(msgspec.Struct, frozen=True):
    """What all ranks of an engine have to have and to do."""

    weights: DesiredWeights
    num_updates: int = 0
    """Number of changes of weights that have begun. What a rank gets while one begins may be of two versions."""
    is_updating: bool = False
    """Whether an update of weights is under way. Ranks that join wait for its end."""
    activity: Activity = RUNNING
    adapters: AddedAdapters = NONE_ADDED
    """The LoRA adapters that were added."""
    generation: int = 0
    """The number of the present group of ranks that share experts, among all that there have been."""


class DesiredNow:
    """The `Desired` of one engine, as it is now. Thread-safe."""

    def __init__(self, desired: Desired, ranks: Callable[[], Iterable[Rank]]) -> None:
        """`ranks`: gives those of the engine that are up or starting."""
        self.now = desired
        """What is desired. To be read without a lock."""
        self.ranks = ranks
        self.changed = threading.Condition()
        """Held while `now` is replaced, and while it is noted that a rank was told of it, or follows it."""
        self._together = threading.Lock()
        self._asking: set[object] = set()
        """Has an item for each change for which ranks are being asked: changes add theirs without a lock."""

    @property
    def is_changing(self) -> bool:
        """Whether ranks are being asked for a change, so that each of them has to make progress even without
        requests."""
        return bool(self._asking) or self.now.is_updating

    @contextmanager
    def asking(self) -> Generator[None, None, None]:
        """For as long as ranks are being asked for a change."""
        change = object()
        self._asking.add(change)
        try:
            yield
        finally:
            self._asking.discard(change)

    @contextmanager
    def together(self) -> Generator[None, None, None]:
        """The same, for a change that all ranks make together: others of this kind come before or afterwards."""
        with self._together, self.asking():
            yield

    def change(self, **fields: Any) -> list[Rank]:
        """Replace fields of what is desired.

        Returns: the ranks that were told of other values at their start. The caller has to tell them of the change.
        """
        with self.changed:
            self.now = msgspec.structs.replace(self.now, **fields)
            self.changed.notify_all()
            return self.running()

    def running(self) -> list[Rank]:
        """The ranks whose loops have been started."""
        with self.changed:
            return [rank for rank in self.ranks() if rank.run_ref is not None]
