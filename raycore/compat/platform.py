"""`current_platform`: what kind of device this machine has."""

from __future__ import annotations

import os
import platform

from raycore.node.versions import cuda_of_torch

__all__ = ["current_platform"]

_DRIVER = "/dev/nvidiactl"
"""Exists if the machine has NVIDIA's driver."""


class Platform:
    """The device that an engine on this machine would use by itself. raycore runs on CPUs and on NVIDIA's GPUs."""

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.is_cuda() else "cpu"

    @property
    def device_name(self) -> str:
        """The same as `device_type`."""
        return self.device_type

    def is_cuda(self) -> bool:
        """Whether there is a GPU, and torch is built for it."""
        return os.path.exists(_DRIVER) and cuda_of_torch() is not None

    def is_cuda_alike(self) -> bool:
        """The same as `is_cuda()`."""
        return self.is_cuda()

    def is_cpu(self) -> bool:
        """Whether there is none."""
        return not self.is_cuda()

    def is_rocm(self) -> bool:
        """False: raycore has no kernels for AMD's GPUs."""
        return False

    def is_tpu(self) -> bool:
        """False."""
        return False

    def is_xpu(self) -> bool:
        """False."""
        return False

    def is_out_of_tree(self) -> bool:
        """False: raycore has no plugins for devices."""
        return False

    def is_sleep_mode_available(self) -> bool:
        """True: an engine can always sleep."""
        return True

    def get_cpu_architecture(self) -> str:
        """The processor's architecture as the operating system names it, such as `x86_64`."""
        return platform.machine()


current_platform = Platform()
