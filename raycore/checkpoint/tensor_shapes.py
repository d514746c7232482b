"""The names and shapes of a whole model's tensors in a checkpoint. Does not import torch.

`raycore.weights` knows which part of each tensor a rank holds.
"""

from __future__ import annotations

__all__ = ["eagle3_tensors", "layer_prefix", "model_tensors"]

from collections.abc import Callable, Iterator

from raycore.checkpoint.eagle3_spec import Eagle3Spec
from raycore.checkpoint.quantization import MXFP4_GROUP
from raycore.checkpoint.rank_rows import KV_A_PROJ, Q_A_PROJ, SINKS, LatentRows, RankRows
from raycore.checkpoint.vision_tensors import vision_tensors
from raycore.models.latent import LatentHeads
from raycore.models.moe import MXFP4_NUMBERS, MXFP4_SCALES, MoeSpec, has_stacked_experts
from raycore.models.spec import ModelSpec
from raycore.models.state import Mamba2Spec

Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors."""

_LAYER_PREFIXES = ("midlayer.", "layers.0.")
"""Where checkpoints of EAGLE-3 heads have the layer's tensors."""


def model_tensors(spec: ModelSpec, has_tensor: Callable[[str], bool]) -> Shapes:
    """Yield the tensors of a whole model, quantized weights as if they weren't quantized.

    `has_tensor`: whether the checkpoint has a tensor, which says how experts are stored.
    """
    yield spec.names.embedding, (spec.vocab_size, spec.hidden_size)
    yield spec.names.final_norm, (spec.hidden_size,)
    if spec.has_head or (spec.pooling is not None and spec.pooling.uses_head_rows):
        yield spec.names.head, (spec.vocab_size, spec.hidden_size)
    if spec.pooling is not None:
        yield from spec.pooling.own_tensors().items()
    if spec.vision is not None:
        yield from ((each.name, each.shape) for each in vision_tensors(spec.vision))
    for layer in range(spec.num_layers):
        prefix = spec.names.layer(layer)
        yield from _norms(spec, prefix)
        if spec.has_state(layer):
            yield from _state_tensors(spec, prefix)
        elif spec.latent is not None:
            yield from _latent_tensors(spec, spec.latent, prefix)
        else:
            yield from attention_tensors(spec, prefix, spec.hidden_size)
        if spec.moe is not None and spec.moe.sparse_layers[layer]:
            yield from _expert_tensors(spec, spec.moe, prefix, has_tensor)
        else:
            yield from dense_tensors(spec, prefix)


def eagle3_tensors(spec: ModelSpec, head: Eagle3Spec, has_tensor: Callable[[str], bool], prefix: str) -> Shapes:
    """Yield the tensors of an EAGLE-3 head, the optional ones only if the checkpoint has them.

    `prefix`: how the names of its layer's tensors begin.
    """
    hidden = spec.hidden_size
    if has_tensor("embed_tokens.weight"):
        yield "embed_tokens.weight", (spec.vocab_size, hidden)
    yield "fc.weight", (hidden, head.target_hidden_size * len(head.target_layers))
    yield f"{prefix}hidden_norm.weight", (hidden,)
    for name in spec.names.norms:
        yield f"{prefix}{name}.weight", (hidden,)
    yield from attention_tensors(spec, prefix, 2 * hidden)
    yield from dense_tensors(spec, prefix)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (head.draft_vocab_size, hidden)
    if has_tensor("d2t"):
        yield "d2t", (head.draft_vocab_size,)


def layer_prefix(has_tensor: Callable[[str], bool] = lambda name: False) -> str:
    """Return how the names of the tensors of an EAGLE-3 head's layer begin."""
    return next((each for each in _LAYER_PREFIXES if has_tensor(f"{each}hidden_norm.weight")), _LAYER_PREFIXES[0])


def _norms(spec: ModelSpec, prefix: str) -> Shapes:
    for name in spec.names.norms:
        yield f"{prefix}{name}.weight", (spec.hidden_size,)


def _latent_tensors(spec: ModelSpec, latent: LatentHeads, prefix: str) -> Shapes:
    rows, hidden = LatentRows.of(spec, 0, 1), spec.hidden_size
    for part in rows.inputs:
        yield f"{prefix}{part.name}.weight", (part.total, hidden)
        if spec.qkv_bias and part.name in (Q_A_PROJ, KV_A_PROJ):
            yield f"{prefix}{part.name}.bias", (part.total,)
    if rows.q_b is not None and latent.query_rank is not None:
        yield f"{prefix}self_attn.q_a_layernorm.weight", (latent.query_rank,)
        yield f"{prefix}{rows.q_b.name}.weight", (rows.q_b.total, latent.query_rank)
    yield f"{prefix}self_attn.kv_a_layernorm.weight", (latent.rank,)
    yield f"{prefix}{rows.kv_b.name}.weight", (rows.kv_b.total, latent.rank)
    yield f"{prefix}{spec.names.o}.weight", (hidden, rows.values.total)
    if spec.o_bias:
        yield f"{prefix}{spec.names.o}.bias", (hidden,)


