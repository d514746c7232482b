"""One tensor-parallel rank's weights of a decoder, read from a checkpoint or random.

This module knows the names of the tensors in checkpoints, how tensors are fused, and which part of each tensor a rank
holds. Each part is converted and copied directly to its place in the rank's weights, so a rank never holds more than
its own weights; `fill` does that. Shape suffixes: V this rank's rows of the padded vocabulary, D hidden size, O this
rank's query, key and value rows, H elements of a head, F this rank's rows of the feed-forward layer (2F where gate and
up are fused). Experts are in `moe_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from raycore.checkpoint.quantization import stored_scheme
from raycore.checkpoint.rank_rows import DOWN_PROJ, O_PROJ, SINKS, RankRows, Rows
from raycore.checkpoint.stages import Stage
from raycore.models.moe import ExpertShare
from raycore.models.spec import ModelSpec
from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.weights.fill import CheckpointFill, RandomFill
from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.integer_weight import IntegerWeight, kept_group_size
from raycore.weights.linear_formats import CONVERTED, LinearFormats
from raycore.weights.moe_weights import Fill, MoeLayout, MoeWeights, Part
from raycore.weights.staging import NUM_READERS, Staging
from raycore.weights.weight import Weight

Progress = Callable[[int, int], None]
"""Called with (tensors filled, tensors in total) after each tensor."""

_WeightsT = TypeVar("_WeightsT")

_CPU = torch.device("cpu")


@dataclass
class MlpWeights:
    """The weights of one dense feed-forward layer on one rank."""

    gate_up_FD: Weight
    """This rank's gate rows, then its up rows."""
    gate_up_bias: torch.Tensor | None
    down_DF: Weight
    down_bias: torch.Tensor | None
    """None on ranks other than tp_rank 0, because the sum over ranks must include the bias only once."""


@dataclass
class LayerWeights:
    """The weights of one decoder layer on one rank."""

    before_attention_D: torch.Tensor | None
    """Weights of norms are None where the layer has no such norm: see `TensorNames`."""
    qkv_OD: Weight
    """This rank's query rows, then its key rows, then its value rows."""
    qkv_bias_O: torch.Tensor | None
    q_norm_H: torch.Tensor | None
    k_norm_H: torch.Tensor | None
    """Like `q_norm_H`, for all heads of the rank where the norm is over all heads together."""
    sinks_N: torch.Tensor | None
    """Those of this rank's query heads."""
    o_DO: Weight
    """The columns for this rank's query heads."""
    o_bias: torch.Tensor | None
    """None on ranks other than tp_rank 0, like `MlpWeights.down_bias`."""
    after_attention_D: torch.Tensor | None
    before_feed_forward_D: torch.Tensor | None
    after_feed_forward_D: torch.Tensor | None
    feed_forward: MlpWeights | MoeWeights


@dataclass
class DecoderWeights:
    """The weights of a decoder, or of one stage of it, on one rank."""

    embed_VD: torch.Tensor | None
    """None after the first stage."""
    lm_head_VD: torch.Tensor | None
    """None before the last stage. The same object as `embed_VD` if the stage has both, and the checkpoint ties them."""
    vocab_start: int
    """Token id of the first row of `embed_VD` and `lm_head_VD`. Rows past the vocabulary's end are zero."""
    final_norm_D: torch.Tensor | None
    """None before the last stage."""
    layers: list[LayerWeights]
    """The stage's layers."""


def load_decoder_weights(
    spec: ModelSpec,
    path: Path,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    progress: Progress | None = None,
    experts: ExpertShare | None = None,
    device: torch.device = _CPU,
    formats: LinearFormats = CONVERTED,
    staging: Staging | None = None,
    stage: Stage | None = None,
) -> DecoderWeights:
    """Read a rank's part of the checkpoint at `path`, converted to `dtype`, to `device`.

    Args:
        progress: called after each tensor.
        experts: this rank's part of the experts. None: tensor-parallel ranks split each expert.
        formats: of the linear layers' weights.
        staging: brings tensors to the device. None: a new one for a GPU; a CPU needs none.
        stage: the rank's stage. None: the whole model.

    Raises:
        InvalidCheckpoint: a file or a tensor is missing or damaged, or a shape isn't what `spec` says.
    """
    if staging is None and device.type != "cpu":
        staging = Staging(device)
    with CheckpointReader(path) as reader:
        stage = stage or Stage.whole(spec)
        layout = partial(
            RankLayout, spec, stage, tp_rank, tp_size, dtype, device, formats, experts, reader.__contains__
        )
        fill = CheckpointFill(reader, staging, spec.quantization)
        num_threads = None if staging is None else NUM_READERS
        weights = fill_weights(lambda fill: layout(fill).decoder(), fill, progress, num_threads)
    if staging is not None:
        staging.finish()
    return weights


