"""The dtype that `dtype="auto"` means on a CPU. This module does not import torch."""

from __future__ import annotations

from collections.abc import Collection

from raycore.config import DType
from raycore.models.spec import CheckpointDType

_INSTRUCTIONS: dict[DType, frozenset[str]] = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16"}),
}
"""Features of processors that multiply numbers of these types. Other processors are faster in float32."""


def choose_cpu_dtype(checkpoint_dtype: CheckpointDType, features: Collection[str]) -> DType:
    """Return the checkpoint's dtype if the processor has instructions for it, otherwise float32.

    `features`: the names of the processor's features, as in /proc/cpuinfo.
    """
    return checkpoint_dtype if not _INSTRUCTIONS.get(checkpoint_dtype, frozenset()).isdisjoint(features) else "float32"
