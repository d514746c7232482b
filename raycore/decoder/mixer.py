"""The interface of what mixes the tokens of a sequence in a layer, such as attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from raycore.attention.spec import Attention
from raycore.layers.linear import Linear
from raycore.layers.lora import FusedName
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.weights.loader import MixerWeights

Adapt = Callable[[Linear, FusedName, TensorParallel | None], Linear]
"""Returns a linear layer with what adapters add to it. The ranks are those over which its input is split."""


class Mixer(Protocol):
    """One rank's mixer in one layer. What depends on positions and on the cache is in `Attention`."""

    o: Linear
    """The projection of the output, which the layer calls, because it may add the result to the hidden states."""

    @property
    def parts(self) -> Mapping[str, str]:
        """The names of the parts in profiles, by attribute."""
        ...

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the input of `o`, for the layer's input, and store what later tokens need of it."""
        ...

    def weights(self) -> MixerWeights:
        """Return the weights that the mixer was made of."""
        ...
