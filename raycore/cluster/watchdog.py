"""Notices ranks that are alive, but make no progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.exceptions import RayError

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.cluster.runtime import Runtime
    from raycore.engine.engine_actor import DPEngineCoreActor


class Watchdog:
    """Checks that a rank makes progress. Polls the rank only while the rank has work."""

    def __init__(self, actor: DPEngineCoreActor, step_timeout_s: float, runtime: Runtime) -> None:
        self._actor = actor
        self._timeout_s = step_timeout_s
        self._runtime = runtime
        self._asked: ObjectRef[float] | None = None
        self._asked_s = 0.0

    def look(self, is_busy: bool) -> str | None:
        """Poll the rank if it is busy. Returns why the rank counts as stalled, or None if it doesn't. Never blocks."""
        now_s = self._runtime.clock.now_s()
        if self._asked is None:
            if is_busy:
                self._asked, self._asked_s = self._actor.step_age_s.remote(), now_s
            return None
        done, _ = self._runtime.wait([self._asked], timeout_s=0)
        if not done:
            late_s = now_s - self._asked_s
            return f"it hasn't answered for {late_s:.1f} s" if late_s > self._timeout_s else None
        answered, self._asked = self._asked, None
        try:
            age_s = self._runtime.get(answered)
        except RayError:
            return None  # the rank has died: its run ref reports that
        return f"its present step has taken {age_s:.1f} s" if age_s > self._timeout_s else None
