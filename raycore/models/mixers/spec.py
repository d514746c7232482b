"""What mixes the tokens of a sequence in a layer, such as attention: the contract that each kind of it declares.

A mixer is a `LayerPart`. Besides, it says what is kept of a layer's tokens. Does not import torch.
"""

from __future__ import annotations

__all__ = ["NOTHING_CACHED", "Cached", "Copies", "HeadShape", "IndexShape", "MixerSpec", "StateTensor"]

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from raycore.cache_layout import CacheKind
from raycore.models.layer_part import LayerPart

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec  # it has mixers


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


class IndexShape(NamedTuple):
    """The sizes of what selects the tokens that a query sees."""

    num_heads: int
    head_dim: int
    num_selected: int
    """How many tokens, or blocks of them, a query sees, if there are so many."""
    is_adjacent: bool
    """Whether the pairs that are rotated are adjacent. Otherwise, the halves of what is rotated are."""
    num_rotated: int
    """How many elements of a head are rotated, the first ones."""
    query_rank: int = 0
    """Number of elements of the vector that its queries are made of, where attention makes them."""
    block_size: int = 1
    """How many tokens are selected together."""
    num_local: int = 0
    """How many of the last blocks of so many tokens are always selected."""


@dataclass(slots=True, frozen=True)
class HeadShape:
    """The number and size of one rank's attention heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent_rank: int | None = None
    """With latent attention, so many elements of a key are its value, too, and the others are rotated. There is one key
    for all query heads. None: keys and values are ordinary ones."""
    index: IndexShape | None = None
    """What selects the tokens that a query sees. None: it sees all up to its own, or those of a window."""

    @property
    def group(self) -> int:
        """Number of query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads


class MixerSpec(LayerPart, frozen=True):
    """What mixes the tokens of a sequence in a layer. A `raycore.decoder.mixer.Mixer` computes it."""

    memory: ClassVar[str]
    """`package.module.Class` of a `raycore.step.memory.MixerMemory`: what a step needs within such a layer."""
    recurrence: ClassVar[str] = ""
    """Of a layer that keeps a state: `package.module.Class` of a `raycore.state.recurrence.Recurrence`."""
    refused_adapters: ClassVar[Mapping[str, str]] = {}
    """Parts of the names of tensors that adapters may not have, and why."""

    def renamed(self, model: ModelSpec) -> Mapping[str, str]:
        """What transformers calls projections that have other names in files, with those. Adapters have either."""
        return {}

    @property
    def split_sizes(self) -> dict[str, int]:
        """The sizes of its own that tensor-parallel ranks split, by their names in config.json."""
        return {}

    def shared_sizes(self, model: ModelSpec) -> dict[str, int]:
        """Return the sizes that ranks split, or of which several ranks have the same part, by their names in
        config.json."""
        return {}

    def kept_by(self, layer: int) -> int:
        """Return the layer of the model whose blocks have what the model's layer `layer` reads of earlier tokens."""
        return layer

    def cached(self, model: ModelSpec, layer: int) -> Cached:
        """Return what the model's layer keeps in blocks."""
        return NOTHING_CACHED

    def cached_numbers(self, model: ModelSpec, tp_size: int) -> int:
        """Return how many numbers of one token a layer reads in blocks on a rank."""
        return 0

    def cached_beside(self, model: ModelSpec) -> int:
        """Return how many of these are in a page of their own, beside keys and values."""
        return 0

    @property
    def unused(self) -> Mapping[str, str]:
        """Patterns of a layer's tensors that checkpoints may have and nobody reads, and why."""
        return {}

    @property
    def kind(self) -> int:
        """The same number for the layers of a model whose attention one object computes."""
        return id(self)

    @property
    def needs_layer_before(self) -> bool:
        """Whether a layer uses what mixing tokens found in the layer before it. Both are on one stage then."""
        return False

    @property
    def keeps_state(self) -> bool:
        """Whether a layer keeps a state of a sequence, instead of something in blocks."""
        return bool(self.state(1))

    def state(self, tp_size: int) -> tuple[StateTensor, ...]:
        """Return what a layer keeps of a sequence on a rank, besides blocks. Prefixes and drafts have copies of it."""
        return ()
