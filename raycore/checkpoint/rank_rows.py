"""Which rows of a decoder layer's projections a tensor-parallel rank holds. Does not import torch.

A projection's weight has a row for each output. The output projections `TensorNames.o` and `TensorNames.down` are
divided by columns instead: a rank has the columns for its rows of the projections whose outputs they read.
"""

from __future__ import annotations

__all__ = ["KV_A_PROJ", "Q_A_PROJ", "SINKS", "LatentRows", "RankRows", "Rows", "linear_rows"]

from itertools import accumulate
from typing import NamedTuple

from raycore.models.spec import LinearShape, ModelSpec

SINKS = "self_attn.sinks"
"""A tensor with one number for each query head. A rank has those of its heads."""

Q_A_PROJ = "self_attn.q_a_proj"
KV_A_PROJ = "self_attn.kv_a_proj_with_mqa"
"""The projections of latent attention that may have a bias, besides that of the output."""


class Rows(NamedTuple):
    """The rows of a projection that a rank holds."""

    name: str
    """The projection's name within its layer, such as `self_attn.q_proj`."""
    total: int
    """Number of rows on all ranks together."""
    start: int
    num: int
    stored_first: int = 0
    """The row of its tensor at which the projection begins. Several projections may share a tensor."""
    stored_total: int = 0
    """Number of rows of its tensor. 0: it has the tensor for itself."""

    @property
    def part(self) -> slice:
        """The rank's rows among all of the projection."""
        return slice(self.start, self.start + self.num)

    @property
    def stored_part(self) -> slice:
        """The rank's rows among all of the tensor."""
        return slice(self.stored_first + self.start, self.stored_first + self.start + self.num)

    @property
    def num_stored(self) -> int:
        """Number of rows of the tensor."""
        return self.stored_total or self.total


class RankRows(NamedTuple):
    """A rank's rows of the projections that are divided by rows. They are the same for all layers."""

    q: Rows
    k: Rows
    v: Rows
    gate: Rows
    """Their outputs are the inputs of `TensorNames.down`."""
    up: Rows
    heads: Rows
    """The outputs of attention, of which the query projection may have more: see `Parts.has_attention_gate`."""
    is_gated: bool = True
    """Whether the feed-forward part has a gate. Otherwise `gate` has the rows of `up`, and is no projection."""

    @staticmethod
    def of(spec: ModelSpec, tp_rank: int, tp_size: int) -> RankRows:
        """Return the rows of one of `tp_size` ranks, a number that `spec.check_tensor_parallel` has accepted."""
        num_heads = spec.num_heads // tp_size
        num_q = num_heads * spec.query_rows
        num_kv = spec.kv_heads_per_rank(tp_size) * spec.head_dim
        # With more ranks than key-value heads, neighboring ranks hold the same head.
        kv_start = tp_rank * spec.num_kv_heads // tp_size * spec.head_dim
        num_ff = spec.intermediate_size // tp_size
        q, k, v = _stored_as(
            spec.names.qkv,
            Rows(spec.names.q, spec.num_heads * spec.query_rows, tp_rank * num_q, num_q),
            Rows(spec.names.k, spec.num_kv_heads * spec.head_dim, kv_start, num_kv),
            Rows(spec.names.v, spec.num_kv_heads * spec.head_dim, kv_start, num_kv),
        )
        gate, up = _stored_as(
            spec.names.gate_up,
            Rows(spec.names.gate, spec.intermediate_size, tp_rank * num_ff, num_ff),
            Rows(spec.names.up, spec.intermediate_size, tp_rank * num_ff, num_ff),
        )
        num_out = num_heads * spec.head_dim
        heads = Rows("", spec.num_heads * spec.head_dim, tp_rank * num_out, num_out)
        return RankRows(q, k, v, gate, up, heads, is_gated=spec.is_gated)

    @property
    def qkv(self) -> tuple[Rows, ...]:
        """The projections in the fused layer of attention's inputs, in order."""
        return self.q, self.k, self.v

    @property
    def gate_up(self) -> tuple[Rows, ...]:
        """The projections in the fused layer of a feed-forward layer's inputs, in order."""
        return (self.gate, self.up) if self.is_gated else (self.up,)


def linear_rows(shape: LinearShape, tp_rank: int, tp_size: int) -> tuple[Rows, Rows]:
    """Return a rank's outputs and inputs of a linear layer in a network of transformers."""
    return (
        _divided(shape.num_outputs, tp_rank, tp_size if shape.divided == "outputs" else 1),
        _divided(shape.num_inputs, tp_rank, tp_size if shape.divided == "inputs" else 1),
    )


def _divided(total: int, rank: int, num_ranks: int) -> Rows:
    num = total // num_ranks
    return Rows("", total, rank * num if num_ranks > 1 else 0, num)


class LatentRows(NamedTuple):
    """A rank's rows of the projections of multi-head latent attention. They are the same for all layers."""

    inputs: tuple[Rows, ...]
    """The projections of a layer's input, in the order of the fused layer: of queries, or of what queries are made of,
    and of latents and rotated keys. Of the last two, every rank has all."""
    q_b: Rows | None
    """Makes queries. None: those are among `inputs`."""
    kv_b: Rows
    """Makes keys without their rotated parts, and values, of latents: head by head, the key and then the value."""
    values: Rows
    """The outputs of attention."""

    @staticmethod
    def of(spec: ModelSpec, tp_rank: int, tp_size: int) -> LatentRows:
        """Return the rows of one of `tp_size` ranks, a number that `spec.check_tensor_parallel` has accepted."""
        latent, num_heads = spec.latent, spec.num_heads
        assert latent is not None, "the model has latent attention"

        def of_heads(name: str, head_dim: int) -> Rows:
            num = num_heads // tp_size * head_dim
            return Rows(name, num_heads * head_dim, tp_rank * num, num)

        def whole(name: str, num: int) -> Rows:
            return Rows(name, num, 0, num)

        kv_a = whole(KV_A_PROJ, latent.width)
        kv_b = of_heads("self_attn.kv_b_proj", latent.plain_dim + latent.value_dim)
        values = of_heads("", latent.value_dim)
        if latent.query_rank is None:
            return LatentRows((of_heads(spec.names.q, latent.query_dim), kv_a), None, kv_b, values)
        q_b = of_heads("self_attn.q_b_proj", latent.query_dim)
        return LatentRows((whole(Q_A_PROJ, latent.query_rank), kv_a), q_b, kv_b, values)


def _stored_as(name: str | None, *parts: Rows) -> list[Rows]:
    """Return the projections as parts of one tensor. None: each has a tensor of its own."""
    if name is None:
        return list(parts)
    total = sum(part.total for part in parts)
    firsts = accumulate((part.total for part in parts[:-1]), initial=0)
    return [
        part._replace(name=name, stored_first=first, stored_total=total)
        for part, first in zip(parts, firsts, strict=True)
    ]
