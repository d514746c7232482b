"""What the two sides of the offload connector tell each other."""

from __future__ import annotations

import msgspec

NOWHERE = -1
"""Instead of a slot of the host's memory: the block is in a file, or goes only into one."""


class Save(msgspec.Struct, array_like=True, gc=False):
    """A block to copy before the step."""

    digest: bytes
    block: int
    slot: int
    to_file: bool


class BlockSource(msgspec.Struct, array_like=True, gc=False):
    """A block to load."""

    block: int
    slot: int
    digest: bytes = b""
    """Of a block in a file."""


class LoadJob(msgspec.Struct, array_like=True):
    """Blocks that a request waits for."""

    seq_id: int
    sources: list[BlockSource]


class Orders(msgspec.Struct, array_like=True):
    """For the workers, with a plan. In this order: saves, loads, jobs."""

    saves: list[Save] = []
    loads: list[BlockSource] = []
    """From the host's memory, before the step."""
    jobs: list[LoadJob] = []
    cancelled: list[int] = []
    """The seq_ids of jobs for which nobody waits any more."""
    clears_files: bool = False
    """Whether all files are removed first."""


class LoadReport(msgspec.Struct, array_like=True):
    """For the scheduler's side, with a step's result: what a worker has loaded since the last report."""

    host_bytes: int = 0
    host_s: float = 0.0
    file_bytes: int = 0
    file_s: float = 0.0
    num_cleared: int = 0
    """How many times the files were removed."""


class WorkerHello(msgspec.Struct, array_like=True):
    """For the scheduler's side, at the start."""

    block_bytes: int
    num_slots: int
    directory: str | None


orders_encoder = msgspec.msgpack.Encoder()
orders_decoder = msgspec.msgpack.Decoder(Orders)
report_decoder = msgspec.msgpack.Decoder(LoadReport)
hello_decoder = msgspec.msgpack.Decoder(WorkerHello)
