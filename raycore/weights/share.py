"""One worker's share of a decoder's weights: which part it is, and the form in which the worker holds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raycore.checkpoint.stages import Stage
from raycore.models.spec import ModelSpec
from raycore.parts.experts.models import ExpertShare
from raycore.weights.linear_formats import CONVERTED, LinearFormats

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class WeightShare:
    """A worker's share. Raises InvalidConfig if the model can't be divided by `tp_size`."""

    spec: ModelSpec
    dtype: torch.dtype
    """The model's data type."""
    tp_rank: int = 0
    tp_size: int = 1
    stage: Stage | None = None
    """None: the whole model."""
    experts: ExpertShare | None = None
    """The rank's part of the experts. None: tensor-parallel ranks split each expert."""
    device: torch.device = _CPU
    formats: LinearFormats = CONVERTED
    """Of the linear layers' weights."""

    embeds: bool = False
    """Whether the embedding belongs to the share although the first layer may not: a head that drafts reads it."""
    gathers: bool = False
    """Whether the weights of linear layers are `GatheredRows`, if they are numbers of `dtype`."""

    def __post_init__(self) -> None:
        self.spec.check_tensor_parallel(self.tp_size, expert_parallel=self.experts is not None)

    @property
    def layers(self) -> range:
        """The indexes of the layers."""
        return range(self.spec.num_layers) if self.stage is None else self.stage.layers

    @property
    def is_first(self) -> bool:
        """Whether the share is of the first stage, where prompts and their images come in."""
        return self.stage is None or self.stage.is_first

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding belongs to the share."""
        return (self.is_first or self.embeds) and not self.spec.encodes_only

    @property
    def has_head(self) -> bool:
        """Whether the final norm and the head belong to the share."""
        return (self.stage is None or self.stage.is_last) and not self.spec.encodes_only

    @property
    def adds_biases(self) -> bool:
        """Whether the biases of layers that are divided by columns belong to the share.

        The sum over ranks must include them only once.
        """
        return self.tp_rank == 0

    @property
    def num_vocab_rows(self) -> int:
        """Number of rows of the embedding and of the head: one for each token, and padding on the last ranks."""
        return -(-self.spec.vocab_size // self.tp_size)

    @property
    def vocab_start(self) -> int:
        """The token of the first of these rows."""
        return self.tp_rank * self.num_vocab_rows

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor on the share's device. `dtype` None: the model's."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
