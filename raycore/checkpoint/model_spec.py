"""A checkpoint's description of its model: `config.json` and `generation_config.json`, parsed and validated.

Handles the differences between the formats of transformers 4 and 5, and between model families, so that other modules
see one `ModelSpec`. Absent keys get the defaults of transformers' configuration classes. This module doesn't import
torch or read weights; `raycore.weights.loader` reads them.
"""

from __future__ import annotations

__all__ = ["ModelSpec", "RopeScaling", "load_model_spec", "parse_model_spec"]

import math
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from raycore.checkpoint.architectures import (
    LLAMA_DEFAULTS,
    Architecture,
    Family,
    convert_config,
    plugin_architecture,
    plugin_architectures,
)
from raycore.checkpoint.json_fields import JsonFields
from raycore.checkpoint.moe_spec import MoeSpec, parse_moe
from raycore.checkpoint.quantization import Quantization, parse_quantization
from raycore.checkpoint.rope_scaling import RopeScaling, parse_rope
from raycore.errors import InvalidCheckpoint, InvalidConfig

CheckpointDType = Literal["float32", "bfloat16", "float16"]


class ModelSpec(msgspec.Struct, frozen=True):
    """A decoder's sizes and operations, as its checkpoint describes them. Sizes are those of the whole model."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    layer_windows: list[int | None]
    """Each layer's sliding window: how many tokens a token sees, itself included. None: no window."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether each query and key head is RMS-normalized before the rotation."""
    tie_word_embeddings: bool
    hidden_act: str
    max_position_embeddings: int
    dtype: CheckpointDType
    """Type in which the weights are stored."""
    bos_token_id: int | None
    eos_token_ids: list[int]
    """The end-of-sequence tokens of generation_config.json, or of config.json if there are none. `config.resolve` adds
    the tokenizer's."""
    generation_defaults: dict[str, Any]
    """The sampling parameters that are present in generation_config.json, under the names in that file."""
    moe: MoeSpec | None = None
    """The experts of the sparse layers; None for a dense model. `intermediate_size` is that of dense layers."""
    decoder: str | None = None
    """The decoder's class, as `package.module.Class`. None: raycore's own."""
    quantization: Quantization | None = None
    """Which weights are stored quantized, and how. `dtype` is that of the other tensors. None: no weights are."""

    @property
    def stores_fp8(self) -> bool:
        """Whether weights of linear layers are stored in fp8, with scales."""
        return self.quantization is not None and self.quantization.stores_fp8

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a sequence.

        With YaRN scaling, this may be more than `max_position_embeddings`, which is often the length before scaling.
        """
        if self.rope_scaling is None or self.rope_scaling.rope_type != "yarn":
            return self.max_position_embeddings
        stretched = int(self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings)
        return max(self.max_position_embeddings, stretched)

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """Number of key-value heads on each of `tp_size` ranks. With fewer heads than ranks, ranks share heads."""
        return max(1, self.num_kv_heads // tp_size)

    def check_tensor_parallel(self, tp_size: int, expert_parallel: bool = False) -> None:
        """Raise InvalidConfig if `tp_size` tensor-parallel ranks can't split the model. The error lists possible sizes.

        The vocabulary may have any size, because it is padded. With `expert_parallel`, the size of an expert doesn't
        matter, because experts aren't split.
        """
        sizes = self._split_sizes(expert_parallel)
        for name, size in sizes.items():
            if size % tp_size:
                raise InvalidConfig(
                    f"tensor_parallel_size={tp_size} doesn't divide the model's {name}={size}: "
                    f"choose one of {self._tensor_parallel_sizes(sizes)}"
                )
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise InvalidConfig(
                f"tensor_parallel_size={tp_size} neither divides the model's num_key_value_heads={self.num_kv_heads} "
                f"nor is a multiple of it: choose one of {self._tensor_parallel_sizes(sizes)}"
            )

    def _split_sizes(self, expert_parallel: bool) -> dict[str, int]:
        """Return the sizes that tensor-parallel ranks split, by the sizes' names in config.json."""
        sizes = {"num_attention_heads": self.num_heads}
        if self.moe is None or not all(self.moe.sparse_layers):
            sizes["intermediate_size"] = self.intermediate_size
        if self.moe is not None and not expert_parallel:
            own_name = "intermediate_size" if self.architecture == "MixtralForCausalLM" else "moe_intermediate_size"
            sizes[own_name] = self.moe.intermediate_size
        return sizes

    def _tensor_parallel_sizes(self, sizes: dict[str, int]) -> list[int]:
        shared = math.gcd(*sizes.values())
        return [
            size
            for size in range(1, shared + 1)
            if shared % size == 0 and (self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0)
        ]


