"""Which ranks hold which prefixes, as the ranks themselves say. Takes the place of guesses, if ranks say so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from raycore.client.matched_ranks import Matched, matched, matched_with_states
from raycore.kvcache.prefix_cache import DIGEST_BYTES, extend_digests, identity_digest, root_digest, state_name
from raycore.messages import CacheChanges

_MAX_BLOCKS = 1 << 13
"""Longer prompts are known by so many of their first blocks."""
_MAX_EXPECTED = 1 << 15


class HeldPrefixes:
    """The digests of the blocks that ranks hold, and of those that they are about to compute. Not thread-safe."""

    def __init__(self, block_size: int, *, has_states: bool = False) -> None:
        """
        Args:
            block_size: tokens in a block of all ranks.
            has_states: whether layers keep states. Blocks are then of use up to one after which the rank has a state.
        """
        self._block_size = block_size
        self._has_states = has_states
        self._identity = b""
        """What digests begin with, as a rank has said last. What others hold whose weights differ isn't found."""
        self._stored: dict[bytes, int] = {}
        """By digest, or by the name of a state: a bit mask of the ranks that have said that they hold it."""
        self._expected: OrderedDict[bytes, int] = OrderedDict()
        """The same of ranks that were sent a prompt with the block. The last one that was sent comes last."""

    def keys(self, token_ids: Sequence[int], cache_salt: str | None = None) -> list[bytes]:
        """The digests of a prompt's full blocks, without the last token, which is always computed."""
        count = min((len(token_ids) - 1) // self._block_size, _MAX_BLOCKS)
        digests: list[bytes] = []
        tokens = np.array(token_ids[: count * self._block_size], np.int32)
        root = identity_digest(root_digest(cache_salt), self._identity)
        extend_digests(digests, tokens, count, self._block_size, root)
        return digests

    def match(self, keys: Sequence[bytes]) -> Matched:
        """Which ranks hold how many leading tokens of a prompt, or will soon.

        `keys`: the prompt's `keys()`.
        """
        return self._match(keys, lambda name: self._stored.get(name, 0) | self._expected.get(name, 0))

    def match_stored(self, keys: Sequence[bytes]) -> Matched:
        """Which ranks hold how many leading tokens of a prompt, as they have said."""
        return self._match(keys, lambda name: self._stored.get(name, 0))

    def _match(self, keys: Sequence[bytes], ranks_of: Callable[[bytes], int]) -> Matched:
        if self._has_states:
            return matched_with_states(((ranks_of(key), ranks_of(state_name(key))) for key in keys), self._block_size)
        return matched(map(ranks_of, keys), self._block_size)

    def add(self, keys: Sequence[bytes], rank: int) -> None:
        """Note that a prompt was sent to `rank`. It will have a state after the last of these blocks."""
        for key in [*keys, *map(state_name, keys[-1:])] if self._has_states else keys:
            self._expected[key] = self._expected.get(key, 0) | 1 << rank
            self._expected.move_to_end(key)
        while len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)

    def take(self, rank: int, changes: CacheChanges) -> None:
        """Note what a rank has said."""
        bit = 1 << rank
        if changes.is_whole:
            self._forget(self._stored, rank)
            self._identity = changes.identity
        for digest in _digests(changes.removed):
            self._clear(self._stored, digest, bit)
            self._clear(self._expected, digest, bit)
        for digest in _digests(changes.stored):
            self._stored[digest] = self._stored.get(digest, 0) | bit
            self._clear(self._expected, digest, bit)

    def forget(self, rank: int) -> None:
        """Forget what `rank` held, because its prefix cache is gone."""
        self._forget(self._stored, rank)
        self._forget(self._expected, rank)

    def _forget(self, masks: dict[bytes, int], rank: int) -> None:
        bit = 1 << rank
        for digest in [digest for digest, mask in masks.items() if mask & bit]:
            self._clear(masks, digest, bit)

    def _clear(self, masks: dict[bytes, int], digest: bytes, bit: int) -> None:
        mask = masks.get(digest)
        if mask is None:
            return
        if mask & ~bit:
            masks[digest] = mask & ~bit
        else:
            del masks[digest]


def _digests(joined: bytes) -> list[bytes]:
    return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]
