"""Which blocks hold which prefixes: a chain of digests over full blocks.

A block is known by the digest of its own tokens and of everything before them, so that equal digests mean equal
prefixes. The digest is cryptographic, because prompts are chosen by strangers: a collision that someone can construct
would serve one caller's keys and values to another. Knows nothing of reference counts or eviction order.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)
"""Stands before the first block of a request without a salt."""


def root_digest(salt: str | None) -> bytes:
    """What stands before the first block: requests share prefixes only with requests of the same salt."""
    if salt is None:
        return ROOT_DIGEST
    # `person` makes it another function than the one for blocks: no salt can stand for somebody else's prefix
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"cache_salt").digest()


def extend_digests(
    digests: list[bytes], tokens: NDArray[np.int32], num_blocks: int, block_size: int, root: bytes = ROOT_DIGEST
) -> None:
    """Append to `digests`, which covers the first blocks of `tokens`, until it covers `num_blocks`.

    Args:
        tokens: int32, at least `num_blocks * block_size` long.
        root: what `root_digest` gives for the request's salt.
    """
    first = len(digests)
    data = tokens[first * block_size : num_blocks * block_size].tobytes()
    parent = digests[-1] if digests else root
    width = block_size * tokens.itemsize
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


class PrefixCache:
    """A two-way map between digests and blocks. One block for each digest: the first that came."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def match(self, digests: list[bytes], max_blocks: int) -> list[int]:
        """Blocks that hold the longest known prefix of the chain, at most `max_blocks` of them."""
        blocks: list[int] = []
        for digest in digests[:max_blocks]:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, digest: bytes, block: int) -> None:
        """Let `block`, which is full, be found by `digest`; nothing happens if another block is already."""
        if self._block_of.setdefault(digest, block) == block:
            self._digest_of[block] = digest

    def remove(self, block: int) -> None:
        """Forget what `block` holds."""
        del self._block_of[self._digest_of.pop(block)]

    def clear(self) -> None:
        """Forget everything."""
        self._block_of.clear()
        self._digest_of.clear()

    def check_integrity(self) -> None:
        """Assert that the two directions agree."""
        assert len(self._block_of) == len(self._digest_of)
        assert all(self._block_of[digest] == block for block, digest in self._digest_of.items())
