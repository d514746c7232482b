"""How many states a rank keeps for models whose layers keep states, and for what. Does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from raycore.config.cache import CacheConfig

_DEFAULT_INTERVAL = 256


class StateRows(NamedTuple):
    """The rows of states on each worker. A row has a state of each of the worker's layers that keep one."""

    num_slots: int
    """Each slot has rows of its own: slot s those from `s · rows_per_slot` on."""
    rows_per_slot: int
    """One more than a step has drafts for a request, because any number of them may turn out to be right."""
    num_prefixes: int
    """Number of rows after those of the slots. They have the states of prefixes."""
    interval: int
    """Every so many tokens of a sequence, the state is kept for other requests with the same prefix."""

    @property
    def first_prefix(self) -> int:
        """The first row for a prefix."""
        return self.num_slots * self.rows_per_slot

    @property
    def total(self) -> int:
        """Number of rows."""
        return self.first_prefix + self.num_prefixes

    @classmethod
    def of(cls, cache: CacheConfig, max_num_seqs: int, max_drafts: int, tokens_per_block: int) -> StateRows:
        """Return the rows that options ask for. States of prefixes are those after whole blocks."""
        num_prefixes = max_num_seqs if cache.num_prefix_states is None else cache.num_prefix_states
        return cls(
            max_num_seqs,
            1 + max_drafts,
            num_prefixes if cache.enable_prefix_caching else 0,
            cache.mamba_block_size or -(-_DEFAULT_INTERVAL // tokens_per_block) * tokens_per_block,
        )
