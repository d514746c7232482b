"""Makes Triton interpret kernels where there is no GPU, so that tests can run them on CPU tensors.

Triton decides when `@triton.jit` is applied whether a kernel is compiled or interpreted, and it applies it to its own
library when it is imported. So the environment variable has to be set before anything imports Triton: import this
module before any module with kernels. With a GPU, the same tests run compiled kernels.

The interpreter runs programs one after the other. Its `tl.dot` is wrong in bfloat16: use the dtypes in `DTYPES`.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the kernels' tensors have to be."""

if DEVICE.type == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before interpreted_triton, so it compiles kernels. Import it later.")
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="there is no Triton for this platform")

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
"""The dtypes that kernels can be tested with."""
