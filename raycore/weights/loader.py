"""One tensor-parallel rank's weights of a decoder, read from a checkpoint or random.

This module knows the names of the tensors in checkpoints, how tensors are fused, and which part of each tensor a rank
holds. Each part is converted and copied directly to its place in the rank's weights, so a rank never holds more than
its own weights; `fill` does that. Shape suffixes: V this rank's rows of the padded vocabulary, D hidden size, O this
rank's query, key and value rows, H elements of a head, F this rank's rows of the feed-forward layer (2F where gate and
up are fused). Experts are in `raycore.parts.experts.weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from raycore.class_paths import import_path
from raycore.models.layer_part import LayerPart, PartTensor
from raycore.models.linears import FusedLinear
from raycore.models.quantization import WeightScheme, stored_scheme
from raycore.models.rows import Rows
from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.weights.fill import CheckpointFill, RandomFill
from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.gathered import GatheredRows
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight, kept_group_size
from raycore.weights.layer_part_weights import LayerPartWeights
from raycore.weights.share import WeightShare
from raycore.weights.staging import NUM_READERS, Staging
from raycore.weights.weight import Fill, Part, Weight

Progress = Callable[[int, int], None]
"""Called with (tensors filled, tensors in total) after each tensor."""

_WeightsT = TypeVar("_WeightsT")


@dataclass
class LayerWeights:
    """The weights of one decoder layer on one rank."""

    before_attention_D: torch.Tensor | None
    """Weights of norms are None where the layer has no such norm: see `TensorNames`. They are [2, D] where norms have a
    bias, which is the second row, and [0, D] where they have no weights."""
    mixer: LayerPartWeights
    after_attention_D: torch.Tensor | None
    before_feed_forward_D: torch.Tensor | None
    after_feed_forward_D: torch.Tensor | None
    feed_forward: LayerPartWeights


@dataclass
class DecoderWeights:
    """The weights of a decoder, or of one stage of it, on one rank."""

    embed_VD: torch.Tensor | IntegerWeight | None
    """None after the first stage, and where only images are encoded. In integers only where the stage has the head,
    too, and they are tied."""
    lm_head_VD: torch.Tensor | IntegerWeight | None
    """None before the last stage, of a model that pools, and where only images are encoded. The same object as
    `embed_VD` if the stage has both, and the checkpoint ties them."""
    vocab_start: int
    """Token id of the first row of `embed_VD` and `lm_head_VD`. Rows past the vocabulary's end are zero."""
    final_norm_D: torch.Tensor | None
    """None before the last stage, and where only images are encoded."""
    layers: list[LayerWeights]
    """The stage's layers."""
    head_bias_V: torch.Tensor | None = None
    """None before the last stage, and where the head has no bias."""
    layer_inputs: LayerPartWeights | None = None
    """None: see `Parts.layer_inputs`, or the stage isn't the first."""
    vision: dict[str, torch.Tensor] | None = None
    """Those of the encoder of images, by the keys of `VisionTensor`. None: there is none, or the stage isn't the first.
    """


def load_decoder_weights(
    share: WeightShare, path: Path, progress: Progress | None = None, staging: Staging | None = None
) -> DecoderWeights:
    """Read a worker's share of the checkpoint at `path`, converted to the share's data type, to its device.

    Args:
        progress: called after each tensor.
        staging: brings tensors to the device. None: a new one for a GPU; a CPU needs none.

    Raises:
        InvalidCheckpoint: a file or a tensor is missing or damaged, or a shape isn't what the share's spec says.
    """
    return read_share(
        lambda has_tensor, fill: RankLayout(share, has_tensor, fill).decoder(), share, path, progress, staging
    )


def read_share(
    allocate: Callable[[Callable[[str], bool], Fill], _WeightsT],
    share: WeightShare,
    path: Path,
    progress: Progress | None = None,
    staging: Staging | None = None,
) -> _WeightsT:
    """Return what `allocate` does, which gets whether the checkpoint at `path` has a tensor, and the function that
    fills tensors from it. The other arguments and the errors are those of `load_decoder_weights`."""
    if staging is None and share.device.type != "cpu":
        staging = Staging(share.device)
    with CheckpointReader(path) as reader:
        weights = fill_weights(
            lambda fill: allocate(reader.__contains__, fill),
            CheckpointFill(reader, staging, share.spec.quantization),
            progress,
            None if staging is None else NUM_READERS,
        )
    if staging is not None:
        staging.finish()
    return weights


