"""What layers of a network hand to later ones within a step, besides hidden states.

Shape suffixes: T tokens of the step, L layers, P size of a layer's own input, X keys and values of all heads.
"""

from __future__ import annotations

from torch import Tensor


class Handed:
    """That of one network. Layers read what has been set in the same step."""

    def __init__(self) -> None:
        self._keys_and_values: dict[int, Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all after the step's last layer, because memory is for what comes then."""
        self._keys_and_values.clear()
        self._inputs_TLP: Tensor | None = None
        self._rows_R: Tensor | None = None

    def begin(self, inputs_TLP: Tensor) -> None:
        """Set the inputs of its own that each layer has."""
        self._inputs_TLP, self._rows_R = inputs_TLP, None

    def keep_rows(self, rows_R: Tensor) -> None:
        """Note that the next layer ends with these rows alone."""
        self._rows_R = rows_R

    def inputs(self, layer: int) -> Tensor:
        """Return the own input, [T, P], of a layer of the model, with the rows that it ends with."""
        assert self._inputs_TLP is not None, "the step has begun with tokens"
        own_TP = self._inputs_TLP[:, layer]
        return own_TP if self._rows_R is None else own_TP.index_select(0, self._rows_R)

    def keep(self, layer: int, keys_and_values_TX: Tensor) -> None:
        """Set the keys and values that a layer of the model has made of the step's tokens, before rotation."""
        self._keys_and_values[layer] = keys_and_values_TX

    def kept(self, layer: int) -> Tensor:
        """Return the keys and values that a layer of the model has set."""
        return self._keys_and_values[layer]
