"""Native kernels for CPUs, as torch operations `torch.ops.raycore`.

The C++ sources in `csrc` are compiled when raycore is installed, once for each instruction set. The library links to
nothing but the C library: it finds libtorch's stable C functions in the running process. So it is built without torch,
and one binary works with every torch that raycore supports.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

VARIABLE = "RAYCORE_CPU_KERNELS"
"""This environment variable chooses the kernels' instruction set: `avx2`, `avx512`, `avx512_vnni`, `avx512_bf16`, `amx`
or `neon`; or `none`, for plain torch. By default, the fastest that the processor has. When raycore is installed, it
chooses what is compiled: `all` compiles all of them, as packages have them for other machines."""

FOLDER = Path(__file__).parent

Backend = Literal["triton", "native", "torch"]
"""Whose kernels compute: those for GPUs, those for CPUs, or plain torch's functions."""


def compiled(folder: Path = FOLDER) -> list[Path]:
    """The compiled kernels of a copy of raycore, by default this one. Empty if it was installed without a compiler."""
    return sorted(folder.glob("_cpu*.so"))


def are_compiled(*_: object) -> tuple[str, bool] | None:
    """The kernels' folder, and whether they are there. None if this process is told not to use them.

    The arguments are ignored; `collective_rpc` passes the worker.
    """
    return None if os.environ.get(VARIABLE) == "none" else (str(FOLDER), bool(compiled()))
