"""A mixture of experts as a checkpoint's config.json describes it, and how ranks divide the experts."""

from __future__ import annotations

__all__ = [
    "MXFP4_NUMBERS",
    "MXFP4_SCALES",
    "ExpertChoice",
    "ExpertNames",
    "ExpertShare",
    "MoeSpec",
    "SharedExperts",
    "check_groups",
    "grouped_sigmoid_router",
    "has_mxfp4_experts",
    "has_stacked_experts",
    "num_chosen",
    "num_experts",
    "sparse_after",
    "sparse_layers",
]

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from raycore.json_fields import JsonFields

MXFP4_NUMBERS, MXFP4_SCALES = "_blocks", "_scales"
"""What the names of tensors of stacked experts end with, if they are in MXFP4."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class ExpertNames(msgspec.Struct, frozen=True):
    """What checkpoints call the parts of a sparse layer."""

    block: str = "mlp"
    """The sparse layer itself, unless experts are stacked: then it is `mlp`."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


class ExpertShare(NamedTuple):
    """What one rank holds of a layer's experts."""

    experts: range
    """The indexes of these experts."""
    rows: range
    """Which intermediate rows of each of these experts the rank holds."""


class ExpertChoice(msgspec.Struct, frozen=True):
    """How a token's experts are chosen and weighted, from its router logits, one for each expert."""

    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    """What logits become: probabilities of all experts (softmax), or numbers from 0 to 1 that don't depend on each
    other (sigmoid). With `softmax_of_chosen`, the logits themselves choose a token's experts, and are then made
    probabilities of these. The experts with the highest scores are chosen, and the scores are their weights."""
    is_normalized: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    has_correction: bool = False
    """Whether there is a number for each expert that is added to its scores for the choice, but not for the weights."""
    num_groups: int = 1
    """Experts are divided into so many groups of the same size."""
    num_chosen_groups: int = 1
    """A token's experts are in these groups: those whose best experts have the highest sum of scores."""
    num_compared: int = 2
    """How many of a group's best experts that sum has: 1 or 2."""
    scaling: float = 1.0
    """Weights are multiplied by it at the end."""
    has_bias: bool = False
    """Whether logits have a bias."""
    in_float32: bool = False
    """Whether logits are computed in float32, whatever the model's dtype is."""
    least_sum: float = 1e-20
    """With `is_normalized`: what is added to the sum of weights from sigmoids, which may all be 0."""

    @property
    def is_plain(self) -> bool:
        """Whether it chooses the largest of all probabilities, and no more."""
        return self.scores == "softmax" and not self.has_correction and self.num_groups == 1 and self.scaling == 1.0


class SharedExperts(msgspec.Struct, frozen=True):
    """A dense network beside the experts of a sparse layer, which gets all tokens."""

    intermediate_size: int
    has_gate: bool = False
    """Whether its result is multiplied by the sigmoid of a linear layer with one output."""
    size_key: str = "shared_expert_intermediate_size"
    """How `intermediate_size` follows from config.json."""

    def rows(self, tp_rank: int, tp_size: int) -> range:
        """Return the intermediate rows of one of `tp_size` tensor-parallel ranks."""
        return _rows_of_rank(self.intermediate_size, tp_rank, tp_size)


