"""Workers that don't start, for the option `worker_cls`: a class for each stage of the start, and each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from raycore.errors import InvalidInput
from raycore.system import os, time
from simulation.cluster.deployments.starts import STAGES, WAYS, class_name
from simulation.worker.worker import SimulatedWorker

_HANGS_S = 1e4


def _refuses() -> NoReturn:
    raise InvalidInput("the worker takes no such value")


def _fails() -> NoReturn:
    raise OSError("the device is gone")


def _ends() -> NoReturn:
    os._exit(1)


def _hangs() -> None:
    time.sleep(_HANGS_S)


_DEEDS: dict[str, Callable[[], object]] = dict(zip(WAYS, (_refuses, _fails, _ends, _hangs), strict=True))


def _class(stage: str, way: str, is_any: bool) -> type[SimulatedWorker]:
    original: Callable[..., Any] = getattr(SimulatedWorker, stage)

    def start(self: SimulatedWorker, *args: Any) -> Any:
        result = original(self, *args)
        parallel, rank = self.config.parallel, self.rank
        is_last = (rank.dp_rank, rank.worker) == (parallel.data_parallel_size - 1, parallel.world_size - 1)
        if is_any or is_last:
            _DEEDS[way]()
        return result

    name = class_name(stage, way, is_any=is_any)
    return type(name, (SimulatedWorker,), {stage: start, "__module__": __name__})


_ALL = [_class(stage, way, is_any) for stage in STAGES for way in WAYS for is_any in (True, False)]
globals().update({each.__name__: each for each in _ALL})
