"""The families that raycore serves, and the description of a model of one of them: the fields of `config.json` and
`generation_config.json`, parsed and validated.

Handles the differences between the formats of transformers 4 and 5, so that other modules see one `ModelSpec`. Absent
keys get the defaults of transformers' configuration classes. Doesn't import torch or read files.
"""

from __future__ import annotations

__all__ = [
    "FAMILIES",
    "OTHER_FORMS",
    "described",
    "find_family",
    "find_own_family",
    "known_families",
    "parse_model_spec",
    "tokens_and_defaults",
]

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.afmoe import AFMOE
from raycore.models.apertus import APERTUS
from raycore.models.arcee import ARCEE
from raycore.models.bailing_hybrid import BAILING_HYBRID
from raycore.models.bamba import BAMBA
from raycore.models.cohere2 import COHERE, COHERE2
from raycore.models.cohere2_moe import COHERE2_MOE
from raycore.models.cwm import CWM
from raycore.models.deepseek_v2 import DEEPSEEK_V2
from raycore.models.deepseek_v3 import DEEPSEEK_V3
from raycore.models.deepseek_v32 import DEEPSEEK_V32
from raycore.models.dots1 import DOTS1
from raycore.models.ernie4_5 import ERNIE4_5
from raycore.models.ernie4_5_moe import ERNIE4_5_MOE
from raycore.models.exaone4 import EXAONE4
from raycore.models.exaone_moe import EXAONE_MOE
from raycore.models.falcon import FALCON
from raycore.models.falcon_h1 import FALCON_H1
from raycore.models.family import Family, converted, plugin_families, plugin_family
from raycore.models.gemma import GEMMA
from raycore.models.gemma2 import GEMMA2
from raycore.models.gemma3 import GEMMA3
from raycore.models.gemma3n import GEMMA3N
from raycore.models.gemma4 import GEMMA4, GEMMA4_UNIFIED
from raycore.models.glm4 import GLM, GLM4
from raycore.models.glm4_moe import GLM4_MOE
from raycore.models.glm4_moe_lite import GLM4_MOE_LITE
from raycore.models.glm_moe_dsa import GLM_MOE_DSA
from raycore.models.gpt_neox import GPT_NEOX
from raycore.models.gpt_oss import GPT_OSS
from raycore.models.gptj import GPTJ
from raycore.models.granite import GRANITE
from raycore.models.granite_hybrid import GRANITE_HYBRID
from raycore.models.granite_moe import GRANITE_MOE
from raycore.models.helium import HELIUM
from raycore.models.hunyuan import HUNYUAN
from raycore.models.hy_v3 import HY_V3
from raycore.models.hyperclovax import HYPERCLOVAX
from raycore.models.jamba import JAMBA
from raycore.models.kimi_linear import KIMI_LINEAR
from raycore.models.laguna import LAGUNA
from raycore.models.lfm2 import LFM2, LFM2_MOE
from raycore.models.lfm3 import LFM3
from raycore.models.llama import LLAMA
from raycore.models.llama4 import LLAMA4
from raycore.models.mamba import FALCON_MAMBA, MAMBA
from raycore.models.mamba2 import MAMBA2
from raycore.models.mimo import MIMO
from raycore.models.mimo_v2_flash import MIMO_V2_FLASH
from raycore.models.minimax import MINIMAX
from raycore.models.minimax_m2 import MINIMAX_M2
from raycore.models.ministral3 import MINISTRAL3
from raycore.models.mistral import MINISTRAL, MISTRAL
from raycore.models.mistral4 import MISTRAL4
from raycore.models.mixtral import MIXTRAL
from raycore.models.multimodal import (
    GEMMA3_MULTIMODAL,
    GEMMA3N_MULTIMODAL,
    GEMMA4_MULTIMODAL,
    GEMMA4_UNIFIED_MULTIMODAL,
    KIMI_K25,
    LLAMA4_MULTIMODAL,
    MINIMAX_M3_VL,
    MISTRAL3,
    QWEN2_5_VL,
    QWEN3_5_MOE_MULTIMODAL,
    QWEN3_5_MULTIMODAL,
    QWEN3_VL,
    QWEN3_VL_MOE,
    STEP3P7,
    text_family,
    text_fields,
)
from raycore.models.nemotron import JAIS2, NEMOTRON
from raycore.models.nemotron_h import NEMOTRON_H
from raycore.models.olmo import OLMO
from raycore.models.olmo2 import OLMO2
from raycore.models.olmo3 import OLMO3
from raycore.models.olmo_hybrid import OLMO_HYBRID
from raycore.models.olmoe import OLMOE
from raycore.models.phi import PHI
from raycore.models.phi3 import PHI3
from raycore.models.quantization import parse_quantization
from raycore.models.qwen2 import QWEN2
from raycore.models.qwen2_moe import QWEN2_MOE
from raycore.models.qwen3 import QWEN3
from raycore.models.qwen3_moe import QWEN3_MOE
from raycore.models.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from raycore.models.rotation import head_dim
from raycore.models.seed_oss import SEED_OSS
from raycore.models.smollm3 import SMOLLM3
from raycore.models.solar_open import SOLAR_OPEN
from raycore.models.spec import CheckpointDType, ModelSpec, Parts
from raycore.models.stablelm import STABLELM
from raycore.models.starcoder2 import STARCODER2
from raycore.models.step3p5 import STEP3P5
from raycore.models.vaultgemma import VAULTGEMMA
from raycore.parts.images.models import without_vision

