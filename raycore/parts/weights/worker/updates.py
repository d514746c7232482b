"""How a worker's weights are replaced while it runs: by tensors that are sent, by files, and by another worker's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycore.activity import MemoryTag
from raycore.errors import InvalidInput
from raycore.messages import StepPlan
from raycore.parts.weights.transfer.ways import Way, make_way
from raycore.parts.weights.worker.in_place import checksum
from raycore.parts.weights.worker.units import WeightUnits
from raycore.parts.weights.worker.update import NamedTensors, WeightUpdate
from raycore.worker.core import WorkerCore
from raycore.worker.part import WorkerPart, called_by_name

if TYPE_CHECKING:
    from raycore.parts.weights.worker.export import ExportedWeights


class WorkerWeightUpdates(WorkerPart):
    """Updates of weights, of which one at a time is under way. No step may run in any of these methods."""

    def __init__(self, core: WorkerCore) -> None:
        super().__init__(core)
        self._all_units: WeightUnits | None = None
        """None: no weights have been replaced yet, or others share the experts since."""
        self._update: WeightUpdate | None = None
        """None: none has begun."""
        self._loose: WeightUpdate | None = None
        """What came by `load_weights()` without a beginning or an end. It is applied before the next step."""
        self._way: Way | None = None
        self._exported: ExportedWeights | None = None

    def fall_asleep(self, level: int, tags: Sequence[MemoryTag]) -> None:
        """Forget what belongs to weights that are given up."""
        if "weights" in tags:
            self._update = self._exported = None
            self._drop_loose()

    def regrouped(self) -> None:
        self._all_units = None

    def shut_down(self) -> None:
        self.shutdown_weight_transfer_engine()
        self._exported = self._all_units = None

    # ---- tensors that are sent

    @called_by_name
    def load_weights(self, weights: NamedTensors) -> set[str]:
        """Replace weights in place, by tensors with the names and the whole shapes that they have in checkpoints.

        No step may run meanwhile. Parts of the model that lack tensors wait for other calls: until the next step, or
        until `finish_weight_update()` after `start_weight_update()`.

        Args:
            weights: if it is a sequence, all are checked before the first one changes anything.

        Returns: the names.

        Raises:
            InvalidInput: the model has no such tensor, or it has another shape or kind of numbers.
        """
        self.core.before_change()
        update = self._update or self._loose
        if update is None:
            update = self._loose = self._new_update()
            self.core.hooks.begin = (self._before_step, *self.core.hooks.begin)
        return update.load(weights)

    @called_by_name
    def start_weight_update(self, needs_all: bool = False) -> None:
        """Begin an update: `load_weights()` or `update_weights()` bring tensors until `finish_weight_update()`.

        Args:
            needs_all: the update can only end when all weights have been replaced. For a worker that hasn't those that
                its engine had before.

        Raises:
            InvalidInput: an update has begun already.
        """
        if self._update is not None:
            raise InvalidInput("start_weight_update() comes after finish_weight_update(): an update has begun already")
        self.core.before_change()
        self._finish_loose()
        self._update = self._new_update(needs_all)

    @called_by_name
    def finish_weight_update(self) -> None:
        """Apply what is left of the update, and end it.

        Raises:
            InvalidInput: no update has begun, or what has come can't be applied. The update goes on then.
        """
        self._begun_update.finish()
        self._end_update()
        self.core.lacks_weights = False

    @called_by_name
    def cancel_weight_update(self) -> bool:
        """Give up the update, if one has begun. Returns whether it has changed weights."""
        update = self._update
        self._end_update()
        return update is not None and update.has_changed

    @called_by_name
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect to a trainer, by the way that `weight_transfer_config` names.

        Raises:
            InvalidInput: the information is invalid.
            RaycoreError: the trainer and all workers haven't met in time.
        """
        self._begun_way.connect(init_info)

    @called_by_name
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Get tensors from the trainer, after `start_weight_update()`. All are checked before the first one changes
        anything.

        Raises:
            InvalidInput: the information is invalid, or the model has no such tensors.
            RaycoreError: the trainer doesn't send in time.
        """
        self._begun_way.receive(update_info, self._begun_update.load, self._begun_update.check)

    @called_by_name
    def shutdown_weight_transfer_engine(self) -> None:
        """Disconnect from the trainer."""
        if self._way is not None:
            self._way.disconnect()
            self._way = None

    def _new_update(self, needs_all: bool = False) -> WeightUpdate:
        return WeightUpdate(self._units, needs_all=needs_all or self.core.lacks_weights)

    def _end_update(self) -> None:
        self._update = None
        if self._way is not None:
            self._way.end_update()

    def _before_step(self, plan: StepPlan) -> None:
        self._finish_loose()

    def _finish_loose(self) -> None:
        """Apply what `load_weights()` has got without `start_weight_update()`."""
        if self._loose is not None:
            self._loose.finish()
            self._drop_loose()
            self.core.lacks_weights = False

    def _drop_loose(self) -> None:
        if self._loose is not None:
            self._loose = None
            self.core.hooks.begin = tuple(each for each in self.core.hooks.begin if each != self._before_step)

    @property
    def _begun_update(self) -> WeightUpdate:
        if self._update is None:
            raise InvalidInput("start_weight_update() comes first: no update of weights has begun")
        return self._update

    @property
    def _begun_way(self) -> Way:
        config, rank = self.core.config.weight_transfer_config, self.core.rank
        if config is None:
            raise InvalidInput(
                "weights come from a trainer with the option weight_transfer_config: start the engine with, for "
                "example, weight_transfer_config={'backend': 'ray'}"
            )
        if self._way is None:
            self._way = make_way(config, rank.number_among_all, self.core.setup.device)
        return self._way

    @property
    def _units(self) -> WeightUnits:
        if self._all_units is None:
            model = self.core.config.model
            path = Path(model.model) if model.load_format == "auto" else None
            self._all_units = WeightUnits(self.core.setup, self.core.model, path)
        return self._all_units

    # ---- files, and other workers

    @called_by_name
    def reload_from(self, path: str) -> None:
        """Replace all weights in place by those of the checkpoint in the directory `path`, unit by unit.

        Its files are of the same model: names and shapes are checked before anything changes.

        Raises:
            InvalidCheckpoint: a file is damaged, or a tensor is missing or has another shape.
            InvalidInput: an update has begun.
        """
        if self._update is not None:
            raise InvalidInput("reload_from(): an update of weights has begun: finish or cancel it first")
        self.core.before_change()
        self._drop_loose()
        units = WeightUnits(self.core.setup, self.core.model, Path(path))
        units.reload()
        self._all_units, self.core.lacks_weights = units, False

    @called_by_name
    def weights_checksum(self) -> str:
        """Return a hash over all weights as they are in memory. Workers with equal shares have equal hashes."""
        self._finish_loose()
        return checksum(self.core.model.weight_tensors())

    @called_by_name
    def export_weights(self) -> list[dict[str, Any]]:
        """Put all weights into Ray's object store, as they are in memory. Returns what `import_weights` takes.

        They stay there until `release_exported_weights()`.
        """
        self._finish_loose()
        from raycore.parts.weights.worker.export import ExportedWeights  # imported lazily: imports Ray

        self._exported = ExportedWeights(self.core.model.weight_tensors())
        return self._exported.pieces

    @called_by_name
    def import_weights(self, pieces: list[dict[str, Any]]) -> None:
        """Take the weights of a worker with the same share, whose layers keep them in the same forms.

        Raises:
            RaycoreError: layers keep them in other forms. What weights this worker has then isn't known.
        """
        core = self.core
        core.before_change()
        self._update = None
        self._drop_loose()
        core.model.num_changes += 1
        from raycore.parts.weights.worker.export import import_pieces  # imported lazily: imports Ray

        import_pieces(core.model.weight_tensors(), pieces, core.config.executor.init_timeout_s)
        self._units.refresh()
        core.lacks_weights = False

    @called_by_name
    def release_exported_weights(self) -> None:
        """Remove from the object store what `export_weights` has put there."""
        self._exported = None
