"""What a worker runs: the interface of decoders, encoders and networks of transformers.

Letters of shapes: T tokens of the step, R those of the T rows that are kept, D hidden size, V vocabulary, N heads, H
elements of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.checkpoint.stages import Stage
from raycore.messages import StepPlan
from raycore.parts.experts.layers.sparse_feed_forward import SparseFeedForward
from raycore.profile_session import ProfiledParts

Taps = Mapping[int, Callable[[Tensor], None]]
"""By layer of the model: what gets the layer's input, hidden states [T, D], which it must copy, or change in place. By
the number of layers: what gets the input of the last norm, and by the number after that: what gets the final hidden
states. All rows of these are kept then."""
NO_TAPS: Taps = {}

ComputeLayer = Callable[[Tensor, Attention], Tensor]
"""A layer all of whose rows are kept. May overwrite the hidden states [T, D] that it gets."""
RunLayers = Callable[[Sequence[ComputeLayer], Tensor, Attention, Callable[[], None]], Tensor]
"""Computes layers that follow each other in their place. Calls a function after each one, or after several."""


class FollowsPlans(Protocol):
    """What keeps something of requests by slot."""

    def apply(self, plan: StepPlan) -> None:
        """Apply what a plan says of requests, before its step."""
        ...


class Vocabulary(Protocol):
    """What is between a network's hidden states and texts."""

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return the tokens' embeddings [T, D], in the first stage. `Network.forward` takes them instead of tokens."""
        ...

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the logits [R, V] of the whole vocabulary, in the last stage. All of its ranks return the same."""
        ...


class WeightParts(NamedTuple):
    """What has a network's weights. A part has the same class and size in every network of the same description."""

    layers: Sequence[object] = ()
    """By layer of the stage."""
    outside_layers: Mapping[str, object] = {}
    """`embedding`, `head`, `final_norm` and what belongs to them, as far as the stage has them."""


class Network(ABC):
    """One tensor-parallel rank's part of a model, or of one of its stages.

    `ModelSpec.decoder` names its class. A worker calls it with the model's spec, the weights, the tensor-parallel
    ranks, `Operations`, the ranks that share experts, the stage, and with `adapters` if there are LoRA adapters. What
    only some networks can do is an attribute, whose default says that a network can't.
    """

    stage: Stage
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    """Of hidden states."""
    num_weights: int
    """Number of multiplications for one token, without those of attention."""
    num_key_value_numbers: int
    """How many numbers of one token's keys and values a later token reads, in all layers of the stage."""
    constants: Sequence[MixerConstants]
    """By layer of the stage."""

    sparse_layers: Sequence[SparseFeedForward] = ()
    """The feed-forward parts that have experts, which ranks may share, in the order of the layers."""
    takes_taps: ClassVar[bool] = False
    """Whether `forward` takes taps: without them, no drafter reads hidden states, and no image adds to them."""

    @property
    def can_record_layers(self) -> bool:
        """Whether `forward` takes `run_layers`, and what a layer calls is the same in every step."""
        return False

    @property
    def vocabulary(self) -> Vocabulary:
        """The embedding and the head of a network that generates texts."""
        raise AssertionError(f"{type(self).__name__} generates no texts")

    @property
    def weight_parts(self) -> WeightParts:
        """What gets other weights while it runs. Empty: the weights stay. See `ModelSpec.why_weights_stay`."""
        return WeightParts()

    @abstractmethod
    def forward(
        self,
        inputs: Tensor,
        attention: Attention,
        rows_R: Tensor | None = None,
        after_layer: Callable[[], None] = lambda: None,
        taps: Taps = NO_TAPS,
        run_layers: RunLayers | None = None,
    ) -> Tensor:
        """Run the layers of the stage.

        Args:
            inputs: in the first stage, the tokens [T], or their embeddings [T, D]; in others, the hidden states [T, D]
                that the stage before has returned. Both may be overwritten.
            attention: what `around` has returned, after its `begin`.
            rows_R: in the last stage, the rows that are kept. None: all.
            after_layer: called after each layer but the last one, and maybe after that. `run_layers` may call it after
                several.
            taps: get the inputs of some layers, and may change them. Empty unless `takes_taps`.
            run_layers: computes layers. None: they do it themselves, as always unless `can_record_layers`.

        Returns: in the last stage, the final hidden states [R, D]; in others, those [T, D] for the next stage.
        """

    @abstractmethod
    def parts(self) -> ProfiledParts:
        """The parts of a step, for profiles. Attention is not among them."""

    def around(self, attention: Attention) -> tuple[Attention, list[FollowsPlans]]:
        """Return the attention that a runner tells of its steps, around the one that computes them.

        The second result follows the plans of the runner's steps: what notes something of requests for `forward`.
        """
        return attention, []

    def dense_tensors(self) -> Iterator[Tensor]:
        """Yield the weights that aren't those of experts, as checkpoints have them, for `dense_tensors` of
        `raycore.weights.named` on a rank that comes to share the experts. Networks without experts yield nothing."""
        yield from ()


def both_taps(first: Taps, then: Taps) -> Taps:
    """Return what calls those of `first` and `then`, in this order where a layer has both."""
    if not first or not then:
        return first or then
    joined = dict(first)
    for layer, tap in then.items():
        joined[layer] = partial(_both, first[layer], tap) if layer in first else tap
    return joined


def _both(first: Callable[[Tensor], None], then: Callable[[Tensor], None], hidden_TD: Tensor) -> None:
    first(hidden_TD)
    then(hidden_TD)
