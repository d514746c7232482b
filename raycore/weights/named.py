"""The weights of a decoder one after the other, with names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from raycore.checkpoint.rank_rows import SINKS
from raycore.weights.latent_weights import LatentWeights
from raycore.weights.loader import AttentionWeights, DecoderWeights, LayerWeights, MixerWeights, MlpWeights
from raycore.weights.state_weights import DeltaWeights, Mamba2Weights
from raycore.weights.weight import Weight


def named_weights(weights: DecoderWeights, first_layer: int = 0) -> Iterator[tuple[str, Weight]]:
    """The weights of a stage by name. A fused weight has the name of the fused layer.

    `first_layer`: the index in the model of the stage's first layer.
    """
    if weights.embed_VD is not None:
        yield "model.embed_tokens.weight", weights.embed_VD
    if weights.lm_head_VD is not None and weights.lm_head_VD is not weights.embed_VD:
        yield "lm_head.weight", weights.lm_head_VD
    if weights.final_norm_D is not None:
        yield "model.norm.weight", weights.final_norm_D
    for key, weight in (weights.vision or {}).items():
        yield f"vision.{key}", weight
    for index, layer in enumerate(weights.layers, start=first_layer):
        for name, weight in _of_layer(layer):
            if weight is not None:
                yield f"model.layers.{index}.{name}", weight


def dense_tensors(weights: DecoderWeights) -> Iterator[Tensor]:
    """All weights but those of experts, in a fixed order. They may not be in fp8."""
    for name, weight in named_weights(weights):
        if ".experts." not in name:
            assert isinstance(weight, Tensor), "models with experts aren't quantized"
            yield weight


def _of_layer(layer: LayerWeights) -> Iterator[tuple[str, Weight | None]]:
    yield "input_layernorm.weight", layer.before_attention_D
    yield from _of_mixer(layer.mixer)
    yield "after_attention_layernorm.weight", layer.after_attention_D
    yield "post_attention_layernorm.weight", layer.before_feed_forward_D
    yield "after_feedforward_layernorm.weight", layer.after_feed_forward_D
    own = layer.feed_forward
    if isinstance(own, MlpWeights):
        yield "mlp.gate_up_proj.weight", own.gate_up_FD
        yield "mlp.gate_up_proj.bias", own.gate_up_bias
        yield "mlp.down_proj.weight", own.down_DF
        yield "mlp.down_proj.bias", own.down_bias
    else:
        yield "mlp.gate.weight", own.router_ED
        yield "mlp.gate.bias", own.router_bias_E
        yield "mlp.gate.e_score_correction_bias", own.correction_E
        if own.shared is not None:
            yield "mlp.shared_experts.gate_up_proj.weight", own.shared.gate_up_FD
            yield "mlp.shared_experts.down_proj.weight", own.shared.down_DF
            yield "mlp.shared_expert_gate.weight", own.shared.gate_1D
        yield "mlp.experts.gate_up_proj", own.gate_up_EFD
        yield "mlp.experts.down_proj", own.down_EDF
        yield "mlp.experts.gate_up_proj_bias", own.gate_up_bias_EF
        yield "mlp.experts.down_proj_bias", own.down_bias_ED


def _of_mixer(mixer: MixerWeights) -> Iterator[tuple[str, Weight | None]]:
    if isinstance(mixer, DeltaWeights):
        return _of_delta_rule(mixer)
    if isinstance(mixer, Mamba2Weights):
        return _of_mamba2(mixer)
    return _of_latent(mixer) if isinstance(mixer, LatentWeights) else _of_attention(mixer)


def _of_attention(mixer: AttentionWeights) -> Iterator[tuple[str, Weight | None]]:
    yield "self_attn.qkv_proj.weight", mixer.qkv_OD
    yield "self_attn.qkv_proj.bias", mixer.qkv_bias_O
    yield "self_attn.q_norm.weight", mixer.q_norm_H
    yield "self_attn.k_norm.weight", mixer.k_norm_H
    yield SINKS, mixer.sinks_N
    yield "self_attn.o_proj.weight", mixer.o_DO
    yield "self_attn.o_proj.bias", mixer.o_bias


def _of_latent(mixer: LatentWeights) -> Iterator[tuple[str, Weight | None]]:
    yield "self_attn.latent_proj.weight", mixer.inputs_OD
    yield "self_attn.latent_proj.bias", mixer.inputs_bias_O
    yield "self_attn.q_a_layernorm.weight", mixer.q_norm_Q
    yield "self_attn.q_b_proj.weight", mixer.q_b_PQ
    yield "self_attn.kv_a_layernorm.weight", mixer.kv_norm_R
    yield "self_attn.kv_b_proj.weight", mixer.kv_b_XR
    yield "self_attn.o_proj.weight", mixer.o_DY
    yield "self_attn.o_proj.bias", mixer.o_bias


def _of_delta_rule(mixer: DeltaWeights) -> Iterator[tuple[str, Weight | None]]:
    yield "linear_attn.in_proj_qkvz.weight", mixer.qkvz_ID
    yield "linear_attn.in_proj_ba.weight", mixer.ba_ID
    yield "linear_attn.conv1d.weight", mixer.conv_CW
    yield "linear_attn.A_log", mixer.decay_N
    yield "linear_attn.dt_bias", mixer.bias_N
    yield "linear_attn.norm.weight", mixer.norm_H
    yield "linear_attn.out_proj.weight", mixer.o_DO


def _of_mamba2(mixer: Mamba2Weights) -> Iterator[tuple[str, Weight | None]]:
    yield "mamba.in_proj.weight", mixer.in_ID
    yield "mamba.z_proj.weight", mixer.z_OD
    yield "mamba.conv1d.weight", mixer.conv_CW
    yield "mamba.conv1d.bias", mixer.conv_bias_C
    yield "mamba.A_log", mixer.decay_N
    yield "mamba.dt_bias", mixer.bias_N
    yield "mamba.D", mixer.skip_N
    yield "mamba.norm.weight", mixer.norm_O
    yield "mamba.out_proj.weight", mixer.o_DO