class MoeSpec(msgspec.Struct, frozen=True):
    """A decoder's sparse layers, where a router sends each token to a few of many small networks, the experts."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Intermediate size of one expert."""
    sparse_layers: list[bool]
    """For each layer, whether it has experts. Layers without experts are dense."""
    router: ExpertChoice = ExpertChoice()
    shared: SharedExperts | None = None
    """None: there are none."""
    names: ExpertNames = ExpertNames()
    size_key: str = "moe_intermediate_size"
    """The key of `intermediate_size` in config.json."""
    has_bias: bool = False
    """Whether the experts' projections have biases. Those of shared experts have none."""
    is_interleaved: bool = False
    """Whether gate and up alternate in stacked experts, which then have a row for each input. Otherwise, they have a
    row for each output, first those of the gate."""

    def split_experts(self, tp_rank: int, tp_size: int) -> ExpertShare:
        """Return a rank's share with tensor parallelism: the same number of rows of every expert."""
        return ExpertShare(range(self.num_experts), _rows_of_rank(self.intermediate_size, tp_rank, tp_size))

    def whole_experts(self, ep_rank: int, ep_size: int) -> ExpertShare:
        """Return a rank's share with expert parallelism: a range of whole experts.

        The numbers of experts of two ranks differ by at most one.
        """
        first, end = (rank * self.num_experts // ep_size for rank in (ep_rank, ep_rank + 1))
        return ExpertShare(range(first, end), range(self.intermediate_size))


def _rows_of_rank(num_rows: int, tp_rank: int, tp_size: int) -> range:
    num_own = num_rows // tp_size
    return range(tp_rank * num_own, (tp_rank + 1) * num_own)


def has_stacked_experts(moe: MoeSpec, layers: str, has_tensor: Callable[[str], bool]) -> bool:
    """Whether a checkpoint has all experts of a layer in one tensor, or in one of MXFP4's numbers and one of scales.

    `layers`: how the names of layers begin.
    """
    return has_tensor(first_experts(moe, layers)) or has_mxfp4_experts(moe, layers, has_tensor)


def has_mxfp4_experts(moe: MoeSpec, layers: str, has_tensor: Callable[[str], bool]) -> bool:
    """Whether a checkpoint has all experts of a layer in one tensor of MXFP4's numbers and one of scales."""
    return has_tensor(first_experts(moe, layers) + MXFP4_NUMBERS)


def first_experts(moe: MoeSpec, layers: str) -> str:
    """Return the name of the tensor that has gate and up of all experts of the first sparse layer, if there is one."""
    return f"{layers}{moe.sparse_layers.index(True)}.mlp.experts.gate_up_proj"


def num_experts(config: JsonFields) -> int:
    """Return the number of experts, which config.json has under one of several keys."""
    given = [key for key in _NUM_EXPERTS if config.values.get(key) is not None]
    return config.int_(given[0] if given else "num_experts")


def num_chosen(config: JsonFields) -> int:
    """Return the number of a token's experts."""
    chosen, available = config.int_("num_experts_per_tok"), num_experts(config)
    if chosen > available:
        raise config.error("num_experts_per_tok", f"at most the model's {available} experts")
    return chosen


def grouped_sigmoid_router(config: JsonFields) -> ExpertChoice:
    """Return the router that DeepSeek-V3 has introduced, with the numbers of groups in config.json."""
    num_groups, num_chosen_groups = check_groups(config)
    return ExpertChoice(
        "sigmoid",
        is_normalized=config.bool_("norm_topk_prob"),
        has_correction=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        scaling=config.float_("routed_scaling_factor"),
        in_float32=True,
    )


def check_groups(config: JsonFields) -> tuple[int, int]:
    """Return the number of groups of experts, and of how many of them a token's experts are."""
    total, num_groups, num_chosen_groups = num_experts(config), config.int_("n_group"), config.int_("topk_group")
    if total % num_groups:
        raise config.error("n_group", f"a divisor of the model's {total} experts")
    least = -(-num_chosen(config) * num_groups // total)
    if not least <= num_chosen_groups <= num_groups:
        raise config.error("topk_group", f"from {least}, which a token's experts need, to n_group={num_groups}")
    return num_groups, num_chosen_groups


def sparse_layers(config: JsonFields) -> list[bool]:
    """Return for each layer whether it has experts: every `decoder_sparse_step`-th one not in `mlp_only_layers`."""
    every = config.optional_int("decoder_sparse_step") or 1
    dense = config.list_("mlp_only_layers") or []
    return [layer not in dense and (layer + 1) % every == 0 for layer in range(config.int_("num_hidden_layers"))]


def sparse_after(config: JsonFields, key: str) -> list[bool]:
    """Return for each layer whether it has experts: all but the first ones, whose number is at `key`."""
    num_dense = config.int_(key, low=0)
    return [layer >= num_dense for layer in range(config.int_("num_hidden_layers"))]
