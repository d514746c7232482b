"""The description of a head that a model's own checkpoint has. Does not import torch.

The head has a layer as the model's, without what only the model has: states, images, other layers. It uses the model's
embedding and its head for tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from raycore.models.spec import ModelSpec
from raycore.parts.drafts.models import MtpNames


class MtpTensors(NamedTuple):
    """The names of a head's tensors that aren't its layer's, without `.weight`, and how those of its layer begin."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    copies: tuple[str, ...]

    @property
    def own(self) -> tuple[str, str]:
        """How the names of all its tensors begin."""
        return self.layer, self.projection.rsplit(".", 1)[0] + "."


class MtpSpec(msgspec.Struct, frozen=True, tag=True):
    """What a head has beyond the sizes of its layer."""

    names: MtpNames
    num_target_layers: int

    @property
    def target_layers(self) -> list[int]:
        """What it reads of the target: the final hidden states, as `Taps` number them."""
        return [self.num_target_layers]

    def tensors(self, spec: ModelSpec) -> MtpTensors:
        """Return the names of its tensors. `spec`: its layer, with the names of the model's tensors."""
        names = self.names
        layer = spec.names.layer(self.num_target_layers) if names.layer is None else names.layer
        others = layer if names.others is None else names.others
        return MtpTensors(
            layer=layer,
            embedding_norm=others + names.embedding_norm,
            hidden_norm=others + names.hidden_norm,
            projection=others + names.projection,
            final_norm=others + names.final_norm,
            copies=tuple(others + each for each in names.copies),
        )

    def has_tensor(self, spec: ModelSpec, has_tensor: Callable[[str], bool]) -> Callable[[str], bool]:
        """Return whether the checkpoint has a tensor, for parts of `spec` that ask for it as one of the first layer."""
        first, own = spec.names.layer(0), self.tensors(spec).layer
        return lambda name: has_tensor(own + name.removeprefix(first) if name.startswith(first) else name)


def mtp_spec(target: ModelSpec) -> tuple[ModelSpec, MtpSpec] | None:
    """Return the sizes of the layer of the head that `target` has, and the rest. None: it has none."""
    if target.mtp is None:
        return None
    moe = target.moe
    spec = msgspec.structs.replace(
        target,
        num_layers=1,
        layer_windows=[None],
        layer_heads=target.layer_heads[-1:],
        layer_gates=target.layer_gates[-1:],
        rotations=target.rotations[-1:],
        state=None,
        parts_alone=[],
        moe=None if moe is None else msgspec.structs.replace(moe, sparse_layers=[True]),
        vision=None,
        num_predictors=0,
        mtp=None,
    )
    return spec, MtpSpec(target.mtp, target.num_layers)
