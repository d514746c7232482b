"""Native kernels for CPUs, as torch operations `torch.ops.raycore`.

The C++ sources in `csrc` are compiled when raycore is installed, once for each instruction set. The library links to
nothing but the C library: it finds libtorch's stable C functions in the running process. So it is built without torch,
and one binary works with every torch that raycore supports.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

VARIABLE = "RAYCORE_CPU_KERNELS"
"""This environment variable chooses the kernels' instruction set: `avx2`, `avx_vnni`, `avx512`, `avx512_vnni`,
`avx512_bf16`, `amx` or `neon`; or `none`, for plain torch. By default, the fastest that the processor has. When raycore
is installed, it chooses what is compiled: `all` compiles all of them, as packages have them for other machines."""

FOLDER = Path(__file__).parent
RECORD = "_cpu.json"
"""Beside the library: what compiled it, for which machine, from which sources; or why it is missing."""

Backend = Literal["triton", "native", "torch"]
"""Whose kernels compute: those for GPUs, those for CPUs, or plain torch's functions."""


def compiled(folder: Path = FOLDER) -> list[Path]:
    """The compiled kernels of a copy of raycore, by default this one. Empty if it was installed without a compiler."""
    return sorted(folder.glob("_cpu*.so"))


def build_record(folder: Path = FOLDER) -> dict[str, str]:
    """What the build recorded of a copy's kernels. Empty if there was no build."""
    try:
        return json.loads((folder / RECORD).read_text())
    except OSError:
        return {}


def are_compiled(*_: object) -> tuple[str, bool, str] | None:
    """The kernels' folder, whether they are there, and a digest of the sources that they were compiled from.

    The digest is empty if it isn't known. None if this process is told not to use them. The arguments are ignored;
    `collective_rpc` passes the worker.
    """
    if os.environ.get(VARIABLE) == "none":
        return None
    return str(FOLDER), bool(compiled()), build_record().get("sources", "")
