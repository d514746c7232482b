"""What the tests' engines compute in, whichever formats this machine's processor is fast at."""

from __future__ import annotations

import os

import pytest
from native_kernels import needs_kernels

DTYPE = os.environ.get("RAYCORE_TEST_DTYPE", "float32")
"""Of every engine whose test names no dtype."""

REPEATABLE = [
    pytest.param({"dtype": "float32"}, id="float32"),
    pytest.param({"dtype": "bfloat16", "batch_invariant": True}, id="bfloat16"),
]
"""Options under which a request's tokens don't depend on what else runs, but for float32's closest ties."""

BATCH_INVARIANT = [
    *(pytest.param({"dtype": dtype, "batch_invariant": True}, id=dtype) for dtype in ("float32", "bfloat16")),
    pytest.param(
        {"dtype": "bfloat16", "batch_invariant": True, "kv_cache_dtype": "int8_per_token_head"},
        id="a cache of integers",
        marks=needs_kernels,
    ),
]
"""Options under which a token has the same bits whatever else runs."""
