"""One tensor-parallel rank's part of a LoRA adapter's matrices, arranged like the rank's fused linear layers.

A rank computes `(x · Aᵀ) · Bᵀ` for its inputs x of a linear layer, and adds it to the layer's outputs. A layer that is
divided by rows (`qkv`, `gate_up`) has all its inputs on every rank, so a rank has all of A and its rows of B. A layer
that is divided by columns (`o`, `down`) has a part of its inputs on each rank, so a rank has its columns of A and all
of B, and the ranks add up `x · Aᵀ`.

Shape suffixes: R rank of an adapter, or the sum of several, I this rank's inputs, O this rank's outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from raycore.checkpoint.gguf.adapter import read_gguf_adapter
from raycore.checkpoint.gguf.header import is_gguf
from raycore.checkpoint.weight_files import read_headers
from raycore.errors import InvalidAdapter, InvalidCheckpoint
from raycore.models.linears import FusedLinear
from raycore.models.rows import Rows
from raycore.parts.adapters.checkpoint.spec import ADAPTER_FILE, LoraProjection, LoraSpec
from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.weights.share import WeightShare


@dataclass(frozen=True)
class LoraPart:
    """An adapter's part for one projection of a fused layer, on one rank."""

    first_row: int
    """The first of this part's rows of `LoraLinear.a_RI`."""
    rank: int
    """Number of these rows."""
    first_output: int
    """The first of this part's outputs among those of the fused layer on this rank."""
    b_RO: Tensor
    """Bᵀ, [`rank`, outputs of the projection on this rank], already multiplied by the scaling. Contiguous.

    The outputs are in the checkpoint's order. A decoder that has reordered the heads of queries and keys in its own
    weights has to reorder these columns, too."""


@dataclass(frozen=True)
class LoraLinear:
    """An adapter's part for one fused linear layer, on one rank."""

    a_RI: Tensor
    """The matrices A of all parts, one below the other: [sum of ranks, inputs on this rank]."""
    parts: tuple[LoraPart, ...]
    """In the order of the projections in the fused layer. Projections that the adapter doesn't change are absent."""


@dataclass(frozen=True)
class LoraWeights:
    """An adapter's part for a decoder, or for one stage of it, on one rank."""

    layers: list[dict[str, LoraLinear]]
    """The stage's layers: the linear layers that the adapter changes. Empty in a network of transformers."""
    named: dict[str, LoraLinear] = field(default_factory=dict[str, LoraLinear])
    """By name, the linear layers in a network of transformers. Those that the adapter doesn't change are absent."""


def load_lora_weights(share: WeightShare, lora: LoraSpec, path: Path) -> LoraWeights:
    """Read the part of the adapter in the directory or file `path` that belongs to a share of the model's weights.

    `lora`: what `LoraSpec.read` returned for this path and model.

    Raises:
        InvalidAdapter: the file is missing or damaged, isn't the one that `lora` describes, or has numbers that are
            infinite or NaN.
    """
    path = path.expanduser()
    file = path if is_gguf(path) else path / ADAPTER_FILE
    try:
        tensors = read_gguf_adapter(file, share.spec).tensors if is_gguf(path) else read_headers([file])
        with CheckpointReader(path, tensors) as reader:
            loader = _Loader(share, lora, file, reader)
            if share.spec.implementation == "transformers":
                return LoraWeights(
                    [], {name: loader.named(name) for name in share.spec.linears if name in lora.modules}
                )
            return LoraWeights([loader.layer(index) for index in share.layers])
    except InvalidCheckpoint as error:
        raise InvalidAdapter(f"the adapter has changed since its description was read: {error}") from error


def largest_lora_bytes(share: WeightShare, max_rank: int) -> int:
    """Return how many bytes the share's part of an adapter takes that changes all projections of all layers."""
    if share.spec.implementation == "transformers":
        parts = [shape.rows(share.tp_rank, share.tp_size) for shape in share.spec.linears.values()]
        return max_rank * sum(outputs.num + inputs.num for outputs, inputs in parts) * share.dtype.itemsize
    numbers = sum(
        outputs.num + linear.inputs.num
        for layer in share.layers
        for linear in _linears(share, layer).values()
        for outputs in linear.outputs
    )
    return max_rank * numbers * share.dtype.itemsize


def _linears(share: WeightShare, layer: int) -> dict[str, FusedLinear]:
    """Return the linear layers of a layer of the model that adapters may change, by what they are called there."""
    spec, of_rank = share.spec, (share.tp_rank, share.tp_size)
    mixer, feed_forward = spec.mixers[layer], spec.feed_forwards[layer]
    return mixer.adapted_linears(spec, *of_rank) | feed_forward.adapted_linears(spec, *of_rank)


class _Loader:
    def __init__(self, share: WeightShare, lora: LoraSpec, file: Path, reader: CheckpointReader) -> None:
        self._share = share
        self._modules = lora.modules
        self._file = file
        self._reader = reader

    def layer(self, index: int) -> dict[str, LoraLinear]:
        found: dict[str, LoraLinear] = {}
        for name, linear in _linears(self._share, index).items():
            own = self._linear(index, linear)
            if own is not None:
                found[name] = own
        return found

    def named(self, name: str) -> LoraLinear:
        """Return the part for a linear layer that the adapter changes in a network of transformers."""
        module, share = self._modules[name], self._share
        outputs, inputs = share.spec.linears[name].rows(share.tp_rank, share.tp_size)
        return LoraLinear(self._a(module, inputs), (LoraPart(0, module.rank, 0, self._b(module, outputs)),))

    def _linear(self, layer: int, own: FusedLinear) -> LoraLinear | None:
        """Return the part for a fused layer. None: the adapter doesn't change it."""
        all_a_RI: list[Tensor] = []
        parts: list[LoraPart] = []
        first_row = first_output = 0
        for rows in own.outputs:
            module = self._modules.get((layer, rows.name))
            if module is not None:
                all_a_RI.append(self._a(module, own.inputs))
                parts.append(LoraPart(first_row, module.rank, first_output, self._b(module, rows)))
                first_row += module.rank
            first_output += rows.num
        return LoraLinear(torch.cat(all_a_RI), tuple(parts)) if parts else None

    def _a(self, module: LoraProjection, inputs: Rows) -> Tensor:
        whole = slice(None)
        a_RI = self._reader.view(module.a_name, (module.rank, inputs.total), (whole, inputs.part))
        return self._converted(a_RI, module.a_name)

    def _b(self, module: LoraProjection, outputs: Rows) -> Tensor:
        b_OR = self._reader.view(module.b_name, (outputs.num_stored, module.rank), (outputs.stored_part,))
        return self._converted((b_OR.float() * module.scaling).t().contiguous(), module.b_name)

    def _converted(self, matrix: Tensor, name: str) -> Tensor:
        converted = matrix.to(self._share.dtype)
        if not converted.isfinite().all():
            dtype = str(self._share.dtype).removeprefix("torch.")
            raise InvalidAdapter(f"{self._file}: {name} has numbers that are infinite or NaN in {dtype}")
        return converted.to(self._share.device)
