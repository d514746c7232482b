"""The architectures of GGUF files that raycore has a family for, and what their layers' tensors are called there."""

from __future__ import annotations

__all__ = ["Architecture", "architecture_of", "architectures_named", "same_in_layers"]

from collections.abc import Mapping
from dataclasses import dataclass, field

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