def attention_tensors(spec: ModelSpec, prefix: str, num_inputs: int) -> Shapes:
    """Yield the tensors of attention in a layer. `num_inputs`: of the query, key and value projections."""
    rows = RankRows.of(spec, 0, 1)
    for part in rows.qkv:
        yield f"{prefix}{part.name}.weight", (part.num_stored, num_inputs)
        if spec.qkv_bias:
            yield f"{prefix}{part.name}.bias", (part.num_stored,)
    yield f"{prefix}{spec.names.o}.weight", (spec.hidden_size, rows.heads.total)
    if spec.o_bias:
        yield f"{prefix}{spec.names.o}.bias", (spec.hidden_size,)
    if spec.sinks:
        yield f"{prefix}{SINKS}", (spec.num_heads,)
    if spec.qk_norm:
        is_wide = spec.qk_norm == "width"
        yield f"{prefix}{spec.names.q_norm}.weight", (rows.heads.total if is_wide else spec.head_dim,)
        yield f"{prefix}{spec.names.k_norm}.weight", (rows.k.total if is_wide else spec.head_dim,)


def _state_tensors(spec: ModelSpec, prefix: str) -> Shapes:
    state, hidden = spec.state, spec.hidden_size
    assert state is not None
    block, channels, values, heads = f"{prefix}{state.block}.", state.num_channels, state.num_values, state.num_v_heads
    if isinstance(state, Mamba2Spec):
        yield f"{block}in_proj.weight", (channels + values + heads, hidden)
        yield f"{block}conv1d.weight", (channels, 1, state.conv_size)
        if state.has_conv_bias:
            yield f"{block}conv1d.bias", (channels,)
        for name in ("A_log", "D", "dt_bias"):
            yield f"{block}{name}", (heads,)
        yield f"{block}norm.weight", (values,)
        yield f"{block}out_proj.weight", (hidden, values)
        return
    inputs = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    if state.is_interleaved:
        inputs = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * heads}
    for name, num_rows in inputs.items():
        yield f"{block}{name}.weight", (num_rows, hidden)
    yield f"{block}conv1d.weight", (channels, 1, state.conv_size)
    yield f"{block}A_log", (heads,)
    yield f"{block}dt_bias", (heads,)
    yield f"{block}norm.weight", (state.v_dim,)
    yield f"{block}out_proj.weight", (hidden, values)


def dense_tensors(spec: ModelSpec, prefix: str) -> Shapes:
    """Yield the tensors of a layer's dense feed-forward part."""
    for part in RankRows.of(spec, 0, 1).gate_up:
        yield f"{prefix}{part.name}.weight", (part.num_stored, spec.hidden_size)
        if spec.mlp_bias:
            yield f"{prefix}{part.name}.bias", (part.num_stored,)
    yield f"{prefix}{spec.names.down}.weight", (spec.hidden_size, spec.intermediate_size)
    if spec.mlp_bias:
        yield f"{prefix}{spec.names.down}.bias", (spec.hidden_size,)


def _expert_tensors(spec: ModelSpec, moe: MoeSpec, prefix: str, has_tensor: Callable[[str], bool]) -> Shapes:
    names, num, size, hidden = moe.names, moe.num_experts, moe.intermediate_size, spec.hidden_size
    is_stacked = has_stacked_experts(moe, spec.names.layers, has_tensor)
    block = f"{prefix}{'mlp' if is_stacked else names.block}."
    yield f"{block}{names.router}.weight", (num, hidden)
    if moe.router.has_bias:
        yield f"{block}{names.router}.bias", (num,)
    if moe.router.has_correction:
        yield f"{block}{names.correction}", (num,)
    if moe.shared is not None:
        yield from _network(f"{block}{names.shared}.", moe, moe.shared.intermediate_size, hidden)
        if moe.shared.has_gate:
            yield f"{block}{names.shared_gate}.weight", (1, hidden)
    if is_stacked:
        yield from _stacked_experts(f"{block}experts.", moe, hidden, has_tensor)
        return
    for expert in range(num):
        yield from _network(f"{block}experts.{expert}.", moe, size, hidden, has_bias=moe.has_bias)


def _stacked_experts(prefix: str, moe: MoeSpec, hidden: int, has_tensor: Callable[[str], bool]) -> Shapes:
    size = moe.intermediate_size
    for name, shape in (("gate_up_proj", (2 * size, hidden)), ("down_proj", (hidden, size))):
        if has_tensor(f"{prefix}{name}{MXFP4_NUMBERS}"):
            groups = moe.num_experts, shape[0], shape[1] // MXFP4_GROUP
            yield f"{prefix}{name}{MXFP4_NUMBERS}", (*groups, MXFP4_GROUP // 2)
            yield f"{prefix}{name}{MXFP4_SCALES}", groups
        else:
            yield f"{prefix}{name}", (moe.num_experts, *(reversed(shape) if moe.is_interleaved else shape))
        if moe.has_bias:
            yield f"{prefix}{name}_bias", (moe.num_experts, shape[0])


def _network(prefix: str, moe: MoeSpec, size: int, hidden: int, *, has_bias: bool = False) -> Shapes:
    names = moe.names
    for name, shape in ((names.gate, (size, hidden)), (names.up, (size, hidden)), (names.down, (hidden, size))):
        yield f"{prefix}{name}.weight", shape
        if has_bias:
            yield f"{prefix}{name}.bias", shape[:1]