_LLAMA_DEFAULTS = dict(LLAMA_DEFAULTS)
_MISTRAL_DEFAULTS = _LLAMA_DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MIXTRAL_DEFAULTS = _MISTRAL_DEFAULTS | {
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN3_MOE_DEFAULTS = _QWEN2_DEFAULTS | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_FAMILIES = {
    "LlamaForCausalLM": Family(_LLAMA_DEFAULTS, qkv_bias=None),
    "MistralForCausalLM": Family(_MISTRAL_DEFAULTS, windows="every layer"),
    "Qwen2ForCausalLM": Family(_QWEN2_DEFAULTS, qkv_bias=True, windows="by layer"),
    "Qwen3ForCausalLM": Family(_QWEN2_DEFAULTS | {"head_dim": 128}, qkv_bias=None, qk_norm=True, windows="by layer"),
    "MixtralForCausalLM": Family(_MIXTRAL_DEFAULTS, windows="every layer"),
    "Qwen3MoeForCausalLM": Family(_QWEN3_MOE_DEFAULTS, qkv_bias=None, qk_norm=True, windows="every layer if used"),
}
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def load_model_spec(path: Path) -> ModelSpec:
    """Read the description of the model in the checkpoint directory `path`.

    Raises:
        InvalidCheckpoint: the directory or its config.json is missing or can't be read, or raycore doesn't support the
            model. For an unsupported model, the message names the file, the key and the key's value.
    """
    path = path.expanduser()
    if not path.is_dir():
        raise InvalidCheckpoint(
            f"{path} isn't a directory: give the directory of a downloaded checkpoint, "
            "with its config.json and *.safetensors files"
        )
    generation_path = path / "generation_config.json"
    generation = JsonFields.read(generation_path) if generation_path.exists() else JsonFields(str(generation_path), {})
    return parse_model_spec(JsonFields.read(path / "config.json"), generation)


def parse_model_spec(config: JsonFields, generation: JsonFields) -> ModelSpec:
    """Return the description in the fields of config.json and generation_config.json.

    Raises:
        InvalidCheckpoint: as `load_model_spec`.
    """
    name, architecture = _architecture(config)
    config = config.converted(partial(convert_config, name, architecture))
    _refuse_unsupported(config)
    family = architecture.family
    spec = _model_spec(name, family, config.with_defaults(family.defaults), generation)
    return msgspec.structs.replace(spec, decoder=architecture.decoder)


def _architecture(config: JsonFields) -> tuple[str, Architecture]:
    for name in map(str, config.list_("architectures") or []):
        if name in _FAMILIES:
            return name, Architecture(_FAMILIES[name])
        plugin = plugin_architecture(name)
        if plugin is not None:
            return name, plugin
    raise config.error("architectures", f"one of {', '.join([*_FAMILIES, *plugin_architectures()])}")


def _refuse_unsupported(config: JsonFields) -> None:
    for key, supported in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        if config.get(key) not in (None, supported):
            raise config.error(key, repr(supported))


def _model_spec(architecture: str, family: Family, config: JsonFields, generation: JsonFields) -> ModelSpec:
    num_heads = config.int_("num_attention_heads")
    num_kv_heads = config.optional_int("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    rope_theta, rope_scaling = parse_rope(config)
    attention_bias = family.qkv_bias is None and config.bool_("attention_bias")
    return ModelSpec(
        architecture=architecture,
        model_type=str(config.get("model_type") or architecture.removesuffix("ForCausalLM").lower()),
        vocab_size=config.int_("vocab_size"),
        hidden_size=config.int_("hidden_size"),
        intermediate_size=config.int_("intermediate_size"),
        num_layers=config.int_("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, num_heads),
        rms_norm_eps=config.float_("rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        layer_windows=_layer_windows(family, config),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and config.bool_("mlp_bias"),
        qk_norm=family.qk_norm,
        tie_word_embeddings=config.bool_("tie_word_embeddings"),
        hidden_act="silu",
        max_position_embeddings=config.int_("max_position_embeddings"),
        dtype=_dtype(config),
        bos_token_id=config.optional_int("bos_token_id", low=0),
        eos_token_ids=_token_ids(generation, "eos_token_id") or _token_ids(config, "eos_token_id"),
        generation_defaults={key: generation.get(key) for key in _GENERATION_KEYS if generation.get(key) is not None},
        moe=parse_moe(architecture, config),
        quantization=parse_quantization(config),
    )


def _head_dim(config: JsonFields, num_heads: int) -> int:
    given = config.optional_int("head_dim")
    if given is None and config.int_("hidden_size") % num_heads:
        raise config.error("hidden_size", f"a multiple of num_attention_heads={num_heads}, or an explicit head_dim")
    head_dim = given or config.int_("hidden_size") // num_heads
    if head_dim % 2 and given is None:
        even = f"an even hidden_size / num_attention_heads, for the rotary embedding, not {head_dim}"
        raise config.error("num_attention_heads", even)
    if head_dim % 2:
        raise config.error("head_dim", "an even number, for the rotary embedding")
    return head_dim


def _dtype(config: JsonFields) -> CheckpointDType:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    name = config.get(key) or "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise config.error(key, "float32, bfloat16 or float16")
    return name


def _token_ids(fields: JsonFields, key: str) -> list[int]:
    value = fields.get(key)
    if value is None:
        return []
    if isinstance(value, int):
        return [fields.int_(key, low=0)]
    token_ids = fields.list_(key) or []
    if not all(
        isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in token_ids
    ):
        raise fields.error(key, "a token id or a list of token ids, integers from 0 on")
    return token_ids


def _layer_windows(family: Family, config: JsonFields) -> list[int | None]:
    num_layers = config.int_("num_hidden_layers")
    full: list[int | None] = [None] * num_layers
    if family.windows == "none" or (family.windows != "every layer" and not config.bool_("use_sliding_window")):
        return full
    window = config.optional_int("sliding_window")
    if window is None:
        return full
    layer_types = config.list_("layer_types")
    if family.windows != "by layer":
        if layer_types is not None and any(layer_type != "sliding_attention" for layer_type in layer_types):
            raise config.error("layer_types", "sliding_attention for every layer of this architecture")
        return [window] * num_layers
    if layer_types is None:
        first = config.int_("max_window_layers", low=0)
        return [window if layer >= first else None for layer in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if len(layer_types) != num_layers or any(layer_type not in known for layer_type in layer_types):
        expected = f"a list of {num_layers} entries (num_hidden_layers), each full_attention or sliding_attention"
        raise config.error("layer_types", expected)
    return [window if layer_type == "sliding_attention" else None for layer_type in layer_types]
