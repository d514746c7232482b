"""The architectures of GGUF files that raycore has a family for, and what their layers' tensors are called there."""

from __future__ import annotations

__all__ = ["Architecture", "architecture_of", "architectures_named", "num_layers", "same_in_layers"]

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raycore.checkpoint.gguf.header import GgufFile
from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields, shortened

_KEY = "general.architecture"
_MAX_NUMBER = 2**31 - 1

_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ONE_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_CORRECTED = _EXPERTS | _SHARED_EXPERTS | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_BLOCK_SPARSE = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
_LFM2 = _LLAMA | {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_OF_GROUPS = {"routed_scaling_factor": "expert_weights_scale", "first_k_dense_replace": "leading_dense_block_count"}


@dataclass(frozen=True)
class Architecture:
    """How the checkpoints of an architecture of transformers are written in GGUF."""

    name: str
    """Transformers' name."""
    model_type: str
    """As config.json has it."""
    parts: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    """By GGUF's name of a tensor of a layer, without `blk.N.` and `.weight`: the name in the layer of a Hugging Face
    checkpoint, without `.weight`. Names may also be whole. `{}` stands for the number of an expert or of a head, where
    GGUF has all of them in one tensor."""
    alternates: bool = False
    """Whether the rows of the query and key projections are in another order: in each head, rows of its two halves,
    which are rotated with each other, take turns."""
    norm_offset: float = 0.0
    """What GGUF has added to the weights of norms."""
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """By the key of config.json: that of the metadata, without the architecture. A file may lack it."""
    always: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What config.json says of all models of the architecture that GGUF files have."""
    eps: str = "rms_norm_eps"
    """The key of config.json for the number in the norms' roots. With another one, they are layer norms."""
    last_norm: tuple[str, str] = ("output_norm", "model.norm")
    """The norm after the last layer: GGUF's name, and that in a checkpoint."""


_ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", alternates=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", _LLAMA | _EXPERTS | _SHARED_EXPERT),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _LLAMA | _HEAD_NORMS),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _LLAMA | _HEAD_NORMS | _EXPERTS),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _LLAMA | _FOUR_NORMS, norm_offset=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _LLAMA | _HEAD_NORMS | _FOUR_NORMS, norm_offset=1.0),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _LLAMA | {"attn_qkv": "self_attn.qkv_proj"} | _ONE_GATE_UP),
    "granite": Architecture("GraniteForCausalLM", "granite", alternates=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", _LLAMA | _HEAD_NORMS | _FOUR_NORMS),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", alternates=True),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        _LLAMA
        | _ONE_GATE_UP
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", "seed_oss", _LLAMA | {"post_attention_norm": "post_attention_layernorm"}
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5"),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        _LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma", norm_offset=1.0),
    "arcee": Architecture("ArceeForCausalLM", "arcee", alternates=True),
    "command-r": Architecture(
        "CohereForCausalLM",
        "cohere",
        _LLAMA | _HEAD_NORMS,
        keys={"logit_scale": "logit_scale"},
        eps="layer_norm_eps",
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        "cohere2",
        keys={"logit_scale": "logit_scale", "sliding_window": "attention.sliding_window"},
        eps="layer_norm_eps",
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        _LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        keys={"sliding_window": "attention.sliding_window"},
        eps="norm_epsilon",
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        "stablelm",
        _LLAMA | {"attn_q_norm": "self_attn.q_layernorm.norms.{}", "attn_k_norm": "self_attn.k_layernorm.norms.{}"},
        always={"partial_rotary_factor": 1.0},
        eps="layer_norm_eps",
    ),
    "nemotron": Architecture(
        "NemotronForCausalLM", "nemotron", norm_offset=1.0, always={"partial_rotary_factor": 1.0}, eps="norm_eps"
    ),
    "olmo": Architecture(
        "OlmoForCausalLM",
        "olmo",
        alternates=True,
        keys={"clip_qkv": "attention.clamp_kqv"},
        eps="layer_norm_eps",
    ),
    "exaone4": Architecture(
        "Exaone4ForCausalLM",
        "exaone4",
        _LLAMA
        | _HEAD_NORMS
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        keys={"sliding_window": "attention.sliding_window"},
        always={"sliding_window": None},
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM", "olmoe", _LLAMA | _HEAD_NORMS | _EXPERTS, always={"norm_topk_prob": False}
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM", "minimax_m2", _LLAMA | _HEAD_NORMS | _BLOCK_SPARSE, always={"scoring_func": "sigmoid"}
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        _LLAMA | _HEAD_NORMS | _CORRECTED | {"post_attention_norm": "post_attention_layernorm"},
        keys=_OF_GROUPS | {"norm_topk_prob": "expert_weights_norm"},
        always={"partial_rotary_factor": 1.0},
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        "dots1",
        _LLAMA | _HEAD_NORMS | _CORRECTED,
        keys=_OF_GROUPS | {"norm_topk_prob": "expert_weights_norm"},
        always={"sliding_window": None},
    ),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        _LLAMA | _CORRECTED | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        keys={
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
        },
    ),
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        "afmoe",
        _LLAMA
        | _HEAD_NORMS
        | _CORRECTED
        | {
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
        keys={
            "route_scale": "expert_weights_scale",
            "num_dense_layers": "leading_dense_block_count",
            "sliding_window": "attention.sliding_window",
        },
        always={"mup_enabled": True},
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        "lfm2",
        _LFM2,
        keys={"conv_L_cache": "shortconv.l_cache"},
        always={"block_auto_adjust_ff_dim": False},
        last_norm=("token_embd_norm", "model.embedding_norm"),
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        _LFM2 | _LFM2_EXPERTS,
        keys={"conv_L_cache": "shortconv.l_cache", "num_dense_layers": "leading_dense_block_count"},
        last_norm=("token_embd_norm", "model.embedding_norm"),
    ),
}
_WITH_EXPERTS = Architecture("MixtralForCausalLM", "mixtral", _LLAMA | _MIXTRAL, alternates=True)
_WITH_WINDOW = Architecture("MistralForCausalLM", "mistral", alternates=True)
_GIVE_MODEL = "give the file of a model"
_PROJECTOR = (
    f"what brings images to a model, without the model: {_GIVE_MODEL}. Models see images only with checkpoints in "
    "Hugging Face's format"
)
_OTHER_TYPES = {
    "adapter": (
        f"a LoRA adapter, not a model: {_GIVE_MODEL}, and this one with --enable-lora --lora-modules NAME=FILE, or as "
        "the path of a LoRARequest"
    ),
    "mmproj": _PROJECTOR,
    "imatrix": f"an importance matrix, by which llama.cpp quantizes a model: {_GIVE_MODEL}",
}
"""By the value of `general.type`: what a file is that isn't a model, and what to give instead."""
_OTHERS = {
    "clip": _PROJECTOR,
    "controlvector": f"a control vector, which raycore doesn't apply: {_GIVE_MODEL}",
    "imatrix": _OTHER_TYPES["imatrix"],
}
"""By the value of `general.architecture`: the same for files without a type."""
_ENCODERS = (
    "bert",
    "nomic-bert",
    "nomic-bert-moe",
    "neo-bert",
    "jina-bert-v2",
    "jina-bert-v3",
    "modern-bert",
    "t5encoder",
)
_ENCODER = (
    "a text encoder, which raycore reads only in Hugging Face's format: give the directory of its checkpoint, or its "
    "name on the hub"
)


