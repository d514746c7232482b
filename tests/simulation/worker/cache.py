"""The KV cache of a worker: two numbers for each token that a block holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raycore.cache_layout import CacheLayout, KVCacheConfig, LayerCacheSpec, divide_layers
from raycore.config import EngineConfig
from raycore.step.batch import StepInputs
from simulation.worker import model
from simulation.worker.chance import Chance
from simulation.worker.numbers64 import Words

LAYER_BYTES = 1024
"""Of a block. The simulated device's memory is counted in such, whatever arrays take."""


def layers_of(config: EngineConfig) -> tuple[LayerCacheSpec, ...]:
    """What each layer of a model keeps. Layers that keep states keep all tokens, too."""
    windows = config.model.spec.layer_windows
    return tuple(LayerCacheSpec("full" if window is None else "window", LAYER_BYTES, window) for window in windows)


def layout_of(config: EngineConfig) -> CacheLayout:
    """How the layers share blocks."""
    return divide_layers(layers_of(config), config.cache_limits)


class _Places(NamedTuple):
    """Where a step's tokens are."""

    own: list[NDArray[np.int32]]
    """[T], by group: the token's block."""
    seen: list[NDArray[np.int32]]
    """[n, columns], by group: the blocks of the token's sequence."""
    places_T: NDArray[np.int64]
    """The token's place in its block."""
    rows_T: NDArray[np.int64]
    """The token's sequence."""


class Cache:
    """The blocks. Those of all groups are in one array, as all groups take them from one pool."""

    def __init__(self, cache: KVCacheConfig, chance: Chance) -> None:
        self.windows = tuple(cache.layout.windows)
        self.num_blocks = cache.num_blocks
        self._block_size = cache.layout.limits.block_size
        # by layer, block and place
        self._kept = chance.garbage(2, cache.num_blocks, self._block_size)

    def places_of(self, step: StepInputs) -> _Places:
        """Where the tokens of a step are, and those that they see. The same in both layers."""
        tables = step.group_tables
        assert tables is not None, "a batch has a table for each group"
        blocks, places_T = np.divmod(step.positions, self._block_size)
        rows_T = np.arange(len(step.slots)) if step.is_decoding else np.repeat(np.arange(len(step.slots)), step.counts)
        num_columns = -(-int((step.starts + step.counts).max()) // self._block_size)
        own = [table[step.token_slots, blocks] for table in tables]
        return _Places(own, [table[step.slots, :num_columns] for table in tables], places_T, rows_T)

    def exchange(self, step: StepInputs, places: _Places, layer: int, layer_T: Words) -> Words:
        """Write a layer of a step's tokens. Returns what they see of it, summed over all groups.

        `layer`: 0 or 1.
        """
        seen_T = np.zeros(len(layer_T), np.uint64)
        kept = self._kept[layer]
        for group, window in enumerate(self.windows):
            kept[places.own[group], places.places_T] = model.of_group(layer_T, group)
            blocks_nL = kept[places.seen[group]].reshape(len(step.slots), -1)
            seen_T += model.attend(blocks_nL, places.rows_T, step.positions, window)
        return seen_T

    def layer(self, layer: int) -> Words:
        """[blocks, places]: what all blocks hold of a layer, as a view."""
        return self._kept[layer]

    def block(self, block: int) -> Words:
        """[2, places]: what a block holds, as a view."""
        return self._kept[:, block]
