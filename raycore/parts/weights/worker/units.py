"""The units in which a worker's weights are replaced while it runs: a layer, or what is outside of layers.

A unit is made anew by the code that makes the whole model, from tensors of a checkpoint or of an update, and then takes
the place of the old one, tensor by tensor. So whatever format a layer keeps its weights in, it can be replaced, and
memory is needed for one unit more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from raycore.checkpoint.stages import Stage
from raycore.checkpoint.stored_model import wrong_shape
from raycore.errors import InvalidInput
from raycore.models.quantization import WeightScheme, stored_scheme
from raycore.parts.weights.worker.in_place import MixedNumbers, replace_given, replace_weights
from raycore.weights.checkpoint_reader import READABLE, CheckpointReader, GivenTensors
from raycore.weights.fill import CheckpointFill
from raycore.weights.gguf_slice import GgufSlice, given_blocks, types_by_row_bytes
from raycore.weights.linear_formats import CONVERTED
from raycore.weights.loader import RankLayout, fill_weights
from raycore.weights.share import WeightShare
from raycore.weights.update_plan import HasTensor, Layout, Shape, checkpoint_forms
from raycore.weights.weight import Fill
from raycore.worker.setup import WorkerSetup
from raycore.worker.worker_model import WorkerModel

_NOT_WEIGHTS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias", "position_ids")
"""How the names of tensors end that networks of transformers may have, and that no network computes with."""

_MAX_NAMED = 6


@dataclass(frozen=True)
class WeightUnit:
    """A part of a worker's weights that is replaced as a whole."""

    label: str
    share: WeightShare
    layout: Layout
    needs: tuple[dict[str, Shape], ...]
    """For each form of the checkpoint: the tensors that the unit is made of, with their whole shapes."""

    def complete_form(self, names: AbstractSet[str]) -> int | None:
        """Return the first form all of whose tensors are among `names`. None: some are missing."""
        return next((index for index, needs in enumerate(self.needs) if needs.keys() <= names), None)

    def nearest_form(self, names: AbstractSet[str]) -> tuple[int, list[str]]:
        """Return the form that has the most of these tensors, and its tensors that aren't among them."""
        form = max(range(len(self.needs)), key=lambda index: len(self.needs[index].keys() & names))
        return form, [name for name in self.needs[form] if name not in names]

    @property
    def num_numbers(self) -> int:
        """How many numbers the unit's tensors have."""
        return sum(math.prod(shape) for shape in self.needs[0].values())


