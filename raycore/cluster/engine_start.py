"""How far the start of an engine is, for those who wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from raycore.system import time

if TYPE_CHECKING:
    from raycore.cluster.manager import CoreEngineActorManager
    from raycore.cluster.rank_starts import OnProgress


@dataclass(frozen=True)
class StartView:
    """How far a start was when it was looked at."""

    phase: str
    elapsed_s: float
    """Seconds since the start began."""
    num_ranks: int | None = None
    """None: not known yet."""
    num_ready: int = 0
    """How many of the ranks can serve."""
    weights_read: float = 0.0
    """The fraction of the weights that has been read, 0 to 1."""

    def __str__(self) -> str:
        read = f" ({self.weights_read:.0%})" if self.phase == LOADING else ""
        ranks = "" if self.num_ranks is None else f", {self.num_ready} of {self.num_ranks} ranks ready"
        return f"{self.phase}{read}{ranks}, {self.elapsed_s:.0f} s so far"

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {**asdict(self), "weights_read": round(self.weights_read, 3), "elapsed_s": round(self.elapsed_s, 1)}


READING = "reading the checkpoint's configuration"
CONNECTING = "connecting to Ray"
PLACING = "placing ranks"
STARTING_RANKS = "starting the ranks' processes"
LOADING = "loading weights"
WARMING_UP = "warming up"
STARTING_SERVER = "starting the server"


class EngineStart:
    """The start of an engine, as seen from outside. One thread starts the engine, and any thread may look."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._begun_s = clock_s()
        self._manager: CoreEngineActorManager | None = None
        self._num_ranks = 0
        self._weights_read = 0.0

    def watch(self, manager: CoreEngineActorManager, num_ranks: int, show: OnProgress | None) -> OnProgress:
        """Watch the manager that is about to start the ranks.

        Returns: what its `start()` has to be given as `on_progress`. Tells `show` the same.
        """
        self._manager, self._num_ranks = manager, num_ranks

        def note(fraction: float) -> None:
            self._weights_read = fraction
            if show is not None:
                show(fraction)

        return note

    def view(self) -> StartView:
        """How far it is. Asks nobody."""
        elapsed_s, manager = self._clock_s() - self._begun_s, self._manager
        if manager is None:
            return StartView(READING, elapsed_s)
        num_ranks, num_ready = self._num_ranks, len(manager.infos)
        if not manager.node:
            phase = CONNECTING
        elif not manager.ranks:
            phase = PLACING
        elif num_ready == num_ranks:
            phase = STARTING_SERVER
        elif self._weights_read < 1:
            phase = LOADING if self._weights_read else STARTING_RANKS
        else:
            phase = WARMING_UP
        return StartView(phase, elapsed_s, num_ranks, num_ready, self._weights_read)
