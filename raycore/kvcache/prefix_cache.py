"""Index of cached prefixes: a chain of digests over full blocks.

A block's digest covers the block's tokens and all tokens before them, so equal digests mean equal prefixes. The digest
is cryptographic because prompts are untrusted: by a constructed collision, one caller would get keys and values of
another caller's prompt. This module knows nothing of reference counts or the order of eviction.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)
"""Parent digest of the first block, for requests without a salt."""


def root_digest(salt: str | None) -> bytes:
    """Parent digest of the first block of a request. It differs by salt, so that requests with different salts share no
    prefixes."""
    if salt is None:
        return ROOT_DIGEST
    # `person` makes this another hash function than that of blocks, so that no salt can yield the digest of a prefix
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"cache_salt").digest()


def adapter_digest(root: bytes, load_id: int) -> bytes:
    """Parent digest of the first block of a request that uses a LoRA adapter.

    Args:
        root: the `root_digest` of the request's salt.
        load_id: another number for each adapter, and for each time that it was read.
    """
    return blake2b(root + load_id.to_bytes(8, "little"), digest_size=DIGEST_BYTES, person=b"adapter").digest()


def extend_digests(
    digests: list[bytes], tokens: NDArray[np.int32], num_blocks: int, block_size: int, root: bytes = ROOT_DIGEST
) -> None:
    """Extend `digests`, which has the digests of the first blocks of `tokens`, to the first `num_blocks` blocks.

    Args:
        tokens: int32, at least `num_blocks * block_size` long.
        root: the `root_digest` of the request's salt.
    """
    first = len(digests)
    data = tokens[first * block_size : num_blocks * block_size].tobytes()
    parent = digests[-1] if digests else root
    width = block_size * tokens.itemsize
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


class PrefixCache:
    """A two-way map between digests and blocks. If several blocks have one digest, only the first is registered."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def match(self, digests: list[bytes], max_blocks: int) -> list[int]:
        """The blocks of the longest cached prefix: those of the first `digests`, up to one that isn't registered.

        Returns at most `max_blocks` blocks.
        """
        blocks: list[int] = []
        for digest in digests[:max_blocks]:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, digest: bytes, block: int) -> None:
        """Register a full block under its digest, unless another block is already registered under the same digest."""
        if self._block_of.setdefault(digest, block) == block:
            self._digest_of[block] = digest

    def remove(self, block: int) -> None:
        """Remove a registered block."""
        del self._block_of[self._digest_of.pop(block)]

    def clear(self) -> None:
        """Remove all blocks."""
        self._block_of.clear()
        self._digest_of.clear()

    def check_integrity(self) -> None:
        """Assert that the two directions agree."""
        assert len(self._block_of) == len(self._digest_of)
        assert all(self._block_of[digest] == block for block, digest in self._digest_of.items())
