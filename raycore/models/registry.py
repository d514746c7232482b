"""The families that raycore serves, and the description of a checkpoint's model: `config.json` and
`generation_config.json`, parsed and validated.

Handles the differences between the formats of transformers 4 and 5, so that other modules see one `ModelSpec`. Absent
keys get the defaults of transformers' configuration classes. Doesn't import torch or read weights.
"""

from __future__ import annotations

__all__ = ["FAMILIES", "load_model_spec", "parse_model_spec", "pools_by_itself", "read_config"]

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from raycore.checkpoint.gguf.config import config_json, generation_json
from raycore.checkpoint.gguf.header import is_gguf, read_gguf
from raycore.checkpoint.json_fields import JsonFields, shortened
from raycore.checkpoint.quantization import parse_quantization
from raycore.checkpoint.sentence_transformers import MODULES_FILE
from raycore.class_paths import import_class
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.extras import is_installed, missing_package
from raycore.models.deepseek_v2 import DEEPSEEK_V2
from raycore.models.deepseek_v3 import DEEPSEEK_V3
from raycore.models.encoders import ENCODERS, encoder_form, encoder_pooling
from raycore.models.ernie4_5 import ERNIE4_5
from raycore.models.family import Family, converted, plugin_families, plugin_family
from raycore.models.gemma2 import GEMMA2
from raycore.models.gemma3 import GEMMA3
from raycore.models.glm4 import GLM, GLM4
from raycore.models.glm4_moe import GLM4_MOE
from raycore.models.glm4_moe_lite import GLM4_MOE_LITE
from raycore.models.gpt_oss import GPT_OSS
from raycore.models.granite import GRANITE
from raycore.models.granite_hybrid import GRANITE_HYBRID
from raycore.models.hunyuan import HUNYUAN
from raycore.models.llama import LLAMA
from raycore.models.minimax_m2 import MINIMAX_M2
from raycore.models.ministral3 import MINISTRAL3
from raycore.models.mistral import MISTRAL
from raycore.models.mixtral import MIXTRAL
from raycore.models.multimodal import (
    GEMMA3_MULTIMODAL,
    MISTRAL3,
    QWEN2_5_VL,
    QWEN3_5_MOE_MULTIMODAL,
    QWEN3_5_MULTIMODAL,
    QWEN3_VL,
    text_family,
    text_fields,
)
from raycore.models.olmo2 import OLMO2
from raycore.models.olmo3 import OLMO3
from raycore.models.phi3 import PHI3
from raycore.models.pooling_forms import PoolingChoice, decoder_pooling, pooling_form
from raycore.models.qwen2 import QWEN2
from raycore.models.qwen2_moe import QWEN2_MOE
from raycore.models.qwen3 import QWEN3
from raycore.models.qwen3_moe import QWEN3_MOE
from raycore.models.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from raycore.models.rotation import head_dim
from raycore.models.seed_oss import SEED_OSS
from raycore.models.smollm3 import SMOLLM3
from raycore.models.spec import CheckpointDType, ModelSpec, Parts, Roots
from raycore.models.vaultgemma import VAULTGEMMA
from raycore.models.vision import without_vision
from raycore.plugins import MODELS

ModelImpl = Literal["auto", "raycore", "transformers"]

FAMILIES: Mapping[str, Family] = {
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Ernie4_5ForCausalLM": ERNIE4_5,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3_MULTIMODAL,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM4,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "HunYuanDenseV1ForCausalLM": HUNYUAN,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "Phi3ForCausalLM": PHI3,
    "SeedOssForCausalLM": SEED_OSS,
    "SmolLM3ForCausalLM": SMOLLM3,
    "LlamaForCausalLM": LLAMA,
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "Ministral3ForCausalLM": MINISTRAL3,
    "MistralForCausalLM": MISTRAL,
    "Mistral3ForConditionalGeneration": MISTRAL3,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5_MULTIMODAL,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE_MULTIMODAL,
    "VaultGemmaForCausalLM": VAULTGEMMA,
}
"""By the name of the architecture in config.json."""
GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> JsonFields:
    """Read config.json in the checkpoint directory `path`, or what a GGUF file has instead.

    `overrides`: what counts instead of its values. Objects are merged.

    Raises:
        InvalidCheckpoint: the directory or the file is missing or can't be read.
        InvalidConfig: the package that reads a GGUF file isn't installed.
    """
    if is_gguf(path):
        config = JsonFields(f"{path} as config.json", config_json(read_gguf(path)))
        return config.converted(lambda values: merged(values, overrides)) if overrides else config
    if not (path / "config.json").exists():
        problem = "has no config.json" if path.is_dir() else "isn't a directory"
        raise InvalidCheckpoint(
            f"{path} {problem}: give the directory of a downloaded checkpoint, with its config.json and *.safetensors "
            "files, or a .gguf file"
        )
    config = JsonFields.read(path / "config.json")
    return config.converted(lambda values: merged(values, overrides)) if overrides else config