class WeightUnits:
    """All units of a worker."""

    def __init__(self, setup: WorkerSetup, model: WorkerModel, path: Path | None) -> None:
        """
        Args:
            path: the checkpoint whose tensors' names and formats are meant. None: it isn't in files.

        Raises:
            InvalidCheckpoint: the checkpoint's files are damaged, or aren't there although weights are quantized.
        """
        self._setup, self._model = setup, model
        self._path = path
        self._spec = spec = setup.config.model.spec
        if spec.why_weights_stay is not None:
            raise InvalidInput(spec.why_weights_stay)
        self._forms = checkpoint_forms(self._spec, path)
        self._is_gguf = spec.quantization is not None and spec.quantization.method == "gguf"

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint's files have weights in integers or in 8 bits."""
        return self._spec.quantization is not None

    @cached_property
    def all(self) -> list[WeightUnit]:
        """The units, in the order of the model."""
        return [
            WeightUnit(label, share, layout, tuple(form.needs(layout, share) for form in self._forms))
            for label, share, layout in self._shares(self._setup.share)
        ]

    @cached_property
    def labeled(self) -> dict[str, WeightUnit]:
        """The units by their labels."""
        return {unit.label: unit for unit in self.all}

    @cached_property
    def largest(self) -> int:
        """How many numbers the tensors of the largest unit have."""
        return max(unit.num_numbers for unit in self.all)

    @cached_property
    def unit_of(self) -> dict[str, list[WeightUnit]]:
        """The units that a tensor is a part of, by its name. A tied embedding may be a part of two."""
        found: dict[str, list[WeightUnit]] = {}
        for unit in self.all:
            for name in {name for needs in unit.needs for name in needs}:
                found.setdefault(name, []).append(unit)
        return found

    @cached_property
    def _known(self) -> dict[str, set[Shape]]:
        """The shapes of all tensors of the model, those of other workers' shares included."""
        whole = WeightShare(self._spec, self._setup.dtype, formats=CONVERTED)
        known: dict[str, set[Shape]] = {}
        for _, share, layout in self._shares(whole):
            for form in self._forms:
                for name, shape in form.needs(layout, share).items():
                    known.setdefault(name, set()).update((shape, *self._block_shapes(name, shape)))
        return known

    def _gguf_scheme(self, name: str) -> WeightScheme | None:
        """Return how the weight `name` is stored in the engine's GGUF file, if it can be kept like this."""
        scheme = stored_scheme(self._spec.quantization, self._forms[0].has_tensor, name)
        return scheme if scheme is not None and scheme.layout == "gguf" else None

    def _block_shapes(self, name: str, shape: Shape) -> list[Shape]:
        """Return the shapes, in bytes, of a tensor in the blocks of the types that are kept as that of the file."""
        scheme = self._gguf_scheme(name)
        return [] if scheme is None else [(shape[0], size) for size in types_by_row_bytes(scheme, shape[1])]

    def check(self, name: str, shape: Shape) -> bool:
        """Return whether the model has this tensor. If not, it is one that checkpoints may have, but nobody reads.

        Raises:
            InvalidInput: the model has no such tensor, or it has another shape.
        """
        expected = self._known.get(name)
        if expected is None:
            if self._is_ignored(name):
                return False
            raise InvalidInput(
                f"the model has no tensor {name!r}: names are those of the checkpoint, "
                f"such as {next(iter(self._known))!r}"
            )
        if shape not in expected:
            shapes = " or ".join(map(str, sorted(expected)))
            raise InvalidInput(f"tensor {name!r} has shape {shape}, but the model's has {shapes}")
        return True

    def check_numbers(self, name: str, tensor: Tensor) -> None:
        """Raise InvalidInput if numbers of this type can't replace those of the tensor `name`, which the model has."""
        scheme, stored = self._gguf_scheme(name), self._forms[0].stored
        if scheme is None:
            if tensor.dtype not in READABLE and (not self.is_quantized or self._is_gguf):
                raise InvalidInput(f"tensor {name!r} has type {tensor.dtype}: expected float32, bfloat16 or float16")
            return
        types = types_by_row_bytes(scheme, stored[name][1])
        blocks = f"blocks of {' or '.join(types.values())}, uint8{list(self._block_shapes(name, stored[name]))}"
        if (tensor.shape[1] in types) != (tensor.dtype == torch.uint8):
            raise InvalidInput(
                f"tensor {name!r} has type {tensor.dtype} and shape {tuple(tensor.shape)}: expected {blocks}"
            )
        if tensor.dtype != torch.uint8 and "integers" in self._setup.share.formats.stored:
            raise InvalidInput(
                f"tensor {name!r} has type {tensor.dtype}, and this engine keeps the integers of its GGUF file: send "
                f"{blocks}, as the package gguf quantizes the checkpoint's tensor, or start the engine from a file "
                "that isn't quantized"
            )

    def note_change(self) -> None:
        """Note that weights change, now or when what has come is complete."""
        self._model.num_changes += 1

    def given(self, tensors: Mapping[str, Tensor]) -> GivenTensors:
        """Return what reads tensors of an update, which `check` and `check_numbers` have accepted."""
        found: dict[str, Tensor | GgufSlice] = dict(tensors)
        for name, tensor in tensors.items():
            scheme = self._gguf_scheme(name)
            if scheme is not None and tensor.dtype == torch.uint8:
                found[name] = given_blocks(tensor, scheme, self._forms[0].stored[name][1])
        return GivenTensors(found)

    def replace(self, unit: WeightUnit, form: int, reader: CheckpointReader) -> None:
        """Make a unit anew of the tensors that `reader` has, and put it in the place of the old one."""
        replace_weights(self._current(unit), self._made(unit, form, reader))

    def replace_given(self, unit: WeightUnit, tensors: Mapping[str, Tensor]) -> None:
        """Change what depends on these tensors of a unit, and keep all else.

        Raises:
            InvalidInput: numbers that are stored depend on others of its tensors, too. Nothing has changed.
        """
        form, missing = unit.nearest_form(tensors.keys())
        needs = unit.needs[form]
        odd = [name for name in tensors if name not in needs]
        if odd:
            raise InvalidInput(f"the update has experts in two formats, stacked and one by one: {odd[0]}")
        if self.is_quantized:
            raise InvalidInput(_lacks(missing, "the checkpoint's weights are quantized, so layers come as a whole"))

        def make(given: float | None, others: float) -> object:
            constants = {name: others if name in missing else given for name in needs}
            return self._made(
                unit,
                form,
                GivenTensors(
                    {
                        name: tensors[name] if number is None else torch.full((), number).expand(needs[name])
                        for name, number in constants.items()
                    }
                ),
                shortens=False,
            )

        try:
            replace_given(self._current(unit), make)
        except MixedNumbers as error:
            raise InvalidInput(
                _lacks(missing, f"{unit.label} stores numbers that are made of them and of others ({error})")
            ) from error

    def _current(self, unit: WeightUnit) -> object:
        stage, parts = unit.share.stage, self._model.network.weight_parts
        if unit.layout is _tower:
            return self._model.tower
        assert stage is not None
        if stage.layers:
            return parts.layers[stage.layers.start - self._setup.stage.layers.start]
        return parts.outside_layers

    def _made(self, unit: WeightUnit, form: int, reader: CheckpointReader, *, shortens: bool = True) -> object:
        has_tensor = self._forms[form].has_tensor
        share = replace(unit.share, gathers=unit.share.device.type == "cpu" and not self.is_quantized)
        fill = CheckpointFill(reader, None, self._spec.quantization)
        with torch.inference_mode(False):  # the threads that fill weights have no such mode
            if share.gathers and not self._spec.has_experts:
                weights = unit.layout(share, has_tensor, fill)  # there is too little to copy for threads
            else:
                num_threads = None if share.device.type == "cpu" else 1
                weights = fill_weights(lambda submit: unit.layout(share, has_tensor, submit), fill, None, num_threads)
        stage = unit.share.stage
        if unit.layout is _tower:
            return self._model.tower_like(self._setup, weights, shortens=shortens)
        assert stage is not None
        parts = self._model.made_like(self._setup, weights, stage, shortens=shortens).weight_parts
        return parts.layers[0] if stage.layers else parts.outside_layers

    def reload(self) -> None:
        """Replace all units by those of the checkpoint's files.

        Raises:
            InvalidCheckpoint: a tensor is missing, or has another shape. Nothing has changed.
        """
        assert self._path is not None
        with CheckpointReader(self._path) as reader:
            for unit in self.all:
                for name, shape in unit.needs[0].items():
                    if reader.shape(name) != shape:
                        raise wrong_shape(reader.describe(name), reader.shape(name), shape)
            self.note_change()
            for unit in self.all:
                self.replace(unit, 0, reader)
        self.refresh()

    def refresh(self) -> None:
        """Make anew what attention has made of weights."""
        for made, remade in self._model.copies.remade():
            replace_weights(made, remade)

    def _shares(self, whole: WeightShare) -> Iterator[tuple[str, WeightShare, Layout]]:
        """Yield the parts that a share consists of, with what allocates them."""
        spec, layers = whole.spec, whole.layers
        outside = replace(whole, spec=msgspec.structs.replace(spec, vision=None), embeds=False)
        none = range(layers.start, layers.start)
        parts = [(whole.has_embedding, False), (False, whole.has_head)]
        if all((whole.has_embedding, whole.has_head, spec.tie_word_embeddings)):
            parts = [(True, True)]  # they are one object
        for is_first, is_last in parts:
            if is_first or is_last:
                names = "embedding and head" if is_first and is_last else "embedding" if is_first else "head"
                yield names, replace(outside, stage=Stage(none, is_first, is_last)), _decoder
        if spec.vision is not None and whole.is_first:
            yield "encoder of images", whole, _tower
        for layer in layers:
            stage = Stage(range(layer, layer + 1), is_first=False, is_last=False)
            yield f"layer {layer}", replace(whole, stage=stage, embeds=False), _decoder

    def _is_ignored(self, name: str) -> bool:
        is_tied_head = self._spec.tie_word_embeddings and name == self._spec.names.head
        return is_tied_head or name.endswith(_NOT_WEIGHTS) or self._forms[0].has_tensor(name)


def _lacks(missing: list[str], reason: str) -> str:
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    return f"the update lacks tensors: {', '.join(missing[:_MAX_NAMED])}{more}: {reason}"


def _decoder(share: WeightShare, has_tensor: HasTensor, fill: Fill) -> Any:
    return RankLayout(share, has_tensor, fill).decoder()


def _tower(share: WeightShare, has_tensor: HasTensor, fill: Fill) -> Any:
    from raycore.parts.images.weights import vision_weights  # imported lazily: most models have none

    assert share.spec.vision is not None
    return vision_weights(share, share.spec.vision, fill)
