"""How long a step takes at least, from a model's configuration and what a device can do.

A step reads the weights and the keys and values of its sequences once, and computes two operations for each weight and
token, and four for each element of attention. It takes as long as the slower of both. Real steps take longer: give what
a device reaches, not what its data sheet says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from raycore.cache_layout import CacheLayout, KVCacheConfig, LayerCacheSpec, divide_layers
from raycore.config import EngineConfig
from raycore.errors import InvalidConfig
from raycore.models.spec import ModelSpec
from raycore.simulation.step_times import StepShape

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
GIB = 1 << 30
Numbers = TypeVar("Numbers", float, NDArray[np.float64])


@dataclass(frozen=True)
class Device:
    """What the workers of a rank can do, each."""

    bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    """What weights and the KV cache may take together."""


class Roofline:
    """Step times of a model on a device."""

    def __init__(self, config: EngineConfig, device: Device, overhead_s: float = 0.0) -> None:
        """
        Args:
            overhead_s: what each step takes besides.

        Raises:
            InvalidConfig: the model isn't a decoder whose sizes say what it computes.
        """
        spec = config.model.spec
        if spec.implementation != "raycore" or spec.encoder is not None or spec.why_not("roofline") is not None:
            raise InvalidConfig(f"{spec.architecture} isn't a plain decoder: measure it with raycore bench step-times")
        tp_size = config.parallel.tensor_parallel_size
        self._device, self._overhead_s = device, overhead_s
        self._num_bytes = _bytes_of(config)
        self._dense, self._sparse, self._chosen = _weights(spec)
        self.weight_bytes = (self._dense + self._sparse) * self._num_bytes / tp_size
        """Of each worker."""
        self._attention_width = 4 * spec.num_heads * spec.head_dim * spec.num_layers / tp_size
        kv_heads = spec.kv_heads_per_rank(tp_size)
        self.token_bytes = 2 * kv_heads * spec.head_dim * spec.num_layers * _cache_bytes(config)
        """Of a token's keys and values, on each worker."""
        self._tp_size = tp_size

    def cache(self, config: EngineConfig) -> KVCacheConfig:
        """The KV cache of a rank with the memory that weights leave.

        Raises:
            InvalidConfig: there is none left.
        """
        layout = plain_layout(config)
        block_bytes = self.token_bytes * config.tokens_per_block
        given = config.cache.kv_cache_memory_bytes
        room = self._device.memory_bytes - self.weight_bytes if given is None else float(given)
        num_blocks = config.cache.num_gpu_blocks_override or int(room // block_bytes)
        if num_blocks < 1:
            raise InvalidConfig(
                f"the weights take {self.weight_bytes / GIB:.1f} GiB of the {self._device.memory_bytes / GIB:.1f} GiB "
                "that --memory-gib gives: nothing is left for the KV cache"
            )
        return KVCacheConfig(num_blocks, layout)

    def step_s(self, shape: StepShape) -> float:
        """See `StepTimes`."""
        tokens = shape.prompt_tokens + shape.num_decodes
        per_prompt = shape.prompt_tokens / max(1, shape.num_prompts)
        pairs = shape.num_decodes * shape.decode_context
        pairs += shape.prompt_tokens * (shape.prompt_context + per_prompt / 2)
        read = shape.num_decodes * shape.decode_context + shape.num_prompts * shape.prompt_context
        return max(*self._seconds(tokens, pairs, read))

    def decodes_s(self, num_decodes: int, contexts: NDArray[np.float64]) -> NDArray[np.float64]:
        """See `StepTimes`."""
        pairs = contexts * num_decodes
        return np.maximum(*self._seconds(num_decodes, pairs, pairs))

    def engine_s(self, num_sequences: int, num_new: int = 0) -> float:
        """See `StepTimes`."""
        return self._overhead_s

    def _seconds(self, tokens: int, pairs: Numbers, read: Numbers) -> tuple[Numbers, Numbers]:
        """How long memory and products take.

        Args:
            pairs: of a token and another one that it sees.
            read: tokens whose keys and values are read.
        """
        # tokens choose experts independently of each other
        share = 1 - (1 - self._chosen) ** tokens if self._sparse else 0.0
        num_bytes = (self._dense + share * self._sparse) * self._num_bytes / self._tp_size + read * self.token_bytes
        flops = 2 * (self._dense + self._chosen * self._sparse) * tokens / self._tp_size
        return (
            num_bytes / self._device.bytes_per_s,
            (flops + pairs * self._attention_width) / self._device.flops_per_s,
        )


def plain_layout(config: EngineConfig) -> CacheLayout:
    """The groups of layers that share blocks, by the model's configuration alone."""
    windows = config.model.spec.layer_windows
    layers = [LayerCacheSpec("full" if window is None else "window", 1, window) for window in windows]
    return divide_layers(layers, config.cache_limits)


def _bytes_of(config: EngineConfig) -> float:
    quantization = config.model.quantization
    if quantization is not None:
        return 1.0 if quantization in ("fp8", "int8") else 0.5
    if config.model.spec.stores_fp8:
        return 1.0
    dtype = str(config.model.dtype)
    return _BYTES[config.model.spec.dtype if dtype == "auto" else dtype]


def _cache_bytes(config: EngineConfig) -> int:
    kept = str(config.cache.kv_cache_dtype)
    if kept.startswith("fp8"):
        return 1
    name = kept if kept != "auto" else str(config.model.dtype)
    return _BYTES[cast("str", config.model.spec.dtype) if name == "auto" else name]


def _weights(spec: ModelSpec) -> tuple[int, int, float]:
    """Numbers of weights that all tokens use, and of experts, and which fraction of the experts' a token uses."""
    layers = sum(part.num_weights(spec) for part in (*spec.mixers, *spec.feed_forwards))
    experts, used = map(sum, zip(*(part.expert_weights(spec) for part in spec.feed_forwards), strict=True))
    return layers - used + spec.vocab_size * spec.hidden_size, experts, used / experts if experts else 0.0
