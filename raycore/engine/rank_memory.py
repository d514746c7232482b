"""The memory of one rank's workers, which is given up when the engine sleeps, and allocated again when it wakes."""

from __future__ import annotations

from raycore.activity import RUNNING, Activity
from raycore.cache_layout import KVCacheConfig
from raycore.engine.adapters import AdaptersInUse
from raycore.executor.base import Executor
from raycore.node.garbage import freeze_heap
from raycore.scheduler.protocol import SchedulerProtocol


class RankMemory:
    """Weights, KV cache and adapters of one rank. Call its methods while no step is in flight."""

    def __init__(
        self,
        executor: Executor,
        scheduler: SchedulerProtocol,
        adapters: AdaptersInUse | None,
        cache: KVCacheConfig,
        wake_timeout_s: float,
    ) -> None:
        """
        Args:
            cache: the KV cache.
            wake_timeout_s: how long the workers may take to read the adapters again.
        """
        self._executor = executor
        self._scheduler = scheduler
        self._adapters = adapters
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
        falling_asleep = activity.falling_asleep_from(before)
        if falling_asleep:
            self._has_cache = self._has_cache and "kv_cache" not in falling_asleep
            if self._adapters is not None and "weights" in falling_asleep:
                self._adapters.sleep(drops=activity.sleep_level >= 2)
            self._executor.sleep(activity.sleep_level, falling_asleep)
            if not self._has_cache:
                self._scheduler.start_over()
        if "weights" in activity.waking_from(before):
            self._executor.wake_up(["weights"], reads_weights=activity.reads_weights)
            if self._adapters is not None:
                self._adapters.wake(self._wake_timeout_s)
        if not (self._has_cache or activity.asleep):
            # needs the weights, so it waits for them even if the caller wakes the cache first
            self.allocate_cache()
            self._has_cache = True
