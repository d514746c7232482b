"""Executors of ranks that share experts; a barrier stands for the exchange between their workers."""

from __future__ import annotations

import threading

import msgspec
from configs import make_config
from fake_executor import FakeExecutor
from waiting import LONG_S

from raycore.config import EngineConfig
from raycore.errors import RpcTimeout
from raycore.messages import StepResult


class Exchange:
    """What engines' workers do at the beginning of a step: all learn whether anyone has tokens."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size, self._settle)
        self._is_busy = [False] * size
        self._result = False

    def _settle(self):
        self._result = any(self._is_busy)

    def meet(self, rank: int, is_busy: bool, timeout_s: float) -> bool:
        self._is_busy[rank] = is_busy
        try:
            self._barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise RpcTimeout("the others didn't come") from None
        return self._result


class SharingExecutor(FakeExecutor):
    """A fake worker that meets the others' in every step."""

    def __init__(self, exchange: Exchange, rank: int, max_concurrent_batches: int = 1):
        super().__init__(max_concurrent_batches=max_concurrent_batches)
        self.exchange = exchange
        self.rank = rank
        self.num_dummies = 0

    def execute(self, plan):
        return _SharedStep(self, super().execute(plan), bool(plan.slots))

    def execute_dummy_batch(self):
        self.num_dummies += 1
        return _SharedStep(self, None, False)


class _SharedStep:
    def __init__(self, executor, own, is_busy):
        self.executor, self.own, self.is_busy = executor, own, is_busy

    def result(self, timeout):
        is_anyone_busy = self.executor.exchange.meet(self.executor.rank, self.is_busy, min(timeout, LONG_S))
        result = self.own.result() if self.own is not None else StepResult(-1)
        result.is_anyone_busy = is_anyone_busy
        return result


def config_of(num_ranks: int) -> EngineConfig:
    config = make_config()
    parallel = msgspec.structs.replace(config.parallel, data_parallel_size=num_ranks, enable_expert_parallel=True)
    return msgspec.structs.replace(config, parallel=parallel)
