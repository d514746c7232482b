"""The dtype that `auto` means, from the checkpoint and the processor's features."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycore.node.cpu_features import cpu_features, features_of
from raycore.worker.cpu_dtype import choose_cpu_dtype

AVX2 = ["sse", "avx2", "fma"]


@pytest.mark.parametrize(
    ("checkpoint_dtype", "features", "dtype"),
    [
        ("float32", [*AVX2, "avx512_bf16", "amx_bf16"], "float32"),
        ("bfloat16", AVX2, "float32"),
        ("bfloat16", [*AVX2, "avx512f"], "float32"),
        ("bfloat16", [*AVX2, "avx512_bf16"], "bfloat16"),
        ("bfloat16", [*AVX2, "amx_bf16"], "bfloat16"),
        ("bfloat16", ["asimd", "bf16"], "bfloat16"),
        ("bfloat16", [], "float32"),
        ("float16", [*AVX2, "avx512_bf16"], "float32"),
        ("float16", [*AVX2, "avx512_fp16"], "float16"),
    ],
)
def test_dtype_auto_is_the_checkpoints_if_the_processor_multiplies_it(checkpoint_dtype, features, dtype):
    assert choose_cpu_dtype(checkpoint_dtype, features) == dtype


def test_processor_features_are_read_from_proc_cpuinfo(tmp_path: Path):
    text = "processor : 0\nmodel name : A\nflags\t\t: fpu avx2 amx_bf16\n\nprocessor : 1\nflags : fpu\n"
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_features(tmp_path / "cpuinfo") == {"fpu", "avx2", "amx_bf16"}
    assert features_of("Features : asimd bf16\n") == {"asimd", "bf16"}
    assert cpu_features(tmp_path / "none") == frozenset()
