"""One update of a worker's weights: tensors come in any order, and units are replaced as soon as they are complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from raycore.errors import InvalidInput
from raycore.parts.weights.worker.units import WeightUnits

NamedTensors = Iterable[tuple[str, Tensor]]
_UNITS_HELD = 2
"""Waiting tensors may take as much memory as so many of the largest units."""


class WeightUpdate:
    """Tensors that have come, and that wait for others of their units."""

    def __init__(self, units: WeightUnits, *, needs_all: bool = False) -> None:
        """`needs_all`: whether all weights have to come, because what there is isn't of the same version."""
        self._units = units
        self._waiting: dict[str, dict[str, Tensor]] = {}
        """By unit: the tensors that have come."""
        self._come: set[str] | None = set() if needs_all else None
        """The names of all tensors, of a whole update."""
        self.has_changed = False
        """Whether weights have changed."""

    def load(self, weights: NamedTensors, *, is_lent: bool = False) -> set[str]:
        """Take tensors, with the names and the whole shapes that they have in checkpoints. Returns the names.

        Args:
            weights: if it is a sequence, all are checked before the first one changes anything.
            is_lent: whether their memory stays as it is until `finish`. If not, those that have to wait are copied.

        Raises:
            InvalidInput: the model has no such tensor, or it has another shape, or numbers that don't fit.
        """
        if isinstance(weights, Sequence):
            for name, tensor in weights:
                self._check(name, tensor)
        names: set[str] = set()
        for name, tensor in weights:
            names.add(name)
            if self._check(name, tensor):
                self._take(name, tensor)
        if self._come is not None:
            self._come |= names
        if not is_lent:
            self._keep(names)
        return names

    def check(self, described: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Raise InvalidInput if the model has no tensors with these names and shapes."""
        for name, shape in described:
            self._units.check(name, shape)

    def finish(self) -> None:
        """Apply what has come.

        Raises:
            InvalidInput: tensors are missing without which the others can't be applied. The update goes on.
        """
        if self._come is not None:
            missing = [
                name
                for unit in self._units.all
                if unit.complete_form(self._come) is None
                for name in unit.nearest_form(self._come)[1]
            ]
            if missing:
                raise InvalidInput(f"the update lacks {len(missing)} tensors: {', '.join(missing[:8])}")
        for label in list(self._waiting):
            self._apply_given(label)
        if self.has_changed:
            self._units.refresh()

    def _check(self, name: str, tensor: Tensor) -> bool:
        is_known = self._units.check(name, tuple(tensor.shape))
        if is_known:
            self._units.check_numbers(name, tensor)
        return is_known

    def _take(self, name: str, tensor: Tensor) -> None:
        self._units.note_change()
        for unit in self._units.unit_of.get(name, ()):
            held = self._waiting.setdefault(unit.label, {})
            held[name] = tensor
            form = unit.complete_form(held.keys())
            if form is not None:
                del self._waiting[unit.label]
                self.has_changed = True
                self._units.replace(unit, form, self._units.given(held))

    def _keep(self, names: set[str]) -> None:
        """Copy those of the waiting tensors that have just come, unless that takes much memory."""
        for held in self._waiting.values():
            for name in held.keys() & names:
                held[name] = held[name].clone()
        while len(self._waiting) > 1 and self._num_held() > _UNITS_HELD * self._units.largest:
            self._apply_given(max(self._waiting, key=lambda label: _num_numbers(self._waiting[label])))

    def _apply_given(self, label: str) -> None:
        """Apply the tensors of a unit that have come, without the others."""
        self.has_changed = True
        self._units.replace_given(self._units.labeled[label], self._waiting[label])
        del self._waiting[label]

    def _num_held(self) -> int:
        return sum(map(_num_numbers, self._waiting.values()))


def _num_numbers(tensors: dict[str, Tensor]) -> int:
    return sum(each.numel() for each in tensors.values())