def load_model_spec(
    path: Path,
    model_impl: ModelImpl = "raycore",
    max_length: int | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    pooling: PoolingChoice | None = None,
    config_path: Path | None = None,
) -> ModelSpec:
    """Read the description of the model in the checkpoint directory `path`, or in the GGUF file `path`.

    Args:
        model_impl: the option.
        max_length: for models that transformers' code computes, the maximum number of tokens of a sequence. None: the
            model's.
        overrides: as in `read_config`.
        pooling: what the user asks of a model that pools. None: the model generates.
        config_path: another directory, whose config.json and generation_config.json count.

    Raises:
        InvalidCheckpoint: the directory or its config.json is missing or can't be read, or raycore doesn't support the
            model. For an unsupported model, the message names the file, the key and the key's value.
    """
    path = path.expanduser()
    described = path if config_path is None else config_path.expanduser()
    config = read_config(described, overrides)
    generation = _read_generation(described)
    encoder = next(filter(encoder_form, map(str, config.list_("architectures") or [])), None)
    if encoder is not None:
        return _encoder_spec(encoder, path, config, generation, pooling)
    if pooling is not None:
        return _pooling_spec(path, config, generation, pooling)
    if model_impl == "raycore" or (model_impl == "auto" and _find_family(config) is not None):
        return parse_model_spec(config, generation)
    if is_gguf(path):
        raise InvalidConfig(
            f"model_impl={model_impl!r} can't be used with {path}: transformers' code reads no GGUF files"
        )
    if overrides or described != path:
        given = f"hf_overrides={shortened(dict(overrides))}" if overrides else f"hf_config_path={str(config_path)!r}"
        raise InvalidConfig(
            f"{given} can't be used with a model that transformers' code computes, which reads its config.json itself: "
            "omit it, or edit a copy"
        )
    return _described_by_transformers(path, config, generation, max_length)


def _read_generation(path: Path) -> JsonFields:
    if is_gguf(path):
        return JsonFields(f"{path} as generation_config.json", generation_json(read_gguf(path)))
    file = path / "generation_config.json"
    return JsonFields.read(file) if file.exists() else JsonFields(str(file), {})


