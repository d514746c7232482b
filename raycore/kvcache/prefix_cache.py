"""Index of cached prefixes: a chain of digests over full blocks.

A block's digest covers the block's tokens and all tokens before them, so equal digests mean equal prefixes. The digest
is cryptographic because prompts are untrusted: by a constructed collision, one caller would get keys and values of
another caller's prompt. This module knows nothing of reference counts or the order of eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raycore.cache_layout import first_seen_block
from raycore.messages import Feature

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


def identity_digest(root: bytes, identity: bytes) -> bytes:
    """Parent digest of the first block of a request that a rank computes with certain weights.

    Args:
        root: the `root_digest` of the request's salt, or the `adapter_digest` of it.
        identity: `raycore.parts.transfers.connectors.identity.Identity.digest`. Empty: nothing outlives the weights.
    """
    if not identity:
        return root
    return blake2b(root + identity, digest_size=DIGEST_BYTES, person=b"identity").digest()


def adapter_digest(root: bytes, load_id: int) -> bytes:
    """Parent digest of the first block of a request that uses a LoRA adapter.

    Args:
        root: the `root_digest` of the request's salt.
        load_id: another number for each adapter, and for each time that it was read.
    """
    return blake2b(root + load_id.to_bytes(8, "little"), digest_size=DIGEST_BYTES, person=b"adapter").digest()


def state_name(digest: bytes) -> bytes:
    """What the state after a prefix is known by where digests of blocks are, too. `digest`: that of its last block."""
    return blake2b(digest, digest_size=DIGEST_BYTES, person=b"state").digest()


def extend_digests(
    digests: list[bytes],
    tokens: NDArray[np.int32],
    num_blocks: int,
    block_size: int,
    root: bytes = ROOT_DIGEST,
    features: Sequence[Feature] = (),
) -> None:
    """Extend `digests`, which has the digests of the first blocks of `tokens`, to the first `num_blocks` blocks.

    Args:
        tokens: int32, at least `num_blocks * block_size` long.
        root: the `root_digest` of the request's salt.
        features: the parts of the prompt that aren't text, in order. A block's digest covers which ones it has tokens
            of, and which of their tokens.
    """
    first = len(digests)
    data = tokens[first * block_size : num_blocks * block_size].tobytes()
    parent = digests[-1] if digests else root
    width = block_size * tokens.itemsize
    for start in range(0, len(data), width):
        block = data[start : start + width]
        if features:
            block += _features_of_block(features, len(digests) * block_size, block_size)
        parent = blake2b(parent + block, digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


def _features_of_block(features: Sequence[Feature], start: int, size: int) -> bytes:
    """Return what tells a block, which begins with token `start`, from others of the same tokens: the features that it
    has tokens of, and where in the block they begin."""
    found = b""
    for feature in features:
        if feature.position < start + size and feature.position + feature.num_tokens > start:
            identifier = feature.identifier.encode()
            offset = feature.position - start
            found += len(identifier).to_bytes(4, "little") + identifier + offset.to_bytes(8, "little", signed=True)
    return found


class CachedPrefix(NamedTuple):
    """The cached blocks that a request can reuse."""

    num_blocks: int
    """How many blocks of tokens they stand for."""
    blocks: list[list[int]]
    """By group of layers: the last of these blocks. In a group without a window, all."""


NOTHING_CACHED = CachedPrefix(0, [])


class PrefixCache:
    """A two-way map between digests and blocks, for each group of layers.

    If several blocks of a group have one digest, only the first is registered.
    """

    def __init__(self, block_size: int = 1, windows: Sequence[int | None] = (None,)) -> None:
        """
        Args:
            block_size: tokens in a block.
            windows: by group, how many tokens a token sees, itself included. None: all tokens up to its own.
        """
        self._block_size = block_size
        self._windows = list(windows)
        self._block_of: list[dict[bytes, int]] = [{} for _ in windows]
        self._digest_of: dict[int, bytes] = {}
        self._group_of: dict[int, int] = {}
        """By block: its group, if that isn't the first one. A dict of pairs instead would keep the garbage collector
        busy."""
        self._removed: Sequence[Callable[[bytes, int], None]] = ()
        self._cleared: Sequence[Callable[[], None]] = ()

    def __len__(self) -> int:
        return len(self._digest_of)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def watch(self, removed: Sequence[Callable[[bytes, int], None]], cleared: Sequence[Callable[[], None]]) -> None:
        """Call `removed` with the digest and the group of each block that is removed, and `cleared` when all are."""
        self._removed, self._cleared = removed, cleared

    def match(self, digests: list[bytes], max_blocks: int) -> CachedPrefix:
        """Return the blocks of the longest cached prefix of `digests`, of at most `max_blocks` blocks.

        A prefix is cached if each group has all of its blocks that tokens after the prefix see.
        """
        num_blocks, found = min(max_blocks, len(digests)), dict[int, list[int]]()
        for group, window in enumerate(self._windows):
            if window is None:
                found[group] = self._first_blocks(group, digests[:num_blocks])
                num_blocks = len(found[group])
        before = -1
        while before != num_blocks:
            before = num_blocks
            for group, window in enumerate(self._windows):
                if window is not None:
                    num_blocks = self._seen_boundary(group, window, digests, num_blocks)
        if not num_blocks:
            return NOTHING_CACHED
        for group, window in enumerate(self._windows):
            if window is None:
                del found[group][num_blocks:]
            else:
                seen = digests[self._first_seen(window, num_blocks) : num_blocks]
                found[group] = [self._block_of[group][digest] for digest in seen]
        return CachedPrefix(num_blocks, [found[group] for group in range(len(self._windows))])

    def insert(self, digest: bytes, block: int, group: int = 0) -> bool:
        """Register a full block under its digest, unless another block is already registered under the same digest.

        Returns: whether this block is registered.
        """
        if self._block_of[group].setdefault(digest, block) != block:
            return False
        self._digest_of[block] = digest
        if group:
            self._group_of[block] = group
        return True

    def remove(self, block: int) -> None:
        """Remove a registered block."""
        group, digest = self._group_of.pop(block, 0), self._digest_of.pop(block)
        del self._block_of[group][digest]
        for removed in self._removed:
            removed(digest, group)

    def clear(self) -> None:
        """Remove all blocks."""
        for block_of in self._block_of:
            block_of.clear()
        self._digest_of.clear()
        self._group_of.clear()
        for cleared in self._cleared:
            cleared()

    def check_integrity(self) -> None:
        """Assert that the two directions agree."""
        pairs = {
            block: (group, digest)
            for group, block_of in enumerate(self._block_of)
            for digest, block in block_of.items()
        }
        assert pairs == {block: (self._group_of.get(block, 0), digest) for block, digest in self._digest_of.items()}
        assert sum(len(block_of) for block_of in self._block_of) == len(pairs)

    def _first_blocks(self, group: int, digests: list[bytes]) -> list[int]:
        """Return a group's blocks of the first digests, up to one that isn't registered."""
        block_of, blocks = self._block_of[group], list[int]()
        for digest in digests:
            block = block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _seen_boundary(self, group: int, window: int, digests: list[bytes], num_blocks: int) -> int:
        """Return the longest prefix, of at most `num_blocks` blocks, whose last blocks a group with a window has."""
        block_of, end, index = self._block_of[group], num_blocks, num_blocks
        while index > self._first_seen(window, end):
            index -= 1
            if digests[index] not in block_of:
                # each longer prefix needs this block, too
                end = index
        return end

    def _first_seen(self, window: int, num_blocks: int) -> int:
        """Return the first block that the token after `num_blocks` full blocks sees."""
        return first_seen_block(window, num_blocks * self._block_size, self._block_size)
