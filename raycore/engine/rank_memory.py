"""The memory of one rank's workers, which is given up when the engine sleeps, and allocated again when it wakes."""

from __future__ import annotations

from contextlib import ExitStack

from raycore.activity import RUNNING, Activity
from raycore.cache_layout import KVCacheConfig
from raycore.engine.part import EngineHooks
from raycore.executor.base import Executor
from raycore.node.garbage import freeze_heap
from raycore.scheduler.protocol import SchedulerProtocol


class RankMemory:
    """Weights and KV cache of one rank. Call its methods while no step is in flight."""

    def __init__(
        self,
        executor: Executor,
        scheduler: SchedulerProtocol,
        hooks: EngineHooks,
        cache: KVCacheConfig,
        wake_timeout_s: float,
    ) -> None:
        """
        Args:
            hooks: those of the engine's parts, which sleep before the weights, and wake after them.
            cache: the KV cache.
            wake_timeout_s: how long a part may take to wake, such as the workers to read the adapters again.
        """
        self._executor = executor
        self._scheduler = scheduler
        self._hooks = hooks
        self._cache = cache
        self._wake_timeout_s = wake_timeout_s
        self.activity = RUNNING
        """What the memory is allocated for."""
        self._has_cache = True

    def allocate_cache(self) -> None:
        """Allocate the KV cache, and warm up the model."""
        self._executor.initialize_cache(self._cache)
        self._executor.collective_rpc(freeze_heap)

    def set_activity(self, activity: Activity) -> None:
        """Give up the memory that is asleep in `activity`, and get back what is awake. Waits for that.

        Raises: what a worker raised. The rank can't continue afterwards.
        """
        before, self.activity = self.activity, activity
        with ExitStack() as around:
            for changing in self._hooks.changing:
                around.enter_context(changing(before, activity))
            self._change(before, activity)

    def _change(self, before: Activity, activity: Activity) -> None:
        falling_asleep = activity.falling_asleep_from(before)
        if falling_asleep:
            self._has_cache = self._has_cache and "kv_cache" not in falling_asleep
            for sleep in self._hooks.sleep if "weights" in falling_asleep else ():
                sleep(drops=activity.sleep_level >= 2)
            self._executor.sleep(activity.sleep_level, falling_asleep)
            if not self._has_cache:
                self._scheduler.start_over()
        if "weights" in activity.waking_from(before):
            self._executor.wake_up(["weights"], reads_weights=activity.reads_weights)
            for wake in self._hooks.wake:
                wake(self._wake_timeout_s)
        if not (self._has_cache or activity.asleep):
            # needs the weights, so it waits for them even if the caller wakes the cache first
            self.allocate_cache()
            self._has_cache = True