def random_decoder_weights(share: WeightShare, seed: int = 0) -> DecoderWeights:
    """Return a worker's share of a decoder with random weights, made on its device. Norms have weight 1.

    Each tensor is a function of `seed`, the tensor's name and the kind of device, and a rank gets its part of that
    tensor. So the model is the same for any `tp_size` and any stages, except for the rounding to fp8. The formats that
    the checkpoint stores are those that config.json names.
    """
    # on a GPU, several threads would only need more memory at a time
    num_threads = None if share.device.type == "cpu" else 1
    return fill_weights(
        lambda fill: RankLayout(share, has_no_tensor, fill).decoder(), RandomFill(seed), None, num_threads
    )


def empty_decoder_weights(share: WeightShare) -> DecoderWeights:
    """Allocate a worker's share of a decoder. Only the rows past the vocabulary's end are set, to zero."""

    def leave(out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None: ...

    return RankLayout(share, has_no_tensor, leave).decoder()


def has_no_tensor(name: str) -> bool:
    """What weights that no checkpoint has are allocated with."""
    return False


def fill_weights(
    allocate: Callable[[Fill], _WeightsT], fill: Fill, progress: Progress | None, num_threads: int | None
) -> _WeightsT:
    """Return what `allocate` does, which calls the function that it gets to have tensors filled by `fill`.

    `num_threads`: how many threads fill tensors. None: as many as torch uses.
    """
    pending: list[Future[None]] = []
    with one_thread_per_operation() as num_usual, ThreadPoolExecutor(num_threads or num_usual) as pool:

        def submit(out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None:
            pending.append(pool.submit(fill, out, name, expected_shape, part))

        # Allocate on this thread, fill on the pool's: a thread's malloc arena keeps memory that is freed after the
        # thread has ended.
        weights = allocate(submit)
        try:
            for num_done, future in enumerate(pending, start=1):
                future.result()
                if progress is not None:
                    progress(num_done, len(pending))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return weights


@contextmanager
def one_thread_per_operation() -> Generator[int]:
    """Set torch to one thread per operation, and yield the previous number of threads, for a thread pool.

    With the pool, each tensor is filled by one thread. If torch's threads share each tensor instead, each tensor ends
    in a barrier, which waits for a time slice if another process is busy. Filling 89 million parameters took 700 ms
    with torch's threads, and 50 ms with the pool.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


class RankLayout:
    """Allocates a rank's weights and has `fill` fill them, possibly after a method has returned."""

    def __init__(self, share: WeightShare, has_tensor: Callable[[str], bool], fill: Fill) -> None:
        """`has_tensor`: whether the checkpoint has a tensor of this name."""
        self._share = share
        self._spec = share.spec
        self._has_tensor = has_tensor
        self._fill = fill

    def decoder(self) -> DecoderWeights:
        """Return the stage's weights."""
        share, names = self._share, self._spec.names
        embed_VD, lm_head_VD = self._embedding_and_head()
        return DecoderWeights(
            embed_VD=embed_VD,
            lm_head_VD=lm_head_VD,
            vocab_start=share.vocab_start,
            final_norm_D=self.norm(names.final_norm) if share.has_head else None,
            layers=[self.layer(index, names.layer(index)) for index in share.layers],
            head_bias_V=self._vocabulary(names.head_bias) if share.has_head and self._spec.has_head_bias else None,
            layer_inputs=self._layer_inputs() if share.has_embedding else None,
            vision=self._vision() if self._spec.vision is not None and share.is_first else None,
        )

    def _layer_inputs(self) -> LayerPartWeights | None:
        part = self._spec.layer_inputs
        return None if part is None else self.part(part, self._spec.names.roots.model)

    def _vision(self) -> dict[str, torch.Tensor]:
        from raycore.parts.images.weights import vision_weights  # imported lazily: most models have none

        assert self._spec.vision is not None
        return vision_weights(self._share, self._spec.vision, self._fill)

    def _embedding_and_head(self) -> tuple[torch.Tensor | IntegerWeight | None, torch.Tensor | IntegerWeight | None]:
        share, spec, names = self._share, self._spec, self._spec.names
        has_head = share.has_head and spec.pooling is None
        if has_head and spec.tie_word_embeddings:
            lm_head_VD = self._head(names.embedding)
            return lm_head_VD if share.has_embedding else None, lm_head_VD
        embed_VD = self.vocabulary(names.embedding) if share.has_embedding else None
        return embed_VD, self._head(names.head) if has_head else None

    def _head(self, name: str) -> torch.Tensor | IntegerWeight:
        """Return this rank's rows of the head `name`: in integers if it is stored in a GGUF file's."""
        scheme, hidden = stored_scheme(self._spec.quantization, self._has_tensor, name), self._spec.hidden_size
        out_VD = None
        if scheme is not None and scheme.layout == "gguf" and "integers" in self._share.formats.stored:
            out_VD = self._empty_integers(scheme, self._share.num_vocab_rows, hidden, 0)
        if out_VD is None:
            return self.vocabulary(name)
        num_real = self._fill_vocabulary(out_VD, name, hidden)
        out_VD[num_real:].quantize_(torch.zeros(out_VD.shape[0] - num_real, hidden, device=out_VD.device))
        return out_VD

    def layer(self, index: int, prefix: str, num_inputs: int | None = None) -> LayerWeights:
        """Return a layer's weights.

        Args:
            prefix: of the tensors' names.
            num_inputs: of the query, key and value projections. None: the hidden size.
        """
        spec, norms = self._spec, self._spec.norms(index)
        return LayerWeights(
            before_attention_D=self._norm(prefix, norms.before_attention),
            mixer=self.part(spec.mixers[index], prefix, num_inputs),
            after_attention_D=self._norm(prefix, norms.after_attention),
            before_feed_forward_D=self._norm(prefix, norms.before_feed_forward),
            after_feed_forward_D=self._norm(prefix, norms.after_feed_forward),
            feed_forward=self.part(spec.feed_forwards[index].stored(spec, self._has_tensor), prefix),
        )

    def part(self, part: LayerPart, prefix: str, num_inputs: int | None = None) -> Any:
        """Return the weights of a part of a layer. The other arguments are those of `layer`."""
        share, made, inner = self._share, import_path(part.weights_class), part.inner(self._spec)
        if inner:
            return made(**{field: self.part(each, prefix, num_inputs) for field, each in inner.items()})
        of_rank = share.tp_rank, share.tp_size
        fields = self._linears(prefix, part.linears(self._spec, *of_rank, num_inputs))
        vectors = {each.field: self._parts(prefix, each) for each in part.vectors(self._spec, *of_rank)}
        return made(**fields, **vectors, **made.other_fields(part, prefix, share, self._has_tensor, self._fill))

    def _linears(self, prefix: str, linears: Iterable[FusedLinear]) -> dict[str, Any]:
        """Return the weights and biases of linear layers, by their fields."""
        found: dict[str, Weight] = {}
        for linear in linears:
            found[linear.field] = self._linear(prefix, linear)
            if linear.biased and (self._share.adds_biases or not linear.reads_divided):
                found[linear.bias_field] = self._bias(prefix, linear)
        return found

    def _linear(self, prefix: str, linear: FusedLinear) -> Weight:
        inputs, outputs = linear.inputs, linear.outputs
        if linear.is_plain:
            out_OI: Weight = self._share.empty(sum(part.num for part in outputs), inputs.num)
        else:
            names = [f"{prefix}{part.name}.weight" for part in outputs]
            out_OI = self._empty_weight(names, [part.num for part in outputs], inputs.num, inputs.part.start)
        if linear.reads_divided:
            (whole,) = outputs
            self._fill(out_OI, f"{prefix}{whole.name}.weight", (whole.total, inputs.total), (slice(None), inputs.part))
        else:
            self._fill_rows(out_OI, prefix, outputs, inputs.total)
        return out_OI

    def _bias(self, prefix: str, linear: FusedLinear) -> torch.Tensor:
        """Return the bias of a linear layer, in which some projections may have none."""
        out_O = self._share.empty(sum(part.num for part in linear.outputs))
        offset = 0
        for part in linear.outputs:
            own_O = out_O[offset : offset + part.num]
            if part.name in linear.biased:
                self._fill(own_O, f"{prefix}{part.name}.bias", (part.num_stored,), (part.stored_part,))
            else:
                own_O.zero_()
            offset += part.num
        return out_O

    def _parts(self, prefix: str, vector: PartTensor) -> torch.Tensor:
        num, dtype = sum(part.num for part in vector.parts), torch.float32 if vector.is_float32 else None
        out = self._share.empty(num, *vector.row, dtype=dtype)
        offset = 0
        for part in vector.parts:
            own = out[offset : offset + part.num]
            self._fill(own, f"{prefix}{part.name}", vector.stored_shape(part), vector.selects(part))
            offset += part.num
        return out

    def _norm(self, prefix: str, name: str | None) -> torch.Tensor | None:
        return None if name is None else self.norm(f"{prefix}{name}")

    def norm(self, name: str) -> torch.Tensor:
        """Return a norm of hidden states: its weight [D], [2, D] with its bias after it, or [0, D] if it has none."""
        hidden, names = self._spec.hidden_size, self._spec.norm_tensors(name)
        if len(names) == 1:
            return self.vector(names[0], hidden)
        out_XD = self._share.empty(len(names), hidden)
        for out_D, each in zip(out_XD, names, strict=True):
            self._fill(out_D, each, (hidden,), (slice(None),))
        return out_XD

    def _fill_rows(self, out_RI: Weight, prefix: str, parts: Sequence[Rows], num_inputs: int) -> None:
        """Have a weight filled with the rank's rows of projections, one below the other."""
        offset = 0
        for part in parts:
            rows = slice(offset, offset + part.num)
            own_RI = out_RI.part(rows) if isinstance(out_RI, GatheredRows) else out_RI[rows]
            self._fill(own_RI, f"{prefix}{part.name}.weight", (part.num_stored, num_inputs), (part.stored_part,))
            offset += part.num

    def vector(self, name: str, size: int) -> torch.Tensor:
        """Return a tensor of one dimension, which every rank has whole."""
        out = self._share.empty(size)
        self._fill(out, name, (size,), (slice(None),))
        return out

    def matrix(self, name: str, num_rows: int, num_columns: int) -> torch.Tensor:
        """Return a tensor of two dimensions, which every rank has whole."""
        out = self._share.empty(num_rows, num_columns)
        self._fill(out, name, (num_rows, num_columns), (slice(None), slice(None)))
        return out

    def vocabulary(self, name: str) -> torch.Tensor:
        """Return this rank's rows of a tensor with a row for each token."""
        return self._vocabulary(name, self._spec.hidden_size)

    def _vocabulary(self, name: str, *row: int) -> torch.Tensor:
        out_VX = self._share.empty(self._share.num_vocab_rows, *row)
        out_VX[self._fill_vocabulary(out_VX, name, *row) :].zero_()
        return out_VX

    def _fill_vocabulary(self, out_VX: torch.Tensor | IntegerWeight, name: str, *row: int) -> int:
        """Have the rows that belong to tokens filled. Returns their number: the others are padding."""
        vocab_size = self._spec.vocab_size
        start = min(self._share.vocab_start, vocab_size)
        num_real = min(self._share.num_vocab_rows, vocab_size - start)
        if num_real:
            part = (slice(start, start + num_real),)
            self._fill(out_VX[:num_real], name, (vocab_size, *row), part)
        return num_real

    def _empty_weight(self, names: list[str], nums: list[int], num_columns: int, first_column: int = 0) -> Weight:
        """Allocate the weight of a linear layer that consists of parts of the checkpoint's tensors `names`.

        Args:
            nums: the number of rows of each part.
            first_column: where the parts begin.
        """
        formats, device, num_rows = self._share.formats, self._share.device, sum(nums)
        schemes = [stored_scheme(self._spec.quantization, self._has_tensor, name) for name in names]
        scheme = schemes[0] if len(set(schemes)) == 1 else None
        if scheme is not None and formats.packs(scheme):
            kept = self._empty_integers(scheme, num_rows, num_columns, first_column)
            if kept is not None:
                return kept
        elif formats.others == "fp8" or (scheme is not None and scheme.format == "fp8" and "fp8" in formats.stored):
            return Fp8Weight.empty(num_rows, num_columns, device)
        if scheme is None and "integers" in formats.stored:
            several = self._empty_parts(list(zip(schemes, nums, strict=True)), num_columns, first_column)
            if several is not None:
                return several
        if formats.others == "integers" and num_columns % 4 == 0:
            return IntegerWeight.empty(num_rows, num_columns, 8, num_columns, 8, device)
        if self._share.gathers:
            return GatheredRows.empty(num_rows, num_columns, self._share.dtype)
        return self._share.empty(num_rows, num_columns)

    def _empty_integers(
        self, scheme: WeightScheme, num_rows: int, num_columns: int, first_column: int
    ) -> IntegerWeight | None:
        group_size = kept_group_size(scheme, num_columns, first_column)
        if group_size is None:
            return None
        size, share = (num_rows, num_columns), self._share
        return IntegerWeight.stored(scheme, group_size, size, share.device, short_rows=share.formats.short_rows)

    def _empty_parts(
        self, stored: list[tuple[WeightScheme | None, int]], num_columns: int, first_column: int
    ) -> IntegerParts | None:
        """Return a weight in which neighboring rows that are stored alike are a part. None: some aren't of GGUF's types
        that can be kept.

        `stored`: for neighboring rows, how they are stored, and their number.
        """
        parts: list[IntegerWeight] = []
        for scheme, rows in groupby(stored, key=itemgetter(0)):
            if scheme is None or scheme.layout != "gguf":
                return None
            part = self._empty_integers(scheme, sum(num for _, num in rows), num_columns, first_column)
            if part is None:
                return None
            parts.append(part)
        return IntegerParts(parts)