FAMILIES: Mapping[str, Family] = {
    "AfmoeForCausalLM": AFMOE,
    "ApertusForCausalLM": APERTUS,
    "ArceeForCausalLM": ARCEE,
    "BailingHybridForCausalLM": BAILING_HYBRID,
    "BailingMoeV3ForCausalLM": BAILING_HYBRID,
    "BambaForCausalLM": BAMBA,
    "Cohere2ForCausalLM": COHERE2,
    "Cohere2MoeForCausalLM": COHERE2_MOE,
    "CohereForCausalLM": COHERE,
    "CwmForCausalLM": CWM,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV32ForCausalLM": DEEPSEEK_V32,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Dots1ForCausalLM": DOTS1,
    "Ernie4_5ForCausalLM": ERNIE4_5,
    "Ernie4_5_MoeForCausalLM": ERNIE4_5_MOE,
    "Exaone4ForCausalLM": EXAONE4,
    "ExaoneMoeForCausalLM": EXAONE_MOE,
    "FalconForCausalLM": FALCON,
    "FalconH1ForCausalLM": FALCON_H1,
    "FalconMambaForCausalLM": FALCON_MAMBA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3_MULTIMODAL,
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma3nForConditionalGeneration": GEMMA3N_MULTIMODAL,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4_MULTIMODAL,
    "Gemma4UnifiedForCausalLM": GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": GEMMA4_UNIFIED_MULTIMODAL,
    "GemmaForCausalLM": GEMMA,
    "Glm4ForCausalLM": GLM4,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "GlmForCausalLM": GLM,
    "GlmMoeDsaForCausalLM": GLM_MOE_DSA,
    "GPTJForCausalLM": GPTJ,
    "GPTNeoXForCausalLM": GPT_NEOX,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE,
    "HeliumForCausalLM": HELIUM,
    "HunYuanDenseV1ForCausalLM": HUNYUAN,
    "HyperCLOVAXForCausalLM": HYPERCLOVAX,
    "HYV3ForCausalLM": HY_V3,
    "Jais2ForCausalLM": JAIS2,
    "JambaForCausalLM": JAMBA,
    "Kimi_K25ForConditionalGeneration": KIMI_K25,
    "KimiK25ForConditionalGeneration": KIMI_K25,
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "LagunaForCausalLM": LAGUNA,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2_MOE,
    "Lfm3ForCausalLM": LFM3,
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4_MULTIMODAL,
    "LlamaForCausalLM": LLAMA,
    "Mamba2ForCausalLM": MAMBA2,
    "MambaForCausalLM": MAMBA,
    "MiMoForCausalLM": MIMO,
    "MiMoV2FlashForCausalLM": MIMO_V2_FLASH,
    "MiniMaxForCausalLM": MINIMAX,
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "MiniMaxM3SparseForConditionalGeneration": MINIMAX_M3_VL,
    "Ministral3ForCausalLM": MINISTRAL3,
    "MinistralForCausalLM": MINISTRAL,
    "Mistral3ForConditionalGeneration": MISTRAL3,
    "Mistral4ForCausalLM": MISTRAL4,
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MIXTRAL,
    "NemotronForCausalLM": NEMOTRON,
    "NemotronHForCausalLM": NEMOTRON_H,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "OlmoForCausalLM": OLMO,
    "OlmoeForCausalLM": OLMOE,
    "OlmoHybridForCausalLM": OLMO_HYBRID,
    "Phi3ForCausalLM": PHI3,
    "PhiForCausalLM": PHI,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5_MULTIMODAL,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE_MULTIMODAL,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_VL_MOE,
    "SeedOssForCausalLM": SEED_OSS,
    "SmolLM3ForCausalLM": SMOLLM3,
    "SolarOpenForCausalLM": SOLAR_OPEN,
    "StableLmForCausalLM": STABLELM,
    "Starcoder2ForCausalLM": STARCODER2,
    "Step3p5ForCausalLM": STEP3P5,
    "Step3p7ForConditionalGeneration": STEP3P7,
    "VaultGemmaForCausalLM": VAULTGEMMA,
}
"""By the name of the architecture in config.json."""
OTHER_FORMS = ("exaone", "sarvam_moe")
"""Types of models whose checkpoints, as transformers saves them, name the architecture of a family, and have other
tensors."""
GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def parse_model_spec(config: JsonFields, generation: JsonFields) -> ModelSpec:
    """Return the description in the fields of config.json and generation_config.json.

    Raises:
        InvalidCheckpoint: raycore doesn't support the model. The message names the file, the key and the key's value.
    """
    name, family = _family(config)
    config = config.converted(partial(converted, name, family, config.source))
    describe = None if config.get("vision_config") is None else family.vision
    vision = None if describe is None else describe(config)
    if family.text_families:
        config = text_fields(config)
        family = text_family(family, config)
        config = config.converted(partial(converted, name, family, config.source))
    spec = described(name, family, config.with_defaults(family.defaults), generation)
    return without_vision(spec) if vision is None else msgspec.structs.replace(spec, vision=vision)