def merged(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with those of `overrides` in place of its own. Objects in both are merged."""
    result = dict(values)
    for key, value in overrides.items():
        own = result.get(key)
        if isinstance(own, dict) and isinstance(value, Mapping):
            value = merged(cast("dict[str, Any]", own), cast("Mapping[str, Any]", value))
        result[key] = value
    return result


def pools_by_itself(path: Path, config: JsonFields) -> bool:
    """Whether the model in the checkpoint directory `path` pools unless the user asks for something else.

    An architecture that raycore has a family for generates, unless there are sentence-transformers' files.
    """
    if (path / MODULES_FILE).is_file():
        return True
    if _find_family(config) is not None:
        return False
    names = list(map(str, config.list_("architectures") or []))
    forms = map(pooling_form, names)
    return any(map(encoder_form, names)) or any(form is not None and form.form != "generate" for form in forms)


def _encoder_spec(
    name: str, path: Path, config: JsonFields, generation: JsonFields, choice: PoolingChoice | None
) -> ModelSpec:
    """Return the description of an encoder, whose architecture has this name."""
    form = encoder_form(name)
    assert form is not None, "it is the name of an encoder"
    if choice is None:
        raise config.error("architectures", "a decoder, because runner='generate': encoders pool, so omit it")
    spec = _model_spec(name, form.family, config.with_defaults(form.family.defaults), generation)
    return msgspec.structs.replace(spec, pooling=encoder_pooling(spec, config, path, choice))


def _pooling_spec(path: Path, config: JsonFields, generation: JsonFields, choice: PoolingChoice) -> ModelSpec:
    """Return the description of a decoder that pools, from a checkpoint with or without a head for texts."""
    for name in map(str, config.list_("architectures") or []):
        form = pooling_form(name)
        if form is None:
            continue
        has_others = "text_config" in config and form.form != "generate"
        base = form.base.replace("ForCausalLM", "ForConditionalGeneration") if has_others else form.base
        if (FAMILIES.get(base) or plugin_family(base)) is None:
            continue
        spec = parse_model_spec(config.converted(_with_architecture(base)), generation)
        others = [spec.names.roots, *spec.names.other_roots, Roots(), Roots("", spec.names.roots.head)]
        names = msgspec.structs.replace(spec.names, other_roots=list(dict.fromkeys(others))[1:])
        spec = msgspec.structs.replace(spec, architecture=name, names=names)
        return msgspec.structs.replace(spec, pooling=decoder_pooling(spec, form.form, config, path, choice))
    stems = ", ".join(name.removesuffix("ForCausalLM") for name in FAMILIES if name.endswith("ForCausalLM"))
    raise config.error(
        "architectures",
        "a decoder that raycore has a family for, as …Model, …ForCausalLM, …ForSequenceClassification, "
        f"…ForTokenClassification or …RewardModel, where … is one of {stems}; or an encoder, as …Model, …ForMaskedLM, "
        f"…ForSequenceClassification or …ForTokenClassification, where … is one of {', '.join(ENCODERS)}",
    )


def _with_architecture(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {**values, "architectures": [name]}


def parse_model_spec(config: JsonFields, generation: JsonFields) -> ModelSpec:
    """Return the description in the fields of config.json and generation_config.json.

    Raises:
        InvalidCheckpoint: as `load_model_spec`.
    """
    name, family = _family(config)
    config = config.converted(partial(converted, name, family))
    describe = None if config.get("vision_config") is None else family.vision
    vision = None if describe is None else describe(config)
    if family.text_families:
        config = text_fields(config)
        family = text_family(family, config)
    spec = _model_spec(name, family, config.with_defaults(family.defaults), generation)
    return without_vision(spec) if vision is None else msgspec.structs.replace(spec, vision=vision)


def _family(config: JsonFields) -> tuple[str, Family]:
    found = _find_family(config)
    if found is None:
        raise config.error("architectures", f"one of {_known()}")
    return found


def _find_family(config: JsonFields) -> tuple[str, Family] | None:
    for name in map(str, config.list_("architectures") or []):
        family = FAMILIES.get(name) or plugin_family(name)
        if family is not None:
            return name, family
    return None


def _known() -> str:
    return ", ".join([*FAMILIES, *plugin_families()])


def _described_by_transformers(
    path: Path, config: JsonFields, generation: JsonFields, max_length: int | None
) -> ModelSpec:
    if not is_installed("transformers"):
        needed = missing_package("others need", "transformers", "transformers")
        raise config.error("architectures", f"one of {_known()}; {needed}")
    # it imports torch, which only workers do for raycore's own families
    describe = import_class("model_impl", "raycore.fallback.description.describe", MODELS)
    return describe(path, _tokens_and_defaults(config, generation), max_length)


def _tokens_and_defaults(config: JsonFields, generation: JsonFields) -> dict[str, Any]:
    return {
        "bos_token_id": config.optional_int("bos_token_id", low=0),
        "eos_token_ids": _token_ids(generation, "eos_token_id") or _token_ids(config, "eos_token_id"),
        "generation_defaults": generation_defaults(generation),
    }


def generation_defaults(generation: JsonFields) -> dict[str, Any]:
    """Return the sampling parameters in a generation_config.json, under its names."""
    return {key: generation.get(key) for key in GENERATION_KEYS if generation.get(key) is not None}


def _model_spec(architecture: str, family: Family, config: JsonFields, generation: JsonFields) -> ModelSpec:
    num_heads = config.int_("num_attention_heads")
    num_kv_heads = config.optional_int("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    parts = family.parts(config)
    return ModelSpec(
        architecture=architecture,
        model_type=str(config.get("model_type") or architecture.removesuffix("ForCausalLM").lower()),
        vocab_size=config.int_("vocab_size"),
        hidden_size=config.int_("hidden_size"),
        intermediate_size=config.int_("intermediate_size"),
        num_layers=config.int_("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim(config),
        rms_norm_eps=config.float_("rms_norm_eps"),
        tie_word_embeddings=config.bool_("tie_word_embeddings"),
        max_position_embeddings=config.int_("max_position_embeddings"),
        dtype=_dtype(config),
        **_tokens_and_defaults(config, generation),
        quantization=parse_quantization(config),
        decoder=family.decoder,
        **{field: getattr(parts, field) for field in Parts.__struct_fields__},
    )


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
