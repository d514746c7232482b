"""The description of a head that a model's own checkpoint has. Does not import torch.

The head has layers as the model's, without what only the model has: states, images, other layers. It uses the model's
embedding and its head for tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from raycore.models.spec import ModelSpec
from raycore.parts.drafts.models import MtpNames
from raycore.parts.images.models import without_vision


class MtpTensors(NamedTuple):
    """The names of the tensors of one layer of a head that aren't those of a model's layer, without `.weight`, and how
    the others begin."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    copies: tuple[str, ...]
    shared: str
    """How the names begin that layers of the head share. Empty: no such beginning is the head's alone."""

    @property
    def own(self) -> tuple[str, ...]:
        """How the names of all its tensors begin, but for a norm that is the model's."""
        others = (self.embedding_norm, self.hidden_norm, self.projection)
        return (self.layer, *(f"{each}." for each in others), *([self.shared] if self.shared else []))


class MtpSpec(msgspec.Struct, frozen=True, tag=True):
    """What a head has beyond the sizes of its layers."""

    names: MtpNames
    num_target_layers: int
    num_layers: int = 1
    """How many layers draft, one after the other."""

    @property
    def target_layers(self) -> list[int]:
        """What it reads of the target: the final hidden states, as `Taps` number them."""
        return [self.num_target_layers + self.names.reads_normed]

    def tensors(
        self, spec: ModelSpec, has_tensor: Callable[[str], bool] = lambda name: False, index: int = 0
    ) -> MtpTensors:
        """Return the names of a layer's tensors.

        Args:
            spec: of its layers, with the names of the model's tensors.
            has_tensor: whether the checkpoint has a tensor.
            index: of the layer, in the head.
        """
        names = self.names
        beyond = spec.names.layer(self.num_target_layers + index)
        layer = beyond if names.layer is None else names.layer.format(index)
        others = layer if names.others is None else names.others.format(index)
        final_norms = [f"{others}{each.format(index)}" for each in names.final_norms] or [spec.names.final_norm]
        return MtpTensors(
            layer=layer,
            embedding_norm=others + names.embedding_norm.format(index),
            hidden_norm=others + names.hidden_norm.format(index),
            projection=others + names.projection.format(index),
            final_norm=next((each for each in final_norms if has_tensor(f"{each}.weight")), final_norms[0]),
            copies=tuple(others + each for each in names.copies),
            shared="" if spec.names.embedding.startswith(others) else others,
        )

    def own_tensors(self, spec: ModelSpec) -> tuple[str, ...]:
        """Return how the names of the tensors of all layers begin, without the copies of the model's."""
        return tuple(each for index in range(self.num_layers) for each in self.tensors(spec, index=index).own)

    def copies(self, spec: ModelSpec) -> tuple[str, ...]:
        """Return how the names of the copies of the model's tensors begin."""
        of_layers = (self.tensors(spec, index=index).copies for index in range(self.num_layers))
        return tuple(f"{each}." for copies in of_layers for each in copies)

    def has_tensor(self, spec: ModelSpec, has_tensor: Callable[[str], bool]) -> Callable[[str], bool]:
        """Return whether the checkpoint has a tensor, for parts of `spec` that ask for it as one of the first layer."""
        first, own = spec.names.layer(0), self.tensors(spec).layer
        return lambda name: has_tensor(own + name.removeprefix(first) if name.startswith(first) else name)


def mtp_spec(target: ModelSpec, max_layers: int = 1) -> tuple[ModelSpec, MtpSpec] | None:
    """Return the sizes of the layers of the head that `target` has, and the rest. None: it has none.

    `max_layers`: how many of its layers are used, at most.
    """
    mtp = target.mtp
    if mtp is None:
        return None
    num, like, names = min(max_layers, target.num_predictors), _layer_like(target, mtp), target.names
    moe = target.moe if mtp.is_sparse else None
    if mtp.before_feed_forward is not None:
        names = msgspec.structs.replace(names, before_feed_forward=mtp.before_feed_forward)
    spec = msgspec.structs.replace(
        target,
        num_layers=num,
        layer_windows=[target.layer_windows[like] if mtp.has_window else None] * num,
        layer_heads=target.layer_heads[like : like + 1] * num,
        layer_gates=[],
        rotations=[target.rotations[like]] * num,
        sums=target.sums[like : like + 1] * num,
        state=None,
        parts_alone=[],
        moe=None if moe is None else msgspec.structs.replace(moe, sparse_layers=[True] * num),
        num_predictors=0,
        mtp=None,
        names=names,
    )
    return without_vision(spec), MtpSpec(mtp, target.num_layers, num)


def _layer_like(target: ModelSpec, mtp: MtpNames) -> int:
    """Return the target's layer whose attention is as that of the head: the last one with a window, or without."""
    windows = target.layer_windows
    alike = [layer for layer, window in enumerate(windows) if (window is not None) == mtp.has_window]
    return alike[-1] if alike else target.num_layers - 1
