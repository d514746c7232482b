"""The feed-forward part of a layer: the contract that each kind of it declares, and the dense one.

Those with experts are in `raycore.parts.experts.models`. Does not import torch.
"""

from __future__ import annotations

__all__ = [
    "DENSE",
    "DenseSpec",
    "FeedForwardSpec",
    "HasTensor",
    "NoFeedForward",
    "ScaledDenseSpec",
    "XieluSpec",
    "feed_forwards_of",
]

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import msgspec

from raycore.models.layer_part import LayerPart, PartTensor
from raycore.models.linears import FusedLinear
from raycore.models.rows import divided, stored_together, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec  # it has feed-forward parts

_FLOAT32_BYTES = 4
HasTensor = Callable[[str], bool]
"""Whether a checkpoint has a tensor of this name."""


class FeedForwardSpec(LayerPart, frozen=True):
    """The feed-forward part of a layer. A `raycore.layers.feed_forward.FeedForward` computes it."""

    has_experts: ClassVar[bool] = False
    """Whether there are experts, which ranks may share. Which of them a step reads depends on its tokens."""

    def stored(self, model: ModelSpec, has_tensor: HasTensor) -> FeedForwardSpec:
        """Return the part as a checkpoint has it, whose tensors `linears`, `vectors` and `tensors` tell then."""
        return self

    def other_forms(self, model: ModelSpec, has_tensor: HasTensor) -> list[HasTensor]:
        """Return what tells the tensors of a model whose part comes in other forms than in the checkpoint."""
        return []

    def split_sizes(self, model: ModelSpec, *, expert_parallel: bool) -> dict[str, int]:
        """Return the sizes that tensor-parallel ranks split, by their names in config.json.

        `expert_parallel`: whether ranks have whole experts.
        """
        return {}

    def expert_weights(self, model: ModelSpec) -> tuple[int, int]:
        """Return the number of weights of all experts, and of how many of them a token uses."""
        return 0, 0

    def num_weights(self, model: ModelSpec) -> int:
        return super().num_weights(model) + self.expert_weights(model)[1]

    @abstractmethod
    def token_bytes(
        self, model: ModelSpec, mixed: int, tp_size: int, item_size: int, num_engines: int, *, is_native: bool
    ) -> int:
        """Return an upper bound on the bytes that one token needs within such a layer, without hidden states.

        Args:
            mixed: what it needs in the mixer.
            item_size: bytes of a number of the model's data type.
            num_engines: number of engines that share experts. Each of them processes the tokens of all these engines.
            is_native: whether native kernels compute the layer.
        """


