"""A device of CUDA that does nothing, on machines without a GPU: Triton compiles kernels and launches them.

Triton does in Python and C what it does with a GPU, but for the device and the stream, which are constants. The driver
below it (`idle_cuda.cpp`) succeeds at once. Tensors may be on the CPU, or on the device "meta", whose pointers are 0
and aren't looked up. Use it in a process of its own: a process has one driver, and in those of other tests, Triton
interprets kernels.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).with_suffix(".cpp")
COMPUTE_CAPABILITY = 9, 0


class Launch(NamedTuple):
    """What a driver is told by a launch."""

    function: int
    """The number of what was compiled."""
    sizes: list[int]
    """Those of the grid and of the block, three each, and the bytes of shared memory."""
    parameters: list[int]
    """The first four bytes of each parameter that is noted."""


class IdleCuda:
    """The device, which Triton uses from now on."""

    def __init__(self, directory: Path) -> None:
        """`directory`: where the driver is compiled to. The process needs `TRITON_INTERPRET=0`."""
        library = directory / "libcuda.so.1"
        compiler = os.environ.get("CC", "cc")
        name = f"-Wl,-soname,{library.name}"  # by which Triton's `dlopen` finds the library that is loaded here
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", name, "-o", str(library), str(SOURCE)], check=True)
        os.environ["TRITON_LIBCUDA_PATH"] = str(directory)
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        _activate()

    @property
    def num_launches(self) -> int:
        """How many kernels Triton has launched."""
        return ctypes.c_int64.in_dll(self._library, "idle_num_launches").value

    def note_parameters(self, count: int) -> None:
        """Note the first `count` parameters of each launch from now on."""
        ctypes.c_int32.in_dll(self._library, "idle_num_parameters").value = count

    def last_launch(self) -> Launch:
        """Return what the driver was told by the last launch."""
        count = ctypes.c_int32.in_dll(self._library, "idle_num_parameters").value
        function = ctypes.c_int64.in_dll(self._library, "idle_function").value
        sizes = (ctypes.c_uint32 * 7).in_dll(self._library, "idle_sizes")
        parameters = (ctypes.c_uint32 * 32).in_dll(self._library, "idle_parameters")
        return Launch(function, list(sizes), list(parameters)[:count])


def _activate() -> None:
    """Make Triton compile for a device of CUDA and launch there, although torch has none."""
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
    from triton.runtime import driver

    class IdleDriver(CudaDriver):
        def __init__(self) -> None:
            self.utils: Any = CudaUtils()
            self.launcher_cls = CudaLauncher
            self.get_device_capability = lambda device: COMPUTE_CAPABILITY
            self.get_current_stream = lambda device: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None

    driver.set_active(IdleDriver())
