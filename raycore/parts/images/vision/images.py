"""The embeddings of images that a worker keeps, and what a step does with them.

Shape suffixes: T tokens of the step, I those of an image, D hidden size, W everything that the encoder returns for one
token: an embedding, then those of deepstack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.messages import EncoderPlan, Feature
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.images.models import VisionSpec
from raycore.parts.images.vision.tower import Tower
from raycore.profile_session import ProfiledParts
from raycore.step.feature_values import values_of
from raycore.step.features import FeatureRows


class EmbeddingsElsewhere(Protocol):
    """Where embeddings are kept, too, by names of images and encoders: `parts/transfers/connectors/embeddings.py`."""

    def load(self, name: str, num_bytes: int) -> NDArray[np.uint8] | None:
        """Return the embeddings of an image, as bytes. None: they aren't there."""
        ...

    def save(self, name: str, data: NDArray[np.uint8]) -> None:
        """Keep a copy."""
        ...


class Images:
    """Encodes images, and puts their embeddings where their tokens are. The scheduler decides what is kept."""

    def __init__(
        self,
        spec: VisionSpec,
        tower: Tower,
        num_weights: int,
        dtype: torch.dtype,
        device: torch.device,
        store: EmbeddingsElsewhere | None = None,
        ranks: TensorParallel | None = None,
    ) -> None:
        """
        Args:
            num_weights: number of multiplications of the tower for one patch, without those of attention.
            dtype: of hidden states.
            store: where embeddings are kept besides. None: nowhere.
            ranks: those that encode together, and therefore have to load or encode together, too.
        """
        self._store = store
        self._ranks = ranks or TensorParallel()
        self.num_weights = num_weights
        self._spec = spec
        self._tower = tower
        self._dtype = dtype
        self._device = device
        self._kept: dict[str, Tensor] = {}
        """By the images' identifiers, [I, W]."""

    def parts(self) -> ProfiledParts:
        """The parts of a step, for profiles."""
        yield self, {"_encode": "encode_image"}

    def num_patches(self, plan: EncoderPlan) -> int:
        """How many patches a step encodes."""
        return sum(each.num_tokens for each, _ in plan.inputs) * self._spec.patches_per_token

    def apply(self, plan: EncoderPlan) -> None:
        """Drop embeddings, and compute others, one image after the other: none depends on what else is encoded."""
        for identifier in plan.freed:
            self._kept.pop(identifier, None)
        for feature, data in plan.inputs:
            values = values_of(data)
            if data.is_embedding:
                self._kept[feature.identifier] = self._given(values)
            elif self._store is None:
                self._kept[feature.identifier] = self._encode(values, feature)
            else:
                name = f"{plan.identity.hex()} {feature.identifier}"
                self._kept[feature.identifier] = self._load_or_encode(self._store, name, values, feature)

    def merged(self, h_TD: Tensor, rows: Sequence[FeatureRows]) -> Tensor:
        """Put embeddings into the step's hidden states before the first layer, in place."""
        for each in rows:
            h_TD[each.row : each.row + each.num_rows] = self._part(each)[:, : self._spec.out_size]
        return h_TD

    def deepstack(self, rows: Sequence[FeatureRows]) -> Mapping[int, Callable[[Tensor], None]]:
        """By layer of the model: what adds further embeddings to the layer's input, hidden states [T, D], in place."""
        num_layers = len(self._spec.deepstack_layers)
        return {layer + 1: partial(self._add, rows, layer + 1) for layer in range(num_layers)}

    def _add(self, rows: Sequence[FeatureRows], index: int, h_TD: Tensor) -> None:
        size = self._spec.out_size
        for each in rows:
            h_TD[each.row : each.row + each.num_rows] += self._part(each)[:, index * size : (index + 1) * size]

    def _part(self, rows: FeatureRows) -> Tensor:
        return self._kept[rows.identifier][rows.start : rows.start + rows.num_rows]

    def _load_or_encode(self, store: EmbeddingsElsewhere, name: str, values: Tensor, feature: Feature) -> Tensor:
        """Load embeddings, if all ranks can. Otherwise encode the image, and save them."""
        width = self._spec.embedding_width
        found = store.load(name, feature.num_tokens * width * self._dtype.itemsize)
        if self._ranks.size > 1:
            have = self._ranks.all_reduce_(torch.full((1,), float(found is not None), device=self._device))
            found = found if int(have.item()) == self._ranks.size else None
        if found is not None:
            return torch.as_tensor(np.array(found)).view(self._dtype).view(-1, width).to(self._device)
        out_IW = self._encode(values, feature)
        data: NDArray[np.uint8] = np.array(out_IW.cpu().contiguous().view(torch.uint8).ravel().numpy())
        store.save(name, data)
        return out_IW

    def _encode(self, values: Tensor, feature: Feature) -> Tensor:
        return self._tower(values.to(self._device), feature.grid).to(self._dtype)

    def _given(self, values_IX: Tensor) -> Tensor:
        """Return embeddings that a request has brought, on the device. Those of deepstack that are missing are 0."""
        out_IW = torch.zeros(len(values_IX), self._spec.embedding_width, dtype=self._dtype, device=self._device)
        out_IW[:, : values_IX.shape[1]] = values_IX.to(self._device, self._dtype)
        return out_IW
