"""The network of an engine that only encodes images: no layers, and no texts.

Shape suffixes: T tokens of the step, R those from which a token is sampled, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.checkpoint.stages import Stage
from raycore.decoder.network import NO_TAPS, Network, RunLayers, Taps
from raycore.layers.operations import Operations
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.parallel import ExpertRanks
from raycore.profile_session import ProfiledParts
from raycore.weights.loader import DecoderWeights


class NoLayers(Network):
    """Stands for the model of texts. The worker encodes images before a step's layers, of which there are none."""

    takes_taps: ClassVar[bool] = True

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        ranks: TensorParallel,
        operations: Operations,
        experts: ExpertRanks | None = None,
        stage: Stage | None = None,
    ) -> None:
        """`weights` are none: the encoder's have been taken."""
        self.stage = stage or Stage.whole(spec)
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        self.dtype = getattr(torch, spec.dtype)
        self.num_weights = self.num_key_value_numbers = 0
        self.constants = ()

    @property
    def vocabulary(self) -> EmptyVocabulary:
        return EmptyVocabulary(self.hidden_size, self.dtype)

    def forward(
        self,
        inputs: Tensor,
        attention: Attention,
        rows_R: Tensor | None = None,
        after_layer: Callable[[], None] = lambda: None,
        taps: Taps = NO_TAPS,
        run_layers: RunLayers | None = None,
    ) -> Tensor:
        """Return the inputs, which nobody reads. Taps have no layer. See `Network.forward`."""
        hidden_TD = inputs if inputs.is_floating_point() else self.vocabulary.embed(inputs)
        return hidden_TD if rows_R is None else hidden_TD.index_select(0, rows_R)

    def parts(self) -> ProfiledParts:
        yield from ()


class EmptyVocabulary:
    """Makes room where embeddings of images go. Implements `Vocabulary`."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        self._hidden_size = hidden_size
        self._dtype = dtype

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return zeros [T, D]."""
        return torch.zeros(len(token_ids_T), self._hidden_size, dtype=self._dtype, device=token_ids_T.device)

    def logits(self, hidden_RD: Tensor) -> NoReturn:
        """Nobody asks: see `raycore.parts.images.worker`."""
        raise AssertionError("an engine that only encodes images has no logits")
