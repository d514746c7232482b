"""Workers without a model, which do what a test asks of them.

Ray's worker processes import this module, so it imports little.
"""

import os
import time

from raycore.cache_layout import LayerCacheSpec, WorkerCacheSpec
from raycore.messages import Computation, StepResult


class FakeWorker:
    """Answers, raises, sleeps, or dies."""

    def __init__(self, config, rank):
        self.rank = rank.tp_rank
        self.worker_rank = rank

    def init_device(self):
        pass

    def load_model(self):
        pass

    def determine_available_memory(self):
        return 1000 - self.rank

    def get_kv_cache_spec(self):
        return WorkerCacheSpec((LayerCacheSpec("full", 10 + self.rank),))

    def initialize_cache(self, cache):
        self.num_blocks = cache.num_blocks

    def warm_up(self):
        self.is_warm = True

    def dtype_name(self):
        return "float32"

    def computation(self):
        return Computation("fake")

    def check_health(self):
        pass

    def execute_model(self, plan):
        """A plan's `freed_slots`, if any, say which ranks raise and its step how long the others sleep, in ms."""
        if self.rank in plan.freed_slots:
            raise ValueError(f"rank {self.rank} can't do step {plan.step}")
        if plan.freed_slots:
            time.sleep(plan.step / 1000)
        return StepResult(plan.step, b"tokens") if self.rank == 0 else None

    def shutdown(self):
        pass

    # ---- what tests call

    def echo(self, value, suffix=b""):
        return self.rank, value + suffix

    def sleep(self, seconds):
        time.sleep(seconds)
        return self.rank

    def fail(self, rank):
        if self.rank == rank:
            raise RuntimeError(f"told to fail on {rank}")
        return self.rank

    def exit(self, rank):
        if self.rank == rank:
            os._exit(3)
        time.sleep(60)

    def state(self):
        return self.worker_rank, self.num_blocks, self.is_warm


class FailsToLoad(FakeWorker):
    """The second worker can't load the model; the first waits for it for ever."""

    def load_model(self):
        if self.rank == 1:
            raise OSError("no such tensor: lm_head")
        time.sleep(600)


class DiesLoading(FakeWorker):
    """The second worker's process ends while it loads."""

    def load_model(self):
        if self.rank == 1:
            os._exit(7)
        time.sleep(600)


class NeverStops(FakeWorker):
    """Takes its time to shut down."""

    def shutdown(self):
        time.sleep(600)