def same_in_layers(fields: JsonFields, key: str) -> int:
    """Return the number at `key`, which may be a list with the same number for each layer. Raises InvalidCheckpoint."""
    listed = fields.list_(key) if isinstance(fields.get(key), list) else None
    if listed is not None:
        if any(each != listed[0] for each in listed[1:]) or not listed:
            raise fields.error(key, "an integer, the same for all layers")
        fields = JsonFields(fields.source, {key: listed[0]})
    number = fields.int_(key)
    if number > _MAX_NUMBER:
        raise fields.error(key, f"at most {_MAX_NUMBER}")
    return number


def num_layers(fields: JsonFields, name: str) -> int:
    """Return the number of layers of a model's file, without those that predict further tokens. Raises
    InvalidCheckpoint.

    `name`: of the architecture.
    """
    predictors = fields.optional_int(f"{name}.nextn_predict_layers", low=0) or 0
    return same_in_layers(fields, f"{name}.block_count") - predictors


def architectures_named(fields: JsonFields) -> list[Architecture]:
    """Return the architectures that a file's `general.architecture` stands for. Raises InvalidCheckpoint."""
    name = fields.get(_KEY)
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise fields.error(_KEY, f"one of {', '.join(_ARCHITECTURES)}")
    return [_ARCHITECTURES[name], *((_WITH_EXPERTS, _WITH_WINDOW) if name == "llama" else ())]


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture of the model in a file.

    Raises:
        InvalidCheckpoint: it isn't a model, raycore has no family for it, or reads no such files of that family. The
            message names it.
    """
    fields = JsonFields(str(file.path), file.metadata)
    _refuse_others(fields)
    architecture = architectures_named(fields)[0]
    name = str(fields.get(_KEY))
    if name == "llama" and fields.optional_int("llama.expert_count", low=0):
        return _WITH_EXPERTS
    if name == "llama" and fields.optional_int("llama.attention.sliding_window", low=0):
        return _WITH_WINDOW
    if name == "olmo2" and fields.optional_int("olmo2.attention.sliding_window", low=0):
        raise fields.error("olmo2.attention.sliding_window", "none: OLMo 3 isn't read from GGUF files")
    if f"{name}.rope.dimension_sections" in file.metadata:
        raise fields.error(
            f"{name}.rope.dimension_sections", "none: models that see images aren't read from GGUF files"
        )
    if not file.tensors:
        raise InvalidCheckpoint(
            f"{file.path} has a vocabulary and no tensors, so it can only be the option tokenizer: give a file with "
            "weights as the model"
        )
    return architecture


def _refuse_others(fields: JsonFields) -> None:
    """Raise InvalidCheckpoint if a file has something else than a model that generates texts."""
    name, kind = fields.get(_KEY), fields.get("general.type")
    if kind in _OTHER_TYPES:
        raise InvalidCheckpoint(f"{fields.source} is {_OTHER_TYPES[kind]} (general.type={shortened(kind)})")
    if isinstance(name, str) and (name in _OTHERS or name in _ENCODERS):
        what = _OTHERS.get(name, _ENCODER)
        raise InvalidCheckpoint(f"{fields.source} is {what} (general.architecture={shortened(name)})")
    if kind not in (None, "model"):
        raise fields.error("general.type", "'model'")
