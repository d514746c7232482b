"""How the layers of a model share the blocks of a KV cache.

Layers of one kind keep keys and values for the same tokens. They are divided into *groups* of equally many layers. A
request has a row of blocks for each group, and all groups take their blocks from one pool: a block belongs to one group
at a time, and its memory holds one page for each layer of a group. So a request needs blocks for all its tokens in
groups that keep everything, and only for the last tokens in groups with a sliding window.

Layers may keep different numbers of bytes of a block. The largest layers of all groups share a page, then the next
ones, and so on. Such a page is as large as the largest of them, and its size is a multiple of what each of them keeps,
so that a smaller layer has blocks at regular places, too. Otherwise they have pages of their own.

Everything here is computed from numbers alone, by the engine and by its workers alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

import msgspec

MAX_GROUPS = 8
"""With each group, a request has another row of blocks, which costs the scheduler time."""

CacheKind = Literal["full", "latent", "window", "none"]


class LayerCacheSpec(msgspec.Struct, frozen=True):
    """What one layer keeps of a request's tokens, on one worker."""

    kind: CacheKind
    """full: keys and values of all tokens. latent: compressed ones of all tokens. window: keys and values of the last
    tokens. none: nothing in blocks."""
    block_bytes: int
    """Bytes of one block's tokens in this layer."""
    window: int | None = None
    """Kind `window`: how many tokens a token sees, itself included."""
    beside_bytes: int = 0
    """Bytes of what it keeps of one block's tokens beside these, in a page of its own, such as an indexer's keys."""


class WorkerCacheSpec(msgspec.Struct, frozen=True):
    """What a worker keeps in blocks."""

    layers: tuple[LayerCacheSpec, ...]
    """The layers of the worker's stage."""
    first_layer: int = 0
    """The index in the model of the first one."""
    draft_bytes: int = 0
    """Bytes of a block of what drafts, which has a block for each one of the target's."""
    state_bytes: int = 0
    """Bytes of a sequence's states in all layers that keep states. They are not in blocks."""


