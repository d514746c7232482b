"""What config.json and generation_config.json of a Hugging Face checkpoint would say of the model in a GGUF file."""

from __future__ import annotations

__all__ = ["config_json", "generation_json"]

import math
import struct
from typing import Any

from raycore.checkpoint.gguf.architectures import Architecture, architecture_of, num_layers, same_in_layers
from raycore.checkpoint.gguf.header import PLAIN, GgufFile, shortest_float
from raycore.checkpoint.gguf.tensors import named_tensors
from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.models.quantization import GGUF_SCHEMES, of_any_expert

_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ENDS = frozenset(
    [
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<|return|>"),
        *("<end_of_turn>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<EOT>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    ]
)
"""Texts of tokens that end an answer in some models' conversations. A file names only some of its model's."""
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that may have such texts."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all models with Llama 3's scaling have."""
_WITH_NORMS = {"use_qk_norm": ("command-r", "glm4moe"), "qk_layernorm": ("stablelm",)}
"""By the key of config.json that says whether heads have norms: the architectures that have it."""
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the models whose attention's scale follows from the hidden size: those of 27B."""


def config_json(file: GgufFile) -> dict[str, Any]:
    """Return what config.json would say.

    Raises:
        InvalidCheckpoint: raycore has no family for the model, or the metadata lack a value or have a wrong one.
    """
    return _Config(file).whole()


def generation_json(file: GgufFile) -> dict[str, Any]:
    """Return what generation_config.json would say: tokens that end outputs, and sampling parameters."""
    fields = JsonFields(str(file.path), file.metadata)
    found: dict[str, Any] = {}
    for key, name in _SAMPLING.items():
        value = fields.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise fields.error(key, "a number")
        if value is not None:
            found[name] = shortest_float(value) if isinstance(value, float) else value
    ends = _end_ids(file, fields)
    return found | ({"eos_token_id": ends} if ends else {})


def _end_ids(file: GgufFile, fields: JsonFields) -> list[int]:
    keys = [f"tokenizer.ggml.{key}" for key in _END_IDS]
    ids = [found for key in keys if (found := fields.optional_int(key, low=0)) is not None]
    texts, kinds = (file.array(f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type"))
    marked = (_CONTROL, _USER_DEFINED)
    ids += [number for number, kind in enumerate(kinds[: len(texts)]) if kind in marked and texts[number] in _ENDS]
    return list(dict.fromkeys(ids))


class _Config:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture: Architecture = architecture_of(file)
        self._name = str(file.metadata["general.architecture"])
        self._fields = JsonFields(str(file.path), file.metadata)

    def whole(self) -> dict[str, Any]:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            found = "is missing" if embedding is None else f"has shape {embedding.shape}"
            raise InvalidCheckpoint(f"{self._file.path}: tensor token_embd.weight {found}: expected two dimensions")
        hidden, num_heads = self._int("embedding_length"), self._int("attention.head_count")
        most = len(self._file.tensors)
        if self._int("block_count") > most:
            raise self._fields.error(self._key("block_count"), f"at most {most}, the number of the files' tensors")
        config: dict[str, Any] = {
            "architectures": [self._architecture.name],
            "model_type": self._architecture.model_type,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._int("feed_forward_length"),
            "num_hidden_layers": num_layers(self._fields, self._name),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._num_kv_heads() or num_heads,
            "head_dim": self._head_dim(),
            "max_position_embeddings": self._int("context_length"),
            self._architecture.eps: self._eps(),
            "rope_theta": self._optional_float("rope.freq_base") or 10000.0,
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "torch_dtype": self._dtype(),
            "bos_token_id": self._fields.optional_int("tokenizer.ggml.bos_token_id", low=0),
            "eos_token_id": self._fields.optional_int("tokenizer.ggml.eos_token_id", low=0),
        }
        config |= {**self._kept_layers(), **self._architecture.always}
        return config | self._biases() | self._rotation(config) | self._own(config)

    def _kept_layers(self) -> dict[str, Any]:
        """Return which layers' weights can be kept as they are, for `parse_quantization`."""
        head = "lm_head.weight" if "output.weight" in self._file.tensors else "model.embed_tokens.weight"
        kept = {
            of_any_expert(name.removesuffix(".weight")): tensor.dtype
            for name, tensor in named_tensors(self._file).items()
            if tensor.dtype in GGUF_SCHEMES and (".layers." in name or name == head) and len(tensor.shape) == 2
        }
        return {"quantization_config": {"quant_method": "gguf", "layers": kept}} if kept else {}

    def _own(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return what only some families have."""
        found: dict[str, Any] = {}
        for key, own in self._architecture.keys.items():
            value = self._fields.get(self._key(own))
            if isinstance(value, bool):
                found[key] = value
            elif value is not None:
                found[key] = self._float(own) if isinstance(value, float) else self._fields.int_(self._key(own), low=0)
        return found | self._layer_types() | self._of_family(config)

    def _layer_types(self) -> dict[str, Any]:
        """Return which layers have attention, or attention to a window, where the metadata have a list of that."""
        heads, pattern = self._key("attention.head_count_kv"), self._key("attention.sliding_window_pattern")
        if self._name in ("lfm2", "lfm2moe"):
            numbers = self._fields.list_(heads) if isinstance(self._fields.get(heads), list) else []
            return {"layer_types": ["full_attention" if each else "conv" for each in numbers or []] or None}
        if isinstance(self._fields.get(pattern), list):
            windows = self._fields.list_(pattern) or []
            return {"layer_types": ["sliding_attention" if each else "full_attention" for each in windows]}
        if self._fields.get(pattern) is not None:
            return {"sliding_window_pattern": self._int("attention.sliding_window_pattern")}
        return {}

    def _of_family(self, config: dict[str, Any]) -> dict[str, Any]:
        if self._name in ("gemma2", "gemma3"):
            return self._gemma(config)
        if self._name == "granite":
            return {
                "embedding_multiplier": self._optional_float("embedding_scale") or 1.0,
                "residual_multiplier": self._optional_float("residual_scale") or 1.0,
                "attention_multiplier": self._optional_float("attention.scale") or config["head_dim"] ** -0.5,
                "logits_scaling": self._optional_float("logit_scale") or 1.0,
            }
        if self._name == "phi3" or self._architecture.name == "MistralForCausalLM":
            return {"sliding_window": self._optional_int("attention.sliding_window")}
        if self._optional_int("expert_count") or self._name in ("qwen2moe", "qwen3moe"):
            return self._experts(config)
        return {}

    def _experts(self, config: dict[str, Any]) -> dict[str, Any]:
        count, layers = self._int("expert_count"), range(config["num_hidden_layers"])
        names = [name for layer in layers if (name := f"blk.{layer}.ffn_down_exps.weight") in self._file.tensors]
        stacked = self._file.tensors[names[0]] if names else None
        if stacked is None or stacked.shape[0] != count:
            name = names[0] if names else "blk.0.ffn_down_exps.weight"
            found = "is missing" if stacked is None else f"has shape {stacked.shape}"
            raise self._fields.error(
                self._key("expert_count"), f"the number of experts of tensor {name}, which {found}"
            )
        size = self._optional_int("expert_feed_forward_length") or config["intermediate_size"]
        experts: dict[str, Any] = {"num_experts_per_tok": self._int("expert_used_count"), "moe_intermediate_size": size}
        if self._name == "minimax-m2":
            experts["intermediate_size"] = size
        shared = self._file.tensors.get(names[0].replace("ffn_down_exps", "ffn_down_shexp"))
        if shared is not None and self._name != "qwen2moe":
            num = shared.shape[-1] // size
            experts |= dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), num)
        if self._name in ("llama", "qwen2moe", "qwen3moe"):
            experts["norm_topk_prob"] = self._name != "qwen2moe"
        if self._name == "llama":
            return experts | {"num_local_experts": count}
        if self._name == "qwen2moe":
            shared = self._optional_int("expert_shared_feed_forward_length") or config["intermediate_size"]
            experts["shared_expert_intermediate_size"] = shared
        return experts | {"num_experts": count}

    def _gemma(self, config: dict[str, Any]) -> dict[str, Any]:
        scalar = config["head_dim"]
        if config["num_hidden_layers"] == _LARGEST_GEMMAS[self._name]:
            scalar = config["hidden_size"] // config["num_attention_heads"]
        own: dict[str, Any] = {
            "query_pre_attn_scalar": scalar,
            "sliding_window": self._optional_int("attention.sliding_window"),
            "attn_logit_softcapping": self._optional_float("attn_logit_softcapping"),
            "final_logit_softcapping": self._optional_float("final_logit_softcapping"),
        }
        if self._name == "gemma3":
            own["rope_local_base_freq"] = self._optional_float("rope.freq_base_swa") or 10000.0
        return own

    def _biases(self) -> dict[str, Any]:
        has_bias, has_own, has_last = (
            f"blk.0.{part}.bias" in self._file.tensors for part in ("attn_q", "attn_output", "ffn_down")
        )
        keys = {"ernie4_5": "use_bias", "qwen2moe": "qkv_bias", "stablelm": "use_qkv_bias", "starcoder2": "use_bias"}
        own: dict[str, Any] = {"attention_out_bias": has_own} if self._name == "seed_oss" else {}
        has_norms = "blk.0.attn_q_norm.weight" in self._file.tensors
        if self._name == "stablelm":  # files say so of others, too
            own["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in self._file.tensors
        own |= {key: has_norms for key in ("use_qk_norm", "qk_layernorm") if self._name in _WITH_NORMS.get(key, ())}
        return own | {keys.get(self._name, "attention_bias"): has_bias, "mlp_bias": has_last}

    def _rotation(self, config: dict[str, Any]) -> dict[str, Any]:
        num_rotated, found = self._optional_int("rope.dimension_count"), dict[str, Any]()
        if num_rotated is not None and num_rotated != config["head_dim"]:
            found["partial_rotary_factor"] = num_rotated / config["head_dim"]
        num_pairs = (num_rotated or config["head_dim"]) // 2
        kind = self._fields.get(self._key("rope.scaling.type"))
        original = self._optional_int("rope.scaling.original_context_length")
        if "rope_freqs.weight" in self._file.tensors:
            found["rope_scaling"] = self._given_factors(config, num_pairs)
        elif "rope_factors_long.weight" in self._file.tensors:
            original = original or config["max_position_embeddings"]
            found["original_max_position_embeddings"] = original
            found["rope_scaling"] = {
                "rope_type": "longrope",
                "short_factor": self._factors("rope_factors_short.weight", num_pairs),
                "long_factor": self._factors("rope_factors_long.weight", num_pairs),
                "attention_factor": self._optional_float("rope.scaling.attn_factor"),
            }
        elif kind == "linear" or (kind is None and self._optional_float("rope.scale_linear")):
            factor = self._optional_float("rope.scaling.factor") or self._optional_float("rope.scale_linear") or 1.0
            found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        elif kind == "yarn":
            found["rope_scaling"] = self._yarn(original)
        elif kind not in (None, "none"):
            raise self._fields.error(self._key("rope.scaling.type"), "none, linear or yarn, or tensors of factors")
        return found

    def _yarn(self, original: int | None) -> dict[str, Any]:
        for key in ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor"):
            if self._fields.get(self._key(key)) is not None:
                raise self._fields.error(self._key(key), "no value: this part of YaRN isn't read from GGUF files")
        factor = self._float("rope.scaling.factor")
        found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        if original is not None:
            found["original_max_position_embeddings"] = original
        multiplier = self._optional_float("rope.scaling.attn_factor")
        if multiplier is not None:
            found["attention_factor"] = multiplier * (1 + 0.1 * math.log(max(1.0, factor)))
        for key in ("beta_fast", "beta_slow"):
            value = self._optional_float(f"rope.scaling.yarn_{key}")
            if value is not None:
                found[key] = value
        return found

    def _given_factors(self, config: dict[str, Any], num_pairs: int) -> dict[str, Any]:
        """Return the scaling whose factors a tensor has: Llama 3's, or one that lists them."""
        factors = self._factors("rope_freqs.weight", num_pairs)
        scaling: dict[str, Any] = {"rope_type": "llama3", "factor": round(max(factors), 6), **_LLAMA3}
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        expected: list[float] = []
        for pair in range(num_pairs):
            frequency = config["rope_theta"] ** -(pair / num_pairs)
            turns = _LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            expected.append(1 / ((1 - kept) / scaling["factor"] + kept))
        if all(math.isclose(*each, rel_tol=1e-5) for each in zip(expected, factors, strict=True)):
            return scaling
        length = config["max_position_embeddings"]
        lists = {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": length}
        return {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, **lists}

    def _factors(self, name: str, num_pairs: int) -> list[float]:
        tensor = self._file.tensors.get(name)
        if tensor is None or tensor.type != "F32" or tensor.shape != (num_pairs,):
            found = "is missing" if tensor is None else f"is {tensor.type}{list(tensor.shape)}"
            raise InvalidCheckpoint(f"{self._file.path}: tensor {name} {found}: expected F32[{num_pairs}]")
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            values = struct.unpack(f"<{num_pairs}f", file.read(tensor.end - tensor.start))
        for value in values:
            if not (math.isfinite(value) and value > 0):
                raise InvalidCheckpoint(f"{tensor.file}: tensor {name} has {value}: expected positive numbers")
        return [shortest_float(value) for value in values]

    def _dtype(self) -> str:
        """Return the dtype that an engine has by default: that of the weights, or bfloat16 for quantized ones."""
        kinds = {tensor.type for tensor in self._file.tensors.values() if len(tensor.shape) > 1}
        if kinds <= {"F32"}:
            return "float32"
        return "float16" if kinds <= set(PLAIN) - {"BF16"} else "bfloat16"

    def _eps(self) -> float:
        kind = "rms_epsilon" if self._architecture.eps == "rms_norm_eps" else "epsilon"
        return self._float(f"attention.layer_norm_{kind}")

    def _num_kv_heads(self) -> int | None:
        """Return the number of heads of keys, which is 0 in layers without attention."""
        key = self._key("attention.head_count_kv")
        numbers = self._fields.list_(key) if isinstance(self._fields.get(key), list) else None
        if not numbers:
            return self._optional_int("attention.head_count_kv")
        fields = JsonFields(self._fields.source, {key: [each for each in numbers if each]})
        return same_in_layers(fields, key)

    def _head_dim(self) -> int:
        key, value = self._optional_int("attention.key_length"), self._optional_int("attention.value_length")
        hidden, num_heads = self._int("embedding_length"), self._int("attention.head_count")
        if key is None and hidden % num_heads:
            raise self._fields.error(self._key("embedding_length"), f"a multiple of {num_heads}, the number of heads")
        found = key or hidden // num_heads
        if value is not None and value != found:
            raise self._fields.error(self._key("attention.value_length"), f"{found}, as keys have")
        return found

    def _key(self, key: str) -> str:
        return f"{self._name}.{key}"

    def _int(self, key: str) -> int:
        return same_in_layers(self._fields, self._key(key))

    def _optional_int(self, key: str) -> int | None:
        """Return a number, or None if there is none or it is 0."""
        return None if self._fields.get(self._key(key)) in (None, 0) else self._int(key)

    def _float(self, key: str) -> float:
        return shortest_float(self._fields.float_(self._key(key)))

    def _optional_float(self, key: str) -> float | None:
        """Return a number, or None if there is none or it is 0."""
        return None if self._fields.get(self._key(key)) in (None, 0) else self._float(key)
