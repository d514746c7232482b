"""A small engine for `raycore.simulation`, and step times that are easy to add up."""

from __future__ import annotations

from typing import Any

import numpy as np
from configs import make_config
from msgspec.structs import replace
from numpy.typing import NDArray

from raycore.cache_layout import KVCacheConfig
from raycore.config import EngineConfig
from raycore.simulation.deployment import Plan
from raycore.simulation.roofline import plain_layout
from raycore.simulation.step_times import StepShape


class PlainTimes:
    """A step takes 10 ms, 1 ms for each decode, 0.1 ms for each prompt token, and a little for each token before."""

    def step_s(self, shape: StepShape) -> float:
        decodes = float(self.decodes_s(shape.num_decodes, np.array([shape.decode_context]))[0])
        return decodes + shape.prompt_tokens * 1e-4

    def decodes_s(self, num_decodes: int, contexts: NDArray[np.float64]) -> NDArray[np.float64]:
        return 0.01 + num_decodes * (1e-3 + contexts * 1e-6)

    def engine_s(self, num_sequences: int, num_new: int = 0) -> float:
        return 1e-3


def make_engine(depth: int = 1, max_replays: int = 2, **options: Any) -> EngineConfig:
    """A configuration with `depth` steps in flight. `options`: those of `make_config`."""
    config = make_config(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, **options})
    scheduler = replace(config.scheduler, max_concurrent_batches=depth)
    recovery = replace(config.recovery, max_request_replays=max_replays)
    return replace(config, scheduler=scheduler, recovery=recovery)


def make_plan(config: EngineConfig, num_blocks: int = 64, **fields: Any) -> Plan:
    """A plan with `PlainTimes`."""
    return Plan(KVCacheConfig(num_blocks, plain_layout(config)), PlainTimes(), **fields)
