"""What the scheduler's side and the workers' sides tell each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from raycore.kvcache.prefix_cache import DIGEST_BYTES


class Fetch(msgspec.Struct, array_like=True):
    """Blocks that each worker reads from its counterpart on another rank."""

    seq_id: int
    workers: list[str]
    """The counterparts' addresses."""
    digests: bytes
    """One after the other."""
    blocks: list[int]
    timeout_s: float
    lease: str = ""


class Lease(msgspec.Struct, array_like=True):
    """Blocks that are kept for another rank."""

    name: str
    seq_id: int
    timeout_s: float


class ToWorkers(msgspec.Struct, array_like=True):
    """The scheduler's side to each worker, with a plan. The order of the fields is that in which it applies."""

    is_cleared: bool = False
    """Whether the prefix cache has lost all blocks."""
    removed: bytes = b""
    """The digests of blocks that steps may overwrite from this one on."""
    stored: bytes = b""
    """The digests of blocks whose content is complete."""
    stored_blocks: list[int] = []
    leases: list[Lease] = []
    abandoned: list[int] = []
    """The seq_ids of fetches that nobody waits for any more."""
    fetches: list[Fetch] = []
    releases: list[Fetch] = []
    """Of no blocks: their leases end, because nobody reads what they keep. They aren't reported."""


class Arrived(msgspec.Struct, array_like=True):
    """What has become of a fetch on one worker."""

    seq_id: int
    num_bytes: int
    took_s: float
    is_local: bool
    num_failed: int
    why_failed: str


class ToScheduler(msgspec.Struct, array_like=True):
    """A worker to the scheduler's side."""

    arrived: list[Arrived] = []


class WorkerInfo(msgspec.Struct, array_like=True):
    """A worker to the scheduler's side, at the start."""

    address: str
    """See `hints.address_text`."""
    block_bytes: int


def joined(digests: Iterable[bytes]) -> bytes:
    """Digests one after the other."""
    return b"".join(digests)


def split(digests: bytes) -> Sequence[bytes]:
    """The inverse of `joined`."""
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]
