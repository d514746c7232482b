"""The architectures of GGUF files that raycore has a family for, and what their layers' tensors are called there."""

from __future__ import annotations

__all__ = ["Architecture", "architecture_of", "same_in_layers"]

from collections.abc import Mapping
from dataclasses import dataclass, field

from raycore.checkpoint.gguf.header import GgufFile
from raycore.checkpoint.json_fields import JsonFields, shortened
from raycore.errors import InvalidCheckpoint

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


@dataclass(frozen=True)
class Architecture:
    """How the checkpoints of an architecture of transformers are written in GGUF."""

    name: str
    """Transformers' name."""
    model_type: str
    """As config.json has it."""
    parts: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    """By GGUF's name of a tensor of a layer, without `blk.N.` and `.weight`: the name in the layer of a Hugging Face
    checkpoint. `{}` stands for the number of an expert, where GGUF has all experts in one tensor."""
    alternates: bool = False
    """Whether the rows of the query and key projections are in another order: in each head, rows of its two halves,
    which are rotated with each other, take turns."""
    norm_offset: float = 0.0
    """What GGUF has added to the weights of norms."""


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
}
_WITH_EXPERTS = Architecture("MixtralForCausalLM", "mixtral", _LLAMA | _MIXTRAL, alternates=True)
_WITH_WINDOW = Architecture("MistralForCausalLM", "mistral", alternates=True)


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


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture of the model in a file.

    Raises:
        InvalidCheckpoint: raycore has no family for it, or reads no such files of that family. The message names it.
    """
    name, fields = file.metadata.get(_KEY), JsonFields(str(file.path), file.metadata)
    if not isinstance(name, str):
        raise fields.error(_KEY, f"one of {', '.join(_ARCHITECTURES)}")
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise InvalidCheckpoint(f"{file.path} has general.type={shortened(kind)}: expected a whole model")
    if name == "llama" and fields.optional_int("llama.expert_count", low=0):
        return _WITH_EXPERTS
    if name == "llama" and fields.optional_int("llama.attention.sliding_window", low=0):
        return _WITH_WINDOW
    if name not in _ARCHITECTURES:
        raise fields.error(_KEY, f"one of {', '.join(_ARCHITECTURES)}")
    if name == "olmo2" and fields.optional_int("olmo2.attention.sliding_window", low=0):
        raise fields.error("olmo2.attention.sliding_window", "none: OLMo 3 isn't read from GGUF files")
    if f"{name}.rope.dimension_sections" in file.metadata:
        raise fields.error(
            f"{name}.rope.dimension_sections", "none: models that see images aren't read from GGUF files"
        )
    return _ARCHITECTURES[name]
