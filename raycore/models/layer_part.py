"""A part of a layer that has weights, what mixes tokens or the feed-forward part: what both declare.

Whoever reads, divides, counts or adapts the weights of a layer asks its parts, `ModelSpec.mixers[layer]` and
`ModelSpec.feed_forwards[layer]`, and doesn't know of which kind they are. What computes a part is another class, which
only workers import. Does not import torch.
"""

from __future__ import annotations

__all__ = ["ROWS", "LayerPart", "PartTensor", "Refusable"]

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import msgspec

from raycore.models.linears import FusedLinear
from raycore.models.rows import Rows

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec  # it has layers

Refusable = Literal[
    "kv_transfer",
    "draft_model",
    "graphs",
    "roofline",
    "fp8",
    "int8",
    "context_parallel",
    "stages",
    "prompt_embeds",
    "heads",
]
"""What a part may not work with: connectors, being a draft model's, CUDA graphs, a simulation by its sizes alone,
products in fp8, weights that are rounded to integers while they are read, workers with other tokens of a sequence,
stages of a pipeline, embeddings in place of tokens, or heads that draft with hidden states between layers."""


ROWS = 0
"""Stands for the dimension of a tensor that has its rows."""


class PartTensor(NamedTuple):
    """Another tensor of a rank, such as the weights of a norm: some rows of tensors of the checkpoint."""

    field: str
    """Of the weights' class."""
    parts: tuple[Rows, ...]
    """The rank's rows, in order. Each name is that of the whole tensor."""
    shape: tuple[int, ...] = (ROWS,)
    """Of a tensor in the checkpoint. Dimensions of 1 aren't kept."""
    is_float32: bool = False
    """Whether it is kept in float32, instead of the model's data type."""

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of a row as it is kept."""
        return tuple(size for size in self.shape if size > 1)

    def stored_shape(self, part: Rows) -> tuple[int, ...]:
        """Return the shape of the whole tensor that has a part."""
        return tuple(part.num_stored if size == ROWS else size for size in self.shape)

    def selects(self, part: Rows) -> tuple[int | slice, ...]:
        """Return what selects a part in its tensor."""
        return tuple(part.stored_part if size == ROWS else 0 if size == 1 else slice(None) for size in self.shape)


class LayerPart(msgspec.Struct, frozen=True):
    """A part of a layer.

    Methods get the model that has the layer. Sizes of `self` and of the model are those of the whole model. A rank is
    one of `tp_size`, a number that `ModelSpec.check_tensor_parallel` has accepted.
    """

    computed_by: ClassVar[str]
    """`package.module.Class` of what computes it. It is a path, because only workers import torch."""
    weights_class: ClassVar[str]
    """`package.module.Class` of a `raycore.weights.layer_part_weights.LayerPartWeights`, whose fields `linears` and
    `vectors` name."""
    described: ClassVar[str]
    """What a layer with such a part does or has, in errors: `this layer ...`."""
    is_null: ClassVar[bool] = False
    """Whether it does nothing, and so has no norms around it either."""
    by_torch: ClassVar[str] = ""
    """What of it plain torch computes, because no kernels know it. Empty: nothing."""
    depends_on_threads: ClassVar[bool] = False
    """Whether the bits of its results may depend on the number of threads beside native kernels, too."""
    refused: ClassVar[Mapping[Refusable, str]] = {}
    """What can't be used with a model that has such a layer, and why: `has layers that ...`."""

    def why_not(self, asked: Refusable) -> str | None:
        """Return why a model that has this part can't be used with what is asked. None: it can."""
        return self.refused.get(asked)

    def inner(self, model: ModelSpec) -> Mapping[str, LayerPart]:
        """Return the parts that it consists of, by the fields of its weights' class that have their weights. Empty: it
        is one by itself."""
        return {}

    @abstractmethod
    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        """Return the linear layers of a rank.

        `num_inputs`: of a layer that reads more than hidden states, such as that of an EAGLE-3 head. None: the hidden
        size.
        """

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        """Return the other tensors of a rank."""
        return ()

    def tensors(self, model: ModelSpec, num_inputs: int | None = None) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's tensors in a checkpoint, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for linear in self.linears(model, num_inputs=num_inputs):
            found |= linear.tensors()
        for vector in self.vectors(model):
            found |= {part.name: vector.stored_shape(part) for part in vector.parts}
        return found

    def num_weights(self, model: ModelSpec) -> int:
        """Return the number of multiplications for one token in the linear layers of all ranks."""
        return sum(sum(part.total for part in linear.outputs) * linear.inputs.total for linear in self.linears(model))

    def adapted_linears(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> dict[str, FusedLinear]:
        """Return the linear layers of a rank that adapters may change, by what they are called there."""
        linears = self.linears(model, tp_rank, tp_size)
        return {linear.adapted: linear for linear in linears if linear.adapted}

    def adapted_shapes(self, model: ModelSpec) -> dict[str, tuple[int, int]]:
        """Return the numbers of outputs and inputs of the projections that adapters may change, by name."""
        linears = self.adapted_linears(model).values()
        return {name: shape for linear in linears for name, shape in linear.shapes().items()}

    def sizes(self, model: ModelSpec, tp_size: int) -> dict[str, int]:
        """Return the numbers of outputs and inputs of linear layers on a rank that may be kept in other forms than
        numbers of the model's data type, by what they are."""
        return {}
