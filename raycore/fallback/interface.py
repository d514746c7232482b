"""Attention of transformers' modules goes to raycore: what a module calls, and how the call finds what answers it.

transformers' modules look up a function by the name in `config._attn_implementation`, and call it with queries, keys
and values that are projected, normalized and rotated. raycore registers a function that hands the call to the `Calls`
that the module has. Letters of shapes: T tokens, N query heads, K key-value heads, H elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from raycore.attention.spec import Attention
from raycore.fallback.library import library
from raycore.models.mixers.spec import HeadShape
from raycore.parallel.tensor_parallel import TensorParallel

PAGED = "raycore"
"""The implementation that answers calls. Models make no masks for it."""
TRACED = "raycore_traced"
"""The same, for which models make the masks that they would make for transformers' own."""
_CALLS = "raycore_calls"


class Calls(Protocol):
    """Answers the calls of attention modules, in the order in which a forward pass makes them."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        """Return [1, T, N, H] for queries [1, N, T, H], keys and values [1, K, T, H]."""
        ...


MaskFunction = Callable[..., Tensor]
"""Gets indexes of a sequence, a head, a query and a key, and returns whether the query sees the key."""


def answer_with(network: nn.Module, calls: Calls) -> None:
    """Have `calls` answer the attention modules of a network from now on."""
    for module in network.modules():
        module.__dict__[_CALLS] = calls


@cache
def register(make_mask: Callable[[MaskFunction, int, int], Tensor]) -> None:
    """Tell transformers of both implementations.

    `make_mask`: gets the function that says which keys a query of the model sees, and the numbers of queries and keys.
    It returns the mask that the model gets.
    """
    library().AttentionInterface.register(PAGED, _attend)
    library().AttentionInterface.register(TRACED, _attend)

    def mask(
        *,
        kv_length: int,
        mask_function: MaskFunction,
        q_length: int | None = None,
        cache_position: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if q_length is None:  # versions before 5.4 give the queries' positions instead
            assert cache_position is not None
            q_length = len(cache_position)
        return make_mask(mask_function, q_length, kv_length)

    library("masking_utils").AttentionMaskInterface.register(TRACED, mask)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **arguments: Any
) -> tuple[Tensor, None]:
    calls: Calls = module.__dict__[_CALLS]
    return calls(module, query, key, value, attention_mask, arguments), None


class PagedCalls:
    """Answers with raycore's attention to the cache. A forward pass's n-th call is to the cache's n-th layer."""

    def __init__(self, heads: HeadShape, dtype: torch.dtype, query_factors: list[float], ranks: TensorParallel) -> None:
        """
        Args:
            heads: those of the cache. Smaller heads are padded with zeros.
            dtype: that of the cache's keys and values before they are stored. Some models compute rotations in another.
            query_factors: by call, what queries are multiplied by, because the cache's attention has one scale.
            ranks: those that share the heads.
        """
        self._heads = heads
        self._dtype = dtype
        self._factors = query_factors
        self._ranks = ranks
        self._next = 0
        self._attention: Attention | None = None
        self._after_layer: Callable[[], None] = lambda: None

    def begin(self, attention: Attention, after_layer: Callable[[], None]) -> None:
        """Prepare for a forward pass. `after_layer` is called before each layer but the first one attends."""
        self._next, self._attention, self._after_layer = 0, attention, after_layer

    def end(self) -> None:
        """Check that the forward pass made as many calls as the cache has layers."""
        assert self._next == len(self._factors), f"{self._next} calls of attention, expected {len(self._factors)}"
        self._attention = None

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        layer = self._next
        self._next = layer + 1
        if layer:
            self._after_layer()
        assert self._attention is not None, "begin() comes first"
        heads, num_values = self._heads, value.shape[3]
        is_whole = query.shape[1] != heads.num_heads
        if is_whole:
            query = _own_heads(query, heads.num_heads, self._ranks)
            key, value = (_own_heads(each, heads.num_kv_heads, self._ranks) for each in (key, value))
        if self._factors[layer] != 1.0:
            query = query * self._factors[layer]
        parts = [padded(x[0].transpose(0, 1).to(self._dtype), heads.head_dim) for x in (query, key, value)]
        out_TO = self._attention(layer, torch.cat(parts, dim=1).flatten(1))
        if is_whole:
            out_TO = self._ranks.all_gather_columns(out_TO)
        out_1TNH = out_TO.view(1, len(out_TO), -1, heads.head_dim)
        return out_1TNH if num_values == heads.head_dim else out_1TNH[..., :num_values].contiguous()


def padded(heads_TNH: Tensor, head_dim: int) -> Tensor:
    """Return heads with zeros behind them, up to `head_dim` elements."""
    missing = head_dim - heads_TNH.shape[2]
    return functional.pad(heads_TNH, (0, missing)) if missing else heads_TNH


def _own_heads(heads_1NTH: Tensor, num_heads: int, ranks: TensorParallel) -> Tensor:
    """Return this rank's part of all heads, where the model's plan gives each rank all of them."""
    return heads_1NTH[:, ranks.rank * num_heads : (ranks.rank + 1) * num_heads]
