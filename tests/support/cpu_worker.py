"""A worker of a GPU that computes on the CPU, for tests of what surrounds it. Workers import this module."""

from __future__ import annotations

import os

import msgspec

from raycore.worker.worker import Worker


class CpuWorker(Worker):
    def __init__(self, config, rank):
        super().__init__(msgspec.structs.replace(config, device="cpu"), rank)

    def gpu_id(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]
