"""The engine's configuration: immutable, and resolved once.

Users pass keyword arguments to `LLM(...)`, or flags. `resolve()` checks them, reads the checkpoint's `config.json`,
computes the values that were not given, and returns one `EngineConfig`, which every process of the engine gets.
Each option is declared once, by an `option(...)` at its field: see `raycore.options.declared`.
Nothing here imports Ray or torch.
"""

from __future__ import annotations

__all__ = [
    "ENGINE_OPTIONS",
    "CacheConfig",
    "DType",
    "EngineConfig",
    "ExecutorConfig",
    "LoRAConfig",
    "ModelConfig",
    "ParallelConfig",
    "PoolerConfig",
    "RecoveryConfig",
    "SchedulerConfig",
    "changes",
    "non_defaults",
    "resolve",
]

from raycore.config.cache import CacheConfig
from raycore.config.engine import EngineConfig, changes
from raycore.config.executor import ExecutorConfig
from raycore.config.model import DType, ModelConfig
from raycore.config.parallel import ParallelConfig
from raycore.config.recovery import RecoveryConfig
from raycore.config.resolution import ENGINE_OPTIONS, non_defaults, resolve
from raycore.config.scheduler import SchedulerConfig
from raycore.parts.adapters.config import LoRAConfig
from raycore.parts.pooling.config import PoolerConfig