class CachePage(NamedTuple):
    """Which page of a block is a layer's."""

    num_bytes: int
    """As many as its layer keeps of a block, or a multiple of that."""
    place: int
    """Among the block's pages of this size."""


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers of one kind that share blocks."""

    kind: CacheKind
    layers: tuple[int, ...]
    """Their indexes in the model."""
    window: int | None = None
    """How many tokens a token sees, itself included. None: all tokens up to its own."""


class CacheLimits(msgspec.Struct, frozen=True):
    """What the division of layers depends on besides the layers."""

    block_size: int
    """Tokens in a block."""
    max_model_len: int
    max_step_tokens: int
    """Maximum number of tokens that a step computes."""
    frees_windows: bool = True
    """Whether blocks that no later token sees are freed. Otherwise a window only masks."""
    first_keeps_all: bool = False
    """Whether group 0 keeps all tokens, because a model that drafts, or a part, has something of its blocks."""


class CacheLayout(msgspec.Struct, frozen=True):
    """The groups of a model's layers. Every worker of an engine has the same."""

    groups: tuple[CacheGroup, ...]
    limits: CacheLimits

    @property
    def num_groups(self) -> int:
        """Number of groups, at least 1."""
        return len(self.groups)

    @property
    def windows(self) -> list[int | None]:
        """By group: its window."""
        return [group.window for group in self.groups]

    @property
    def keeps_all_in_one_group(self) -> bool:
        """Whether there is one group, and it has no window."""
        return self.windows == [None]

    @property
    def layers_per_group(self) -> int:
        """Number of layers of the largest group: so many layers' pages are in a block."""
        return max(len(group.layers) for group in self.groups)

    def blocks_of(self, num_tokens: int, chunk: int | None = None) -> list[int]:
        """Return, by group, how many blocks a request with `num_tokens` computed tokens holds at most at one time.

        `chunk`: maximum number of its tokens in a step. None: those of the largest step.
        """
        limits = self.limits
        chunk = limits.max_step_tokens if chunk is None else chunk
        in_all = -(-num_tokens // limits.block_size)
        return [
            in_all if window is None else min(in_all, max_seen_blocks(window, chunk, limits.block_size))
            for window in self.windows
        ]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks, of all groups, a request with `num_tokens` computed tokens holds at most."""
        return sum(self.blocks_of(num_tokens))

    def num_tokens_in(self, num_blocks: int) -> int:
        """Return how many tokens fit into `num_blocks` blocks, in requests as long as they may become."""
        if self.keeps_all_in_one_group:
            return num_blocks * self.limits.block_size
        longest = self.limits.max_model_len
        return num_blocks * longest // sum(self.blocks_of(longest, chunk=1))

    def stage_layers(self, layers: range) -> list[list[int]]:
        """Return, by group, which of a stage's `layers` it has, as their indexes in the stage."""
        return [[layer - layers.start for layer in group.layers if layer in layers] for group in self.groups]

    def block_bytes(self, worker: WorkerCacheSpec) -> int:
        """Return the bytes of one block on a worker."""
        return worker.draft_bytes + _page_bytes(self.pages(worker), worker.layers)

    def pages(self, worker: WorkerCacheSpec) -> dict[int, CachePage]:
        """Return the pages of a worker's layers that keep something, by their indexes in the stage.

        Layers of different groups may have the same page.
        """
        groups = self.stage_layers(range(worker.first_layer, worker.first_layer + len(worker.layers)))
        return _pages(groups, worker.layers)

    def pages_beside(self, worker: WorkerCacheSpec) -> dict[int, CachePage]:
        """Return the other pages of those layers that keep something beside, by their indexes in the stage.

        No other layer has such a page.
        """
        counts = Counter(page.num_bytes for page in set(self.pages(worker).values()))
        found: dict[int, CachePage] = {}
        for index, layer in enumerate(worker.layers):
            if layer.beside_bytes:
                found[index] = CachePage(layer.beside_bytes, counts[layer.beside_bytes])
                counts[layer.beside_bytes] += 1
        return found


class KVCacheConfig(msgspec.Struct, frozen=True):
    """The KV cache of a rank. All its workers have the same."""

    num_blocks: int
    layout: CacheLayout
    num_state_parts: int = 0
    """In so many parts, each of at most a block's bytes, the state of a prefix moves to other places and back. 0: no
    layer keeps a state."""


def first_seen_block(window: int, num_computed: int, block_size: int) -> int:
    """Return the first block with a token that the token after `num_computed` tokens sees, or a later one."""
    return max(0, num_computed - window + 1) // block_size


def max_seen_blocks(window: int, chunk: int, block_size: int) -> int:
    """Return the maximum number of blocks with tokens that a chunk of so many tokens sees, with its own blocks."""
    return -(-(window + chunk - 2) // block_size) + 1


def model_layers(workers: Sequence[WorkerCacheSpec]) -> list[LayerCacheSpec]:
    """Return the layers of the model of which the workers have stages. Sizes are those of the workers with the most."""
    layers: dict[int, LayerCacheSpec] = {}
    for worker in workers:
        for layer, spec in enumerate(worker.layers, worker.first_layer):
            if layer not in layers or layers[layer].block_bytes < spec.block_bytes:
                layers[layer] = spec
    return [layers[layer] for layer in sorted(layers)]


def divide_layers(layers: Sequence[LayerCacheSpec], limits: CacheLimits) -> CacheLayout:
    """Divide a model's layers into groups.

    Of the divisions with at most `MAX_GROUPS` groups, this is the one in which a request of `max_model_len` tokens
    holds the fewest bytes while it decodes. One of them has no windows, because rounding may cost more than windows
    save.
    """
    kinds = _by_kind(layers, limits)
    candidates = [_divide(kinds, size) for size in range(1, len(layers) + 1)] if len(kinds) > 1 else []
    candidates = [groups for groups in candidates if len(groups) <= MAX_GROUPS]
    candidates.append(_divide(_without_windows(kinds) if len(kinds) > 1 else kinds, len(layers) or 1))
    layouts = [CacheLayout(tuple(groups), limits) for groups in candidates]

    def cost(layout: CacheLayout) -> tuple[int, int]:
        block_bytes = _page_bytes(_pages([group.layers for group in layout.groups], layers), layers)
        return block_bytes * sum(layout.blocks_of(limits.max_model_len, chunk=1)), layout.num_groups

    return min(layouts, key=cost)


_Kinds = Mapping[tuple[CacheKind, int | None], list[int]]
"""The layers of each kind and window. Those that keep all tokens come first."""


def _by_kind(layers: Sequence[LayerCacheSpec], limits: CacheLimits) -> _Kinds:
    kinds: dict[tuple[CacheKind, int | None], list[int]] = {}
    for kind in ("full", "latent", "window"):
        for index, layer in enumerate(layers):
            if layer.kind == kind:
                # a window of a whole request hides nothing
                is_window = limits.frees_windows and (layer.window or limits.max_model_len) < limits.max_model_len
                key = (kind, layer.window) if kind == "window" and is_window else (_kept_kind(kind), None)
                kinds.setdefault(key, []).append(index)
    if limits.first_keeps_all and all(kind == "window" for kind, _ in kinds):
        return _without_windows(kinds)
    ordered = sorted(kinds.items(), key=lambda item: (item[0][0], -(item[0][1] or 0)))
    return {key: sorted(found) for key, found in ordered}


def _kept_kind(kind: CacheKind) -> CacheKind:
    return "full" if kind == "window" else kind


def _without_windows(kinds: _Kinds) -> _Kinds:
    """Return the kinds with all windows as layers that keep all tokens."""
    merged: dict[tuple[CacheKind, int | None], list[int]] = {}
    for (kind, _), layers in kinds.items():
        merged.setdefault((_kept_kind(kind), None), []).extend(layers)
    return {key: sorted(layers) for key, layers in merged.items()}


def _divide(kinds: _Kinds, size: int) -> list[CacheGroup]:
    """Divide each kind's layers into groups of at most `size`. Neighbors are in different groups.

    So each stage of a pipeline has about as many layers of each group of a kind.
    """
    groups: list[CacheGroup] = []
    for (kind, window), layers in kinds.items():
        num_groups = -(-len(layers) // size)
        groups += [CacheGroup(kind, tuple(layers[first::num_groups]), window) for first in range(num_groups)]
    # what counts requests' tokens needs a group, even if no layer keeps any
    return groups or [CacheGroup("full", ())]


def _page_bytes(pages: Mapping[int, CachePage], layers: Sequence[LayerCacheSpec]) -> int:
    """Return the bytes of all pages of a block. `pages`: those of `_pages`."""
    return sum(page.num_bytes for page in set(pages.values())) + sum(layer.beside_bytes for layer in layers)


def _pages(groups: Sequence[Sequence[int]], layers: Sequence[LayerCacheSpec]) -> dict[int, CachePage]:
    """Return the pages of the layers of groups. `groups`: indexes in `layers`."""
    by_size = [sorted(group, key=lambda layer: -layers[layer].block_bytes) for group in groups]
    found: dict[int, CachePage] = {}
    counts = Counter[int]()
    for together in zip_longest(*by_size):
        made: list[CachePage] = []
        for layer in sorted(
            (each for each in together if each is not None), key=lambda each: -layers[each].block_bytes
        ):
            num_bytes = layers[layer].block_bytes
            page = next((each for each in made if each.num_bytes % num_bytes == 0), None)
            if page is None:
                page = CachePage(num_bytes, counts[num_bytes])
                counts[num_bytes] += 1
                made.append(page)
            found[layer] = page
    return found