def _family(config: JsonFields) -> tuple[str, Family]:
    found = find_family(config)
    if config.get("model_type") in OTHER_FORMS:
        raise config.error(
            "model_type", "a type whose tensors raycore reads: model_impl='transformers' computes this one"
        )
    if found is None:
        raise config.error("architectures", f"one of {known_families()}")
    if (other := _other_setting(config, found[1])) is not None:
        known = found[1].only[other]
        raise config.error(other, f"{'null' if known is None else known}: model_impl='transformers' computes others")
    return found


def find_own_family(config: JsonFields) -> tuple[str, Family] | None:
    """Return the name and the family of a checkpoint that raycore computes itself. None: it doesn't, because the
    checkpoint is of another form, or has settings that its family leaves to transformers' code.
    """
    found = find_family(config)
    return None if found is None or _other_setting(config, found[1]) is not None else found


def _other_setting(config: JsonFields, family: Family) -> str | None:
    others = (key for key, known in family.only.items() if config.get(key) not in (None, known))
    return next(others, None)


def find_family(config: JsonFields) -> tuple[str, Family] | None:
    """Return the name and the family of the first architecture in config.json that has one. None: none has, or the
    checkpoint is of another form.
    """
    if config.get("model_type") in OTHER_FORMS:
        return None
    for name in map(str, config.list_("architectures") or []):
        family = FAMILIES.get(name) or plugin_family(name)
        if family is not None:
            return name, family
    return None


def known_families() -> str:
    """Return the names of all architectures that have a family, as text of an error."""
    return ", ".join([*FAMILIES, *plugin_families()])


def tokens_and_defaults(config: JsonFields, generation: JsonFields) -> dict[str, Any]:
    """Return those fields of a `ModelSpec` that generation_config.json may have, by name."""
    return {
        "bos_token_id": config.optional_int("bos_token_id", low=0),
        "eos_token_ids": _token_ids(generation, "eos_token_id") or _token_ids(config, "eos_token_id"),
        "generation_defaults": generation_defaults(generation),
    }


def generation_defaults(generation: JsonFields) -> dict[str, Any]:
    """Return the sampling parameters in a generation_config.json, under its names."""
    return {key: generation.get(key) for key in GENERATION_KEYS if generation.get(key) is not None}


def described(architecture: str, family: Family, config: JsonFields, generation: JsonFields) -> ModelSpec:
    """Return the description of a model of a family, whose defaults `config` has."""
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
        **tokens_and_defaults(config, generation),
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
