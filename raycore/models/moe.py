"""A mixture of experts as a checkpoint's config.json describes it, and how ranks divide the experts."""

from __future__ import annotations

__all__ = ["ExpertNames", "ExpertShare", "MoeSpec", "has_stacked_experts", "num_experts", "sparse_layers"]

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from raycore.checkpoint.json_fields import JsonFields


class ExpertNames(msgspec.Struct, frozen=True):
    """What checkpoints call a sparse layer's block and the projections of an expert, unless experts are stacked."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class ExpertShare(NamedTuple):
    """What one rank holds of a layer's experts."""

    experts: range
    """The indexes of these experts."""
    rows: range
    """Which intermediate rows of each of these experts the rank holds."""


class MoeSpec(msgspec.Struct, frozen=True):
    """A decoder's sparse layers, where a router sends each token to a few of many small networks, the experts."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Intermediate size of one expert."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts are normalized so that their sum is 1."""
    sparse_layers: list[bool]
    """For each layer, whether it has experts. Layers without experts are dense."""
    names: ExpertNames = ExpertNames()
    size_key: str = "moe_intermediate_size"
    """The key of `intermediate_size` in config.json."""

    def split_experts(self, tp_rank: int, tp_size: int) -> ExpertShare:
        """Return a rank's share with tensor parallelism: the same number of rows of every expert."""
        num_rows = self.intermediate_size // tp_size
        return ExpertShare(range(self.num_experts), range(tp_rank * num_rows, (tp_rank + 1) * num_rows))

    def whole_experts(self, ep_rank: int, ep_size: int) -> ExpertShare:
        """Return a rank's share with expert parallelism: a range of whole experts.

        The numbers of experts of two ranks differ by at most one.
        """
        first, end = (rank * self.num_experts // ep_size for rank in (ep_rank, ep_rank + 1))
        return ExpertShare(range(first, end), range(self.intermediate_size))


def has_stacked_experts(moe: MoeSpec, has_tensor: Callable[[str], bool]) -> bool:
    """Whether a checkpoint has all experts of a layer in one tensor."""
    return has_tensor(f"model.layers.{moe.sparse_layers.index(True)}.mlp.experts.gate_up_proj")


def num_experts(config: JsonFields) -> int:
    """Return the number of experts, which config.json has as `num_experts` or `num_local_experts`."""
    given = [key for key in ("num_experts", "num_local_experts") if config.values.get(key) is not None]
    return config.int_(given[0] if given else "num_experts")


def num_chosen(config: JsonFields) -> int:
    """Return the number of a token's experts."""
    chosen, available = config.int_("num_experts_per_tok"), num_experts(config)
    if chosen > available:
        raise config.error("num_experts_per_tok", f"at most the model's {available} experts")
    return chosen


def sparse_layers(config: JsonFields) -> list[bool]:
    """Return for each layer whether it has experts: every `decoder_sparse_step`-th one not in `mlp_only_layers`."""
    every = config.optional_int("decoder_sparse_step") or 1
    dense = config.list_("mlp_only_layers") or []
    return [layer not in dense and (layer + 1) % every == 0 for layer in range(config.int_("num_hidden_layers"))]
