"""One tensor-parallel rank's part of a LoRA adapter's matrices, arranged like the rank's fused linear layers.

A rank computes `(x · Aᵀ) · Bᵀ` for its inputs x of a linear layer, and adds it to the layer's outputs. A layer that is
divided by rows (`qkv`, `gate_up`) has all its inputs on every rank, so a rank has all of A and its rows of B. A layer
that is divided by columns (`o`, `down`) has a part of its inputs on each rank, so a rank has its columns of A and all
of B, and the ranks add up `x · Aᵀ`.

Shape suffixes: R rank of an adapter, or the sum of several, I this rank's inputs, O this rank's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from raycore.checkpoint.gguf.adapter import read_gguf_adapter
from raycore.checkpoint.gguf.header import is_gguf
from raycore.checkpoint.lora_spec import ADAPTER_FILE, LoraModule, LoraSpec
from raycore.checkpoint.rank_rows import Rows, linear_rows
from raycore.checkpoint.weight_files import read_headers
from raycore.errors import InvalidAdapter, InvalidCheckpoint
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
class LoraLayerWeights:
    """An adapter's part for one decoder layer, on one rank. None: the adapter doesn't change that linear layer."""

    qkv: LoraLinear | None
    o: LoraLinear | None
    gate_up: LoraLinear | None
    down: LoraLinear | None
    q_b: LoraLinear | None = None
    """Of latent attention, whose `qkv` is the first layer."""


@dataclass(frozen=True)
class LoraWeights:
    """An adapter's part for a decoder, or for one stage of it, on one rank."""

    layers: list[LoraLayerWeights]
    """The stage's layers, also those that the adapter doesn't change. Empty in a network of transformers."""
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
        parts = [linear_rows(shape, share.tp_rank, share.tp_size) for shape in share.spec.linears.values()]
        return max_rank * sum(outputs.num + inputs.num for outputs, inputs in parts) * share.dtype.itemsize
    rows, hidden, latent = share.rows, share.spec.hidden_size, share.spec.latent
    first, read_by_o = rows.qkv, rows.heads.num
    inputs = outputs = 0
    if latent is not None:
        own = share.latent_rows
        first, read_by_o = own.inputs, own.values.num
        if own.q_b is not None and latent.query_rank is not None:
            inputs, outputs = latent.query_rank, own.q_b.num
    inputs += len(first) * hidden + read_by_o + len(rows.gate_up) * hidden + rows.gate.num
    outputs += sum(each.num for each in (*first, *rows.gate_up)) + 2 * hidden
    return len(share.layers) * max_rank * (inputs + outputs) * share.dtype.itemsize


class _Loader:
    def __init__(self, share: WeightShare, lora: LoraSpec, file: Path, reader: CheckpointReader) -> None:
        self._share = share
        self._modules = lora.modules
        self._file = file
        self._reader = reader

    def layer(self, index: int) -> LoraLayerWeights:
        rows, size, latent = self._share.rows, self._share.spec.hidden_size, self._share.spec.latent
        hidden = Rows("", size, 0, size)
        first, read_by_o, q_b = rows.qkv, rows.heads, None
        if latent is not None:
            own = self._share.latent_rows
            first, read_by_o = own.inputs, own.values
            if own.q_b is not None and latent.query_rank is not None:
                q_b = self._linear(index, [own.q_b], Rows("", latent.query_rank, 0, latent.query_rank))
        return LoraLayerWeights(
            qkv=self._linear(index, first, hidden),
            o=self._linear(index, [hidden._replace(name=self._share.spec.names.o)], read_by_o),
            gate_up=self._linear(index, rows.gate_up, hidden),
            down=self._linear(index, [hidden._replace(name=self._share.spec.names.down)], rows.gate),
            q_b=q_b,
        )

    def named(self, name: str) -> LoraLinear:
        """Return the part for a linear layer that the adapter changes in a network of transformers."""
        module, share = self._modules[name], self._share
        outputs, inputs = linear_rows(share.spec.linears[name], share.tp_rank, share.tp_size)
        return LoraLinear(self._a(module, inputs), (LoraPart(0, module.rank, 0, self._b(module, outputs)),))

    def _linear(self, layer: int, outputs: Sequence[Rows], inputs: Rows) -> LoraLinear | None:
        """Return the part for a fused layer.

        Args:
            outputs: of each of its projections, those on this rank.
            inputs: those on this rank.
        """
        all_a_RI: list[Tensor] = []
        parts: list[LoraPart] = []
        first_row = first_output = 0
        for rows in outputs:
            module = self._modules.get((layer, rows.name))
            if module is not None:
                all_a_RI.append(self._a(module, inputs))
                parts.append(LoraPart(first_row, module.rank, first_output, self._b(module, rows)))
                first_row += module.rank
            first_output += rows.num
        return LoraLinear(torch.cat(all_a_RI), tuple(parts)) if parts else None

    def _a(self, module: LoraModule, inputs: Rows) -> Tensor:
        whole = slice(None)
        a_RI = self._reader.view(module.a_name, (module.rank, inputs.total), (whole, inputs.part))
        return self._converted(a_RI, module.a_name)

    def _b(self, module: LoraModule, outputs: Rows) -> Tensor:
        b_OR = self._reader.view(module.b_name, (outputs.num_stored, module.rank), (outputs.stored_part,))
        return self._converted((b_OR.float() * module.scaling).t().contiguous(), module.b_name)

    def _converted(self, matrix: Tensor, name: str) -> Tensor:
        converted = matrix.to(self._share.dtype)
        if not converted.isfinite().all():
            dtype = str(self._share.dtype).removeprefix("torch.")
            raise InvalidAdapter(f"{self._file}: {name} has numbers that are infinite or NaN in {dtype}")
        return converted.to(self._share.device)