class DenseSpec(FeedForwardSpec, frozen=True):
    """One network for all tokens, with a gate or without. `ModelSpec` has its sizes."""

    computed_by: ClassVar[str] = "raycore.layers.feed_forward.DenseFeedForward"
    weights_class: ClassVar[str] = "raycore.weights.layer_part_weights.MlpWeights"
    described: ClassVar[str] = "has a dense feed-forward part"

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        names, size, hidden = model.names, self.width(model), whole("", num_inputs or model.hidden_size)
        own = (divided(name, size, tp_rank, tp_size) for name in (names.gate, names.up))
        gate, up = stored_together(names.gate_up, *own)
        gate_up, down = (gate, up) if model.is_gated else (up,), whole(names.down, model.hidden_size)
        biased = frozenset(part.name for part in (*gate_up, down) if model.mlp_bias)
        return (
            FusedLinear("gate_up_FD", gate_up, hidden, "gate_up_bias", biased, adapted="gate_up"),
            FusedLinear("down_DF", (down,), gate, "down_bias", biased, reads_divided=True, adapted="down"),
        )

    def width(self, model: ModelSpec) -> int:
        """Return the intermediate size."""
        return model.intermediate_size

    def split_sizes(self, model: ModelSpec, *, expert_parallel: bool) -> dict[str, int]:
        return {"intermediate_size": model.intermediate_size}

    def sizes(self, model: ModelSpec, tp_size: int) -> dict[str, int]:
        return {"feed-forward dimensions": self.width(model) // tp_size}

    def token_bytes(
        self, model: ModelSpec, mixed: int, tp_size: int, item_size: int, num_engines: int, *, is_native: bool
    ) -> int:
        own = (3 if is_native else 4) * self.width(model) // tp_size * item_size
        return max(mixed, own) if is_native else mixed + own


class XieluSpec(DenseSpec, frozen=True):
    """The dense network without a gate, with the activation xIELU, which has weights in each layer."""

    has_constants: bool = False
    """Whether the checkpoint has the two constants of the activation, which have the same values in all models."""

    computed_by: ClassVar[str] = "raycore.layers.xielu.XieluFeedForward"
    weights_class: ClassVar[str] = "raycore.weights.layer_part_weights.XieluWeights"
    described: ClassVar[str] = "has a feed-forward part with xIELU"
    by_torch: ClassVar[str] = "activations (xIELU)"

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        alphas, constants = (
            tuple(whole(f"mlp.act_fn.{name}", 1) for name in names)
            for names in (("alpha_p", "alpha_n"), ("beta", "eps"))
        )
        numbers = PartTensor("alphas_2", alphas), PartTensor("constants_2", constants, shape=())
        return numbers if self.has_constants else numbers[:1]

    def token_bytes(
        self, model: ModelSpec, mixed: int, tp_size: int, item_size: int, num_engines: int, *, is_native: bool
    ) -> int:
        # plain torch has a mask, and up to four copies in float32
        own = (2 * item_size + 4 * _FLOAT32_BYTES + 1) * model.intermediate_size // tp_size
        return max(mixed, own) if is_native else mixed + own

    def stored(self, model: ModelSpec, has_tensor: HasTensor) -> XieluSpec:
        return msgspec.structs.replace(self, has_constants=has_tensor(f"{model.names.layer(0)}mlp.act_fn.beta"))


class ScaledDenseSpec(DenseSpec, frozen=True):
    """Such a network whose gate is multiplied before its activation, and whose result is multiplied, too."""

    computed_by: ClassVar[str] = "raycore.layers.feed_forward.ScaledFeedForward"


class NoFeedForward(FeedForwardSpec, frozen=True):
    """What stands in place of a feed-forward part in a layer that has a mixer alone."""

    computed_by: ClassVar[str] = "raycore.decoder.no_parts.NullFeedForward"
    weights_class: ClassVar[str] = "raycore.decoder.no_parts.NoWeights"
    described: ClassVar[str] = "has no feed-forward part"
    is_null: ClassVar[bool] = True

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        return ()

    def token_bytes(
        self, model: ModelSpec, mixed: int, tp_size: int, item_size: int, num_engines: int, *, is_native: bool
    ) -> int:
        return mixed


DENSE = DenseSpec()
"""The dense feed-forward part of any model."""
XIELU = XieluSpec()
"""That of models with xIELU."""
SCALED_DENSE = ScaledDenseSpec()
"""That of models with multipliers."""
_DENSE_PARTS = {"plain": DENSE, "scaled": SCALED_DENSE, "xielu": XIELU}
"""By `Parts.dense`."""
NO_FEED_FORWARD = NoFeedForward()
"""That of layers of any model that have none."""


def feed_forwards_of(model: ModelSpec) -> list[FeedForwardSpec]:
    """Return the feed-forward parts, by layer of the model."""
    if model.closings:
        return [*model.closings]
    moe, dense = model.moe, _DENSE_PARTS[model.dense]
    parts = [dense] * model.num_layers if moe is None else [moe if each else dense for each in moe.sparse_layers]
    alone = model.parts_alone or [None] * len(parts)
    return [NO_FEED_FORWARD if only == "mixer" else part for only, part in zip(alone, parts, strict=True)]
