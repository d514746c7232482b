"""One update of a worker's weights: tensors come in any order, and units are replaced as soon as they are complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from raycore.errors import InvalidInput
from raycore.weights.checkpoint_reader import READABLE
from raycore.weights.given_tensors import GivenTensors
from raycore.worker.weight_units import WeightUnit, WeightUnits

NamedTensors = Iterable[tuple[str, Tensor]]


class WeightUpdate:
    """Tensors that have come, and that wait for others of their units."""

    def __init__(self, units: WeightUnits, *, needs_all: bool = False) -> None:
        """`needs_all`: whether all units have to be replaced, because they have no weights to compute with."""
        self._units = units
        self._unreplaced = {unit.label for unit in units.all} if needs_all else set[str]()
        """The units that have to be replaced before the update can end."""
        self._waiting: dict[str, dict[str, Tensor]] = {}
        """By unit: the tensors that have come."""
        self.has_changed = False
        """Whether a unit has been replaced."""

    def load(self, weights: NamedTensors, *, is_lent: bool = False) -> set[str]:
        """Take tensors, with the names and the whole shapes that they have in checkpoints. Returns the names.

        Args:
            weights: if it is a sequence, all are checked before the first one changes anything.
            is_lent: whether their memory stays as it is until `finish`. If not, those that have to wait are copied.

        Raises:
            InvalidInput: the model has no such tensor, or it has another shape, or the numbers aren't floating-point.
        """
        if isinstance(weights, Sequence):
            for name, tensor in weights:
                self._check(name, tensor)
        names: set[str] = set()
        for name, tensor in weights:
            names.add(name)
            if self._check(name, tensor):
                self._take(name, tensor)
        if not is_lent:
            for held in self._waiting.values():
                for name in held.keys() & names:
                    held[name] = held[name].clone()
        return names

    def finish(self) -> None:
        """Apply what has come.

        Raises:
            InvalidInput: units are incomplete.
        """
        unfinished = self._waiting.keys() | self._unreplaced
        if unfinished:
            missing = [name for label in sorted(unfinished) for name in self._missing_of(label)]
            raise InvalidInput(f"the update lacks {len(missing)} tensors: {', '.join(missing[:8])}")
        if self.has_changed:
            self._units.refresh()

    def _check(self, name: str, tensor: Tensor) -> bool:
        is_known = self._units.check(name, tuple(tensor.shape))
        if is_known and tensor.dtype not in READABLE and not self._units.is_quantized:
            raise InvalidInput(f"tensor {name!r} has type {tensor.dtype}: expected float32, bfloat16 or float16")
        return is_known

    def _take(self, name: str, tensor: Tensor) -> None:
        for unit in self._units.unit_of.get(name, ()):
            held = self._waiting.setdefault(unit.label, {})
            held[name] = tensor
            form = unit.complete_form(held.keys())
            if form is not None:
                del self._waiting[unit.label]
                self._replace(unit, form, held)

    def _replace(self, unit: WeightUnit, form: int, tensors: dict[str, Tensor]) -> None:
        self._units.replace(unit, form, GivenTensors(tensors))
        self._unreplaced.discard(unit.label)
        self.has_changed = True

    def _missing_of(self, label: str) -> list[str]:
        unit = next(unit for unit in self._units.all if unit.label == label)
        held = self._waiting.get(label, {}).keys()
        return min(([name for name in needs if name not in held] for needs in unit.needs), key=len)
