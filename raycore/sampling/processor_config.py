"""What logits processors are told of the engine, in the form of vLLM's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from raycore.config import EngineConfig, ParallelConfig, SchedulerConfig
from raycore.config.cache import CacheConfig


@dataclass(frozen=True)
class ProcessorModelConfig:
    """The model, as far as logits processors may ask."""

    model: str
    tokenizer: str
    dtype: torch.dtype
    max_model_len: int
    seed: int
    vocab_size: int

    def get_vocab_size(self) -> int:
        """The number of logits in a row."""
        return self.vocab_size


@dataclass(frozen=True)
class LogitsProcessorConfig:
    """The argument `vllm_config` of logits processors: those parts of vLLM's configuration that raycore has, too."""

    model_config: ProcessorModelConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    cache_config: CacheConfig
    speculative_config: Any = None
    """None: engines with logits processors don't speculate."""

    @staticmethod
    def of(config: EngineConfig, dtype: torch.dtype) -> LogitsProcessorConfig:
        """What an engine's processors are told. `dtype`: the data type that the model computes in."""
        model = config.model
        return LogitsProcessorConfig(
            ProcessorModelConfig(
                model.model, model.tokenizer, dtype, model.max_model_len, model.seed, model.spec.vocab_size
            ),
            config.scheduler,
            config.parallel,
            config.cache,
        )
