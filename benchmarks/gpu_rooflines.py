"""What a step of a model could take at best, for `benchmarks/gpu.py`: sizes of models, and rates of the device.

A decode step reads all weights that it uses and the cache of its sequences once, so its lower bound is these bytes over
the memory's bandwidth. A prompt's lower bound is its multiplications over the rate of a large matrix product. Both
rates are measured where the steps are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from raycore.models.spec import ModelSpec

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "30b-a3b": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
"""The shapes of Qwen3's models."""
TOY_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
NOMINAL = {
    "H100 80GB HBM3": (3352, 989),
    "H100 PCIe": (2039, 756),
    "H100 NVL": (3938, 835),
    "H200": (4800, 989),
    "A100-SXM4-80GB": (2039, 312),
    "A100 80GB PCIe": (1935, 312),
    "A100-SXM4-40GB": (1555, 312),
    "A10G": (600, 70),
    "L40S": (864, 362),
    "L4": (300, 121),
}
"""By a part of the GPU's name: GB/s of memory, and Tflop/s of dense matrix products in bfloat16, by its data sheet."""


@dataclass(frozen=True)
class Rates:
    """What the device does in a second."""

    copied: float
    """Bytes that a large copy reads and writes."""
    read: float
    """Bytes that a large sum reads."""
    flops: float
    """Of a large matrix product in bfloat16."""

    @property
    def bytes(self) -> float:
        """Bytes that memory delivers."""
        return max(self.copied, self.read)

    def text(self, device: torch.device) -> str:
        """These rates, and those of the device's data sheet."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        nominal = next((rates for part, rates in NOMINAL.items() if part in name), ("unknown", "unknown"))
        return (
            f"memory: {self.copied / 1e9:.0f} GB/s copying, {self.read / 1e9:.0f} GB/s reading, nominal {nominal[0]}; "
            f"matrix products in bfloat16: {self.flops / 1e12:.1f} Tflop/s, nominal {nominal[1]}"
        )


def weight_counts(spec: ModelSpec) -> tuple[int, int, int, int]:
    """Return how many weights a model has: of layers without experts, of experts, of those of them that a token uses,
    and of the head."""
    layers = sum(part.num_weights(spec) for part in (*spec.mixers, *spec.feed_forwards))
    experts, used = map(sum, zip(*(part.expert_weights(spec) for part in spec.feed_forwards), strict=True))
    return layers - used, experts, used, spec.vocab_size * spec.hidden_size


def model_bytes(spec: ModelSpec) -> int:
    """Return the size of all weights in bfloat16."""
    layers, experts, _, head = weight_counts(spec)
    return 2 * (layers + experts + head * (1 if spec.tie_word_embeddings else 2))


def decode_bytes(spec: ModelSpec, batch: int, context: int) -> float:
    """Return the bytes that a decode step has to read: weights that it uses, and the cache of its sequences.

    Of each layer's experts, it reads so many different ones as uniform routing is expected to choose.
    """
    layers, experts, used, head = weight_counts(spec)
    unused = (1 - used / experts) ** batch if experts else 0.0
    num_weights = layers + head + experts * (1 - unused)
    num_seen = sum(min(context, window or context) for window in spec.layer_windows)
    return 2 * (num_weights + batch * num_seen * 2 * spec.num_kv_heads * spec.head_dim)


def prompt_flops(spec: ModelSpec, num_tokens: int) -> float:
    """Return the additions and multiplications of a prompt, those of attention included."""
    layers, _, used, head = weight_counts(spec)
    num_pairs = 0
    for window in spec.layer_windows:
        width = min(window or num_tokens, num_tokens)
        num_pairs += width * (width + 1) // 2 + (num_tokens - width) * width
    return 2 * ((layers + used) * num_tokens + head) + 4 * num_pairs * spec.num_heads * spec.head_dim


def measure_rates(device: torch.device, num_bytes: int, dim: int) -> Rates:
    """Measure the memory's bandwidth with `num_bytes` bytes, and the product of two matrices [dim, dim]."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_s = _fastest_s(lambda: target.copy_(source), device)
    read_s = _fastest_s(source.sum, device)
    matrix = torch.randn(dim, dim, device=device).bfloat16()
    product_s = _fastest_s(lambda: matrix @ matrix.t(), device)
    return Rates(2 * num_bytes / copy_s, num_bytes / read_s, 2 * dim**3 / product_s)


def _fastest_s(function: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of several times, in seconds."""
    best_s = math.inf
    for _ in range(8):
        started_s = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s
