"""What mixes the tokens of a sequence in a layer, such as attention: the contract that each kind of it declares.

Whoever reads, divides, counts or adapts the weights of a layer, or keeps something of its tokens, asks the `MixerSpec`
of the layer, `ModelSpec.mixers[layer]`, and doesn't know of which kind it is. What computes it is another class, which
only workers import. Does not import torch.
"""

from __future__ import annotations

__all__ = [
    "NOTHING_CACHED",
    "ROWS",
    "Cached",
    "Copies",
    "HeadShape",
    "MixerSpec",
    "MixerTensor",
    "Refusable",
    "StateTensor",
]

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import msgspec

from raycore.cache_layout import CacheKind
from raycore.models.linears import FusedLinear
from raycore.models.rows import Rows

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec  # it has mixers

Refusable = Literal["context_parallelism", "kv_transfer", "draft_model", "graphs", "roofline"]
"""What a mixer may not work with: workers that divide sequences, connectors, being a draft model's, CUDA graphs, a
simulation by its sizes alone."""


ROWS = 0
"""Stands for the dimension of a tensor that has its rows."""


class MixerTensor(NamedTuple):
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


class StateTensor(NamedTuple):
    """One of the tensors that a layer keeps of a sequence, whatever its length."""

    field: str
    """Of what the kernels know of a layer, where it has a first dimension more, rows."""
    shape: tuple[int, ...]
    is_float32: bool = False
    """Whether it is kept in float32, instead of the model's data type."""


class Cached(NamedTuple):
    """What a layer keeps in blocks of the tokens of a sequence."""

    kind: CacheKind
    window: int | None = None
    """How many tokens a token sees, itself included. None: all tokens up to its own."""


NOTHING_CACHED = Cached("none")


class Copies(NamedTuple):
    """How many ranks keep the same of a token, with the words of an error about that number."""

    num: int
    kept: str
    """What they keep."""
    sharers: str
    """Which ranks keep the same."""
    why: str = ""
    """What else the number depends on, besides the number of ranks."""


@dataclass(slots=True, frozen=True)
class HeadShape:
    """The number and size of one rank's attention heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent_rank: int | None = None
    """With latent attention, so many elements of a key are its value, too, and the others are rotated. There is one key
    for all query heads. None: keys and values are ordinary ones."""

    @property
    def group(self) -> int:
        """Number of query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads


class MixerSpec(msgspec.Struct, frozen=True):
    """What mixes the tokens of a sequence in a layer.

    Methods get the model that has the layer. Sizes of `self` and of the model are those of the whole model. A rank is
    one of `tp_size`, a number that `ModelSpec.check_tensor_parallel` has accepted.
    """

    computed_by: ClassVar[str]
    """`package.module.Class` of a `raycore.decoder.mixer.Mixer`. It is a path, because only workers import torch."""
    weights_class: ClassVar[str]
    """`package.module.Class` of a `raycore.weights.mixer_weights.MixerWeights`, whose fields `linears` and `vectors`
    name."""
    memory: ClassVar[str]
    """`package.module.Class` of a `raycore.step.memory.MixerMemory`: what a step needs within such a layer."""
    recurrence: ClassVar[str] = ""
    """Of a layer that keeps a state: `package.module.Class` of a `raycore.state.recurrence.Recurrence`."""
    refused: ClassVar[Mapping[Refusable, str]] = {}
    """What can't be used with a model that has such a layer, and why: `has layers that ...`."""
    refused_adapters: ClassVar[Mapping[str, str]] = {}
    """Parts of the names of tensors that adapters may not have, and why."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """What transformers calls projections that have other names in checkpoints, with those. Adapters have either."""

    @abstractmethod
    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        """Return the linear layers of a rank.

        `num_inputs`: of a layer that reads more than hidden states, such as that of an EAGLE-3 head. None: the hidden
        size.
        """

    @abstractmethod
    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[MixerTensor, ...]:
        """Return the other tensors of a rank."""

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

    @property
    def split_sizes(self) -> dict[str, int]:
        """The sizes of its own that tensor-parallel ranks split, by their names in config.json."""
        return {}

    def sizes(self, model: ModelSpec, tp_size: int) -> dict[str, int]:
        """Return the numbers of outputs and inputs of linear layers on a rank that may be kept in other forms than
        numbers of the model's data type, by what they are."""
        return {}

    def cached(self, model: ModelSpec, layer: int) -> Cached:
        """Return what the model's layer keeps in blocks."""
        return NOTHING_CACHED

    def cached_numbers(self, model: ModelSpec, tp_size: int) -> int:
        """Return how many numbers a layer keeps in blocks of one token on a rank."""
        return 0

    @property
    def keeps_state(self) -> bool:
        """Whether a layer keeps a state of a sequence, instead of something in blocks."""
        return bool(self.state(1))

    def state(self, tp_size: int) -> tuple[StateTensor, ...]:
        """Return what a layer keeps of a sequence on a rank, besides blocks. Prefixes and drafts have copies of it."""
        return ()
