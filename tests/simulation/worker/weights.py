"""The weights of a worker: one number for each part of the model, so that half an update is another model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raycore.errors import InvalidCheckpoint, InvalidInput
from simulation.worker import model
from simulation.worker.chance import Chance
from simulation.worker.experts import NUM_EXPERTS, Experts, combined
from simulation.worker.numbers64 import Words, key_of
from simulation.world.kernel import pause

_PART_S = 0.01
_OF_EXPERTS = model.UNITS.index("second")
"""The part that is computed by experts."""
FIRST_DAMAGED = 30
"""Checkpoints are numbered by how roundabout the names of their directories are. From this number on, they are damaged:
so many parts more than this number says can be read, and then none."""
NamedNumbers = Iterable[tuple[str, int]]
"""What stands for tensors: parts of the model by name, and the numbers that replace them."""


class Weights:
    """See the module. A worker's methods of the same names call these."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self.parts = chance.garbage(len(model.UNITS))
        """By `model.UNITS`. That of experts: what those of this worker are, if they are all of the same weights."""
        self.experts: Experts = {}
        """Those of this worker."""
        self.hold(range(NUM_EXPERTS))
        self.num_changes = 0
        self.lacks_any = False
        """Whether an update has to bring all weights."""
        self._asleep: tuple[Words, Experts] | None = None
        """What the host's memory keeps while the device's is given up."""
        self._come: set[str] | None = None
        """The parts that an update has brought. None: none has begun."""
        self._updated = frozenset[int]()
        """The experts that there were when an update began. It brings no others."""
        self._needs_all = self._has_changed = False
        self.num_left: int | None = None
        """How many parts change before a change fails, once. None: none does."""

    def hold(self, experts: Iterable[int]) -> None:
        """Have these experts, with garbage in them."""
        self.experts = dict.fromkeys(experts, int(self.parts[_OF_EXPERTS]))

    def with_experts(self, shares: Iterable[Experts]) -> Words:
        """What a step computes with: this worker's parts, and the experts of all workers."""
        parts = self.parts.copy()
        parts[_OF_EXPERTS] = combined(shares)
        return parts

    def join(self, pieces: list[dict[str, Any]]) -> None:
        """Get what all workers have from another one."""
        self._replace_all(np.array([each["number"] for each in pieces], np.uint64))

    def take_experts(self, held: Iterable[int], shares: Iterable[Experts]) -> None:
        """Have the experts `held`, as they come from the workers that had them."""
        found: Experts = {}
        for share in shares:
            found |= share
        self.experts = {expert: found[expert] for expert in held}
        self._note_experts()

    def read(self, checkpoint: str) -> None:
        """Replace all parts by those of a checkpoint, one after the other.

        Raises InvalidCheckpoint if it turns out to be damaged. Some parts have been replaced then.
        """
        self._replace_all(model.weights_of(checkpoint)[: _num_readable(checkpoint)])

    def reload_from(self, checkpoint: str) -> None:
        """As `read`, for workers that run."""
        if self._come is not None:
            raise InvalidInput("reload_from(): an update of weights has begun: finish or cancel it first")
        self.read(checkpoint)

    def sleep(self, level: int) -> None:
        """Give up the device's memory. Level 2: and the content."""
        self._come = None
        self._asleep = (self.parts.copy(), self.experts) if level == 1 and self._asleep is None else None
        self._fill_with_garbage()

    def wake(self, checkpoint: str | None) -> None:
        """Get the memory back. `checkpoint`: what is read if the content was dropped. None: nothing."""
        if self._asleep is not None:
            (self.parts[:], self.experts), self._asleep = self._asleep, None
        elif checkpoint is not None:
            self.read(checkpoint)
        else:
            self._fill_with_garbage()
            self.lacks_any = True

    def load(self, weights: NamedNumbers) -> set[str]:
        """Replace some parts. If `weights` is a sequence, all names are checked before the first one changes."""
        if isinstance(weights, Sequence):
            for name, _ in weights:
                _index(name)
        names: set[str] = set()
        for name, number in weights:
            self._replace(_index(name), np.uint64(number))
            names.add(name)
        if self._come is not None:
            self._come |= names
            self._has_changed = True
        return names

    def start_update(self, *, needs_all: bool) -> None:
        if self._come is not None:
            raise InvalidInput("start_weight_update() comes after finish_weight_update(): an update has begun already")
        self._come, self._needs_all, self._has_changed = set(), needs_all, False
        self._updated = frozenset(self.experts)

    def receive(self, update_info: Mapping[str, Any]) -> None:
        """Get the parts `names` of a trainer's `checkpoint`, by default all."""
        if self._come is None:
            raise InvalidInput("update_weights() comes after start_weight_update()")
        new = model.weights_of(update_info["checkpoint"])
        self.load([(name, int(new[_index(name)])) for name in update_info.get("names", model.UNITS)])

    def finish_update(self) -> None:
        if self._come is None:
            raise InvalidInput("finish_weight_update() comes after start_weight_update()")
        missing = [name for name in model.UNITS if name not in self._come]
        if self._needs_all and missing:
            raise InvalidInput(f"the update lacks {len(missing)} tensors: {', '.join(missing)}")
        self._come, self.lacks_any = None, False

    def cancel_update(self) -> bool:
        has_changed = self._come is not None and self._has_changed
        self._come = None
        return has_changed

    def exported(self) -> list[dict[str, Any]]:
        return [{"name": name, "number": int(number)} for name, number in zip(model.UNITS, self.parts, strict=True)]

    def take_exported(self, pieces: list[dict[str, Any]]) -> None:
        self._come = None
        self._replace_all(np.array([each["number"] for each in pieces], np.uint64))

    def checksum(self) -> str:
        return checksum_of(self.parts)

    def _replace_all(self, new: Words) -> None:
        for index, number in enumerate(new):
            self._replace(index, number)
        if len(new) < len(self.parts):
            raise InvalidCheckpoint(f"the tensors of {model.UNITS[len(new)]!r} are cut off")
        self.lacks_any = False

    def _replace(self, index: int, number: np.uint64) -> None:
        if self.num_left is not None:
            self.num_left = self.num_left - 1 if self.num_left else None
            if self.num_left is None:
                raise OSError("the weights can't be read any further")
        self.num_changes += 1
        pause()
        self._chance.work(_PART_S)
        self.parts[index] = number
        if index == _OF_EXPERTS:
            of_update = self.experts if self._come is None else self._updated
            self.experts = {expert: int(number) if expert in of_update else old for expert, old in self.experts.items()}
            self._note_experts()

    def _note_experts(self) -> None:
        self.parts[_OF_EXPERTS] = combined([self.experts], self.experts)

    def _fill_with_garbage(self) -> None:
        self.parts[:] = self._chance.garbage(len(self.parts))
        self.hold(self.experts)


def _num_readable(checkpoint: str) -> int:
    """How many of a checkpoint's parts can be read."""
    damaged = checkpoint.count("/../") - FIRST_DAMAGED
    return damaged if damaged >= 0 else len(model.UNITS)


def _index(name: str) -> int:
    if name not in model.UNITS:
        raise InvalidInput(f"the model has no tensor {name!r}; it has {', '.join(model.UNITS)}")
    return model.UNITS.index(name)


def checksum_of(parts: Words) -> str:
    return f"{key_of(parts.tolist()):x}"
