"""Waits until ranks that were created are up, and says what kept one from starting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from ray.exceptions import RayError

from raycore.cluster.failure_reports import describe_death, describe_rank, pid_of_dead_actor, root_cause
from raycore.cluster.following import IsWanted, check_wanted
from raycore.cluster.rank import Rank
from raycore.cluster.reservations import Reservations
from raycore.cluster.runtime import Runtime
from raycore.errors import InitializationError, InvalidInput, WorkerFailed
from raycore.messages import EngineInfo

OnProgress = Callable[[float], object]

_PROGRESS_S = 0.25
"""Interval, in seconds, at which the progress of a start is reported."""

_MAX_ASKED = 32
"""How many ranks are asked for their progress each time, for all of them."""


class RankStarts:
    """Waits for the ranks of one engine. Thread-safe."""

    def __init__(self, runtime: Runtime, reservations: Reservations, timeout_s: float) -> None:
        """`timeout_s`: how long ranks may take to start, as errors name it."""
        self._runtime = runtime
        self._reservations = reservations
        self._timeout_s = timeout_s

    def wait(
        self, ranks: Sequence[Rank], deadline_s: float, on_progress: OnProgress | None, is_wanted: IsWanted
    ) -> None:
        """Wait until new ranks are up, and note their `EngineInfo`.

        Args:
            deadline_s: the time of the runtime's clock until which they may take.
            on_progress: see `CoreEngineActorManager.start()`.

        Raises the errors of `start()`, but leaves the ranks' processes running.
        """
        waiting = {rank.init_ref: rank for rank in ranks}
        while waiting:
            left_s = max(0.0, deadline_s - self._runtime.clock.now_s())
            done, _ = self._runtime.wait(list(waiting), num_returns=len(waiting), timeout_s=min(left_s, _PROGRESS_S))
            if not done and left_s > 0:
                check_wanted(is_wanted)
                crashed = self._reservations.find_crashed(node for rank in waiting.values() for node in rank.nodes)
                if crashed:
                    raise InitializationError(f"these nodes no longer answer: {', '.join(sorted(crashed))}")
                if on_progress is not None:
                    self._report_progress(ranks, on_progress)
                continue
            if not done:
                late = sorted(rank.dp_rank for rank in waiting.values())
                raise InitializationError(
                    f"dp_ranks {late} didn't start within init_timeout_s={self._timeout_s:g}: "
                    "raise it if the checkpoint is just large"
                )
            for ref in done:
                rank = waiting.pop(ref)
                rank.info = self._init_result(rank)

    def _report_progress(self, ranks: Sequence[Rank], on_progress: OnProgress) -> None:
        # ranks whose processes haven't started don't answer yet; failures are reported by the ranks' init refs
        asked = [rank.actor.load_progress.remote() for rank in ranks[:: -(-len(ranks) // _MAX_ASKED)]]
        answered, _ = self._runtime.wait(asked, num_returns=len(asked), timeout_s=_PROGRESS_S)
        shares: list[float] = []
        for ref in answered:
            with suppress(RayError):
                shares.append(self._runtime.get(ref))
        on_progress(sum(shares) / len(asked))

    def _init_result(self, rank: Rank) -> EngineInfo:
        try:
            return msgspec.msgpack.decode(self._runtime.get(rank.init_ref), type=EngineInfo)
        except RayError as error:
            cause = root_cause(error)
            # what a worker refuses isn't what the caller gave
            if isinstance(cause, (InvalidInput, InitializationError)) and not isinstance(cause, WorkerFailed):
                raise cause from error
            text = f"{describe_death(error)}\n{describe_rank(None, rank.dp_rank)} failed to start"
            raise InitializationError(
                self._runtime.with_last_lines(text, pid_of_dead_actor(error), rank.engine_node)
            ) from error
