"""Which tensors of a checkpoint each part of a model is made of, for updates that bring some of them.

A plan is made by the code that reads checkpoints, with a fill that notes what it is asked for. It needs no memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from raycore.checkpoint.weight_files import stored_tensors
from raycore.errors import InvalidCheckpoint
from raycore.models.feed_forward import HasTensor
from raycore.models.quantization import stored_scheme
from raycore.models.spec import ModelSpec
from raycore.parts.experts.models import MXFP4_NUMBERS, MXFP4_SCALES
from raycore.weights.share import WeightShare
from raycore.weights.weight import Fill, Part, Weight

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""By name: the shapes of a checkpoint's whole tensors."""
Layout = Callable[[WeightShare, HasTensor, Fill], Any]
"""Allocates a share's weights, as `RankLayout.decoder` does."""


@dataclass(frozen=True)
class CheckpointForm:
    """A form in which tensors come: that of the files, or another one of the feed-forward parts."""

    spec: ModelSpec
    has_tensor: HasTensor
    stored: Shapes
    """What the files have. Empty: there are none, and nothing is quantized."""

    def needs(self, layout: Layout, share: WeightShare) -> dict[str, Shape]:
        """Return the tensors that weights of a share are made of."""
        asked: dict[str, Shape] = {}

        def note(out: Weight, name: str, expected_shape: Shape, part: Part) -> None:
            asked[name] = expected_shape

        layout(replace(share, device=torch.device("meta")), self.has_tensor, note)
        found: dict[str, Shape] = {}
        for name, shape in asked.items():
            found |= self._stored_as(name, shape, asked)
        return found

    def _stored_as(self, name: str, shape: Shape, asked: Shapes) -> dict[str, Shape]:
        """Return the tensors in which a weight is stored: one, or those of its quantized form."""
        if self.has_tensor(name + MXFP4_NUMBERS):
            return {each: self.stored[each] for each in (name + MXFP4_NUMBERS, name + MXFP4_SCALES)}
        if stored_scheme(self.spec.quantization, self.has_tensor, name) is None:
            return {name: shape}
        own = self._of_layer[name.rpartition(".")[0]]
        return {each: self.stored[each] for each in own if each == name or each not in asked}

    @cached_property
    def _of_layer(self) -> Mapping[str, list[str]]:
        """The names of the files' tensors, by what is before their last dots."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for name in self.stored:
            found[name.rpartition(".")[0]].append(name)
        return found


def checkpoint_forms(spec: ModelSpec, path: Path | None) -> list[CheckpointForm]:
    """Return the forms in which a model's tensors may come. The first one is that of the files.

    `path`: the checkpoint's directory. None: its tensors aren't read from files.
    """
    stored = {} if path is None else {name: tensor.shape for name, tensor in stored_tensors(path).items()}
    if spec.quantization is not None and not stored:
        raise InvalidCheckpoint(
            f"the weights of this {spec.architecture} are quantized, and its files aren't there to tell their tensors: "
            "updates need the checkpoint's files"
        )
    forms = [CheckpointForm(spec, stored.__contains__, stored)]
    if spec.quantization is None:
        others = (kind.other_forms(spec, stored.__contains__) for kind in spec.feed_forward_kinds)
        forms += [CheckpointForm(spec, has_tensor, {}) for own in others for has_tensor in own]
    return forms