def random_decoder_weights(
    spec: ModelSpec,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    experts: ExpertShare | None = None,
    device: torch.device = _CPU,
    formats: LinearFormats = CONVERTED,
    stage: Stage | None = None,
) -> DecoderWeights:
    """Return a rank's part of a decoder with random weights, made on `device`. Norms have weight 1.

    Each tensor is a function of `seed`, the tensor's name and the kind of device, and a rank gets its part of that
    tensor. So the model is the same for any `tp_size` and any stages, except for the rounding to fp8.

    Args:
        formats: of the linear layers' weights. Those that the checkpoint stores are those that config.json names.
        stage: the rank's stage. None: the whole model.
    """
    stage = stage or Stage.whole(spec)
    layout = partial(RankLayout, spec, stage, tp_rank, tp_size, dtype, device, formats, experts, lambda name: False)
    # on a GPU, several threads would only need more memory at a time
    num_threads = None if device.type == "cpu" else 1
    return fill_weights(lambda fill: layout(fill).decoder(), RandomFill(seed), None, num_threads)


def empty_decoder_weights(
    spec: ModelSpec,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    experts: ExpertShare | None = None,
    device: torch.device = _CPU,
    formats: LinearFormats = CONVERTED,
    stage: Stage | None = None,
) -> DecoderWeights:
    """Allocate a rank's part of a decoder. Only the rows past the vocabulary's end are set, to zero.

    Args:
        formats: of the linear layers' weights.
        stage: the rank's stage. None: the whole model.
    """

    def leave(out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None: ...

    stage = stage or Stage.whole(spec)
    return RankLayout(
        spec, stage, tp_rank, tp_size, dtype, device, formats, experts, lambda name: False, leave
    ).decoder()


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

    def __init__(
        self,
        spec: ModelSpec,
        stage: Stage,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        device: torch.device,
        formats: LinearFormats,
        experts: ExpertShare | None,
        has_tensor: Callable[[str], bool],
        fill: Fill,
    ) -> None:
        spec.check_tensor_parallel(tp_size, expert_parallel=experts is not None)
        if spec.moe is not None and experts is None:
            experts = spec.moe.split_experts(tp_rank, tp_size)
        self._spec = spec
        self._stage = stage
        self._tp_rank = tp_rank
        self._dtype = dtype
        self._device = device
        self._formats = formats
        self._has_tensor = has_tensor
        self._fill = fill
        self._moe = None
        if spec.moe is not None and experts is not None:
            shared_rows = range(0) if spec.moe.shared is None else spec.moe.shared.rows(tp_rank, tp_size)
            self._moe = MoeLayout(spec, experts, shared_rows, dtype, device, fill, has_tensor)
        self._vocab_rows = -(-spec.vocab_size // tp_size)
        self._rows = RankRows.of(spec, tp_rank, tp_size)

    @property
    def vocab_start(self) -> int:
        """The token of the first row of `vocabulary`."""
        return self._tp_rank * self._vocab_rows

    def decoder(self) -> DecoderWeights:
        """Return the stage's weights."""
        spec, stage = self._spec, self._stage
        embed_VD = self.vocabulary(spec.names.embedding) if stage.is_first else None
        return DecoderWeights(
            embed_VD=embed_VD,
            lm_head_VD=self._lm_head(embed_VD) if stage.is_last else None,
            vocab_start=self.vocab_start,
            final_norm_D=self.vector(spec.names.final_norm, spec.hidden_size) if stage.is_last else None,
            layers=[self.layer(index, spec.names.layer(index)) for index in stage.layers],
        )

    def _lm_head(self, embed_VD: torch.Tensor | None) -> torch.Tensor:
        names = self._spec.names
        if not self._spec.tie_word_embeddings:
            return self.vocabulary(names.head)
        return self.vocabulary(names.embedding) if embed_VD is None else embed_VD

    def layer(self, index: int, prefix: str, num_inputs: int | None = None) -> LayerWeights:
        """Return a layer's weights.

        Args:
            prefix: of the tensors' names.
            num_inputs: of the query, key and value projections. None: the hidden size.
        """
        spec, hidden = self._spec, self._spec.hidden_size
        qkv, is_first = self._rows.qkv, self._tp_rank == 0
        return LayerWeights(
            before_attention_D=self._norm(prefix, spec.names.before_attention),
            qkv_OD=self._fused_rows(prefix, qkv, num_inputs),
            qkv_bias_O=self._fused_bias(prefix, qkv) if spec.qkv_bias else None,
            q_norm_H=self._head_norm(f"{prefix}self_attn.q_norm.weight", self._rows.q),
            k_norm_H=self._head_norm(f"{prefix}self_attn.k_norm.weight", self._rows.k),
            sinks_N=self._sinks(f"{prefix}{SINKS}") if spec.sinks else None,
            o_DO=self._columns(f"{prefix}{O_PROJ}.weight", self._rows.q),
            o_bias=self.vector(f"{prefix}self_attn.o_proj.bias", hidden) if spec.o_bias and is_first else None,
            after_attention_D=self._norm(prefix, spec.names.after_attention),
            before_feed_forward_D=self._norm(prefix, spec.names.before_feed_forward),
            after_feed_forward_D=self._norm(prefix, spec.names.after_feed_forward),
            feed_forward=self._feed_forward(index, prefix),
        )

    def _norm(self, prefix: str, name: str | None) -> torch.Tensor | None:
        return None if name is None else self.vector(f"{prefix}{name}.weight", self._spec.hidden_size)

    def _head_norm(self, name: str, rows: Rows) -> torch.Tensor | None:
        """Return the weights of a norm of queries or keys, which are those of `rows`."""
        if self._spec.qk_norm != "width":
            return self.vector(name, self._spec.head_dim) if self._spec.qk_norm else None
        out_R = self._empty(rows.num)
        self._fill(out_R, name, (rows.total,), (rows.part,))
        return out_R

    def _sinks(self, name: str) -> torch.Tensor:
        spec, q = self._spec, self._rows.q
        heads = slice(q.part.start // spec.head_dim, q.part.stop // spec.head_dim)
        out_N = self._empty(heads.stop - heads.start)
        self._fill(out_N, name, (spec.num_heads,), (heads,))
        return out_N

    def _feed_forward(self, index: int, prefix: str) -> MlpWeights | MoeWeights:
        spec, gate_up, is_first = self._spec, self._rows.gate_up, self._tp_rank == 0
        if self._moe is not None and spec.moe is not None and spec.moe.sparse_layers[index]:
            return self._moe.layer(prefix)
        return MlpWeights(
            gate_up_FD=self._fused_rows(prefix, gate_up),
            gate_up_bias=self._fused_bias(prefix, gate_up) if spec.mlp_bias else None,
            down_DF=self._columns(f"{prefix}{DOWN_PROJ}.weight", self._rows.gate),
            down_bias=self.vector(f"{prefix}mlp.down_proj.bias", spec.hidden_size)
            if spec.mlp_bias and is_first
            else None,
        )

    def _fused_rows(self, prefix: str, parts: Sequence[Rows], num_inputs: int | None = None) -> Weight:
        hidden = num_inputs or self._spec.hidden_size
        names = [f"{prefix}{part.name}.weight" for part in parts]
        out_RD = self._empty_weight(names, sum(part.num for part in parts), hidden)
        offset = 0
        for part, name in zip(parts, names, strict=True):
            self._fill(out_RD[offset : offset + part.num], name, (part.num_stored, hidden), (part.stored_part,))
            offset += part.num
        return out_RD

    def _fused_bias(self, prefix: str, parts: Sequence[Rows]) -> torch.Tensor:
        out_R = self._empty(sum(part.num for part in parts))
        offset = 0
        for part in parts:
            rows_R = out_R[offset : offset + part.num]
            self._fill(rows_R, f"{prefix}{part.name}.bias", (part.num_stored,), (part.stored_part,))
            offset += part.num
        return out_R

    def _columns(self, name: str, inputs: Rows) -> Weight:
        """Return the columns of the projection `name` whose inputs are the outputs of the rows `inputs`."""
        out_DR = self._empty_weight([name], self._spec.hidden_size, inputs.num, inputs.part.start)
        self._fill(out_DR, name, (self._spec.hidden_size, inputs.total), (slice(None), inputs.part))
        return out_DR

    def vector(self, name: str, size: int) -> torch.Tensor:
        """Return a tensor of one dimension, which every rank has whole."""
        out = self._empty(size)
        self._fill(out, name, (size,), (slice(None),))
        return out

    def matrix(self, name: str, num_rows: int, num_columns: int) -> torch.Tensor:
        """Return a tensor of two dimensions, which every rank has whole."""
        out = self._empty(num_rows, num_columns)
        self._fill(out, name, (num_rows, num_columns), (slice(None), slice(None)))
        return out

    def vocabulary(self, name: str) -> torch.Tensor:
        """Return this rank's rows of a tensor with a row for each token."""
        vocab_size, hidden = self._spec.vocab_size, self._spec.hidden_size
        start = min(self.vocab_start, vocab_size)
        num_real = min(self._vocab_rows, vocab_size - start)
        out_VD = self._empty(self._vocab_rows, hidden)
        if num_real:
            self._fill(out_VD[:num_real], name, (vocab_size, hidden), (slice(start, start + num_real),))
        out_VD[num_real:].zero_()
        return out_VD

    def _empty_weight(self, names: list[str], num_rows: int, num_columns: int, first_column: int = 0) -> Weight:
        """Allocate the weight of a linear layer that consists of parts of the checkpoint's tensors `names`.

        `first_column`: where the part begins.
        """
        schemes = {stored_scheme(self._spec.quantization, self._has_tensor, name) for name in names}
        scheme = schemes.pop() if len(schemes) == 1 else None
        is_fp8 = scheme is not None and scheme.layout == "float8"
        if self._formats.others == "fp8" or (is_fp8 and "fp8" in self._formats.stored):
            return Fp8Weight.empty(num_rows, num_columns, self._device)
        if scheme is not None and not is_fp8 and "integers" in self._formats.stored:
            group_size = kept_group_size(scheme, num_columns, first_column)
            if group_size is not None:
                size = num_rows, num_columns, scheme.bits, group_size
                return IntegerWeight.empty(*size, scheme.row_bits, self._device)
        if self._formats.others == "integers" and num_columns % 4 == 0:
            return IntegerWeight.empty(num_rows, num_columns, 8, num_columns, 8, self._device)
        return self._empty(num_rows, num_columns)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
