"""Checkpoints that see images, too: their model of texts, and for some of them the encoder of images.

config.json describes the model of texts in `text_config`. Its tensors have one of two prefixes, as transformers 4 and 5
name them. Source: the key mapping of LLaVA in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.deepseek_v3 import DEEPSEEK_V3
from raycore.models.family import Family, check_known
from raycore.models.gemma3 import GEMMA3
from raycore.models.gemma3n import GEMMA3N
from raycore.models.gemma4 import GEMMA4, GEMMA4_UNIFIED
from raycore.models.llama4 import LLAMA4
from raycore.models.minimax_m3 import MINIMAX_M3
from raycore.models.ministral3 import MINISTRAL3
from raycore.models.mistral import MISTRAL
from raycore.models.mistral4 import MISTRAL4
from raycore.models.qwen2 import QWEN2
from raycore.models.qwen3 import QWEN3
from raycore.models.qwen3_moe import QWEN3_MOE
from raycore.models.qwen3_next import QWEN3_5, QWEN3_5_MOE
from raycore.models.rotation import with_axes
from raycore.models.spec import Parts, Roots
from raycore.models.step3p5 import STEP3P5
from raycore.parts.images.models import gemma3_vision, qwen2_5_vision, qwen3_vision

_ROOTS = Roots("language_model.model.", "language_model.lm_head")
_OTHER_ROOTS = [Roots("model.language_model.", "lm_head")]
_IMAGES = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
_QWEN_ROOTS = Roots("model.language_model.", "lm_head")
_QWEN_IMAGES = r"(model\.)?visual\..*"
_GEMMA4_IMAGES = r"(model\.)?(vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio)\..*"
_KIMI_IMAGES = r"(model\.)?(vision_tower|mm_projector)\..*"
_MINIMAX_IMAGES = r"(model\.)?(vision_tower|multi_modal_projector|patch_merge_mlp)\..*"
_LLAMA_IMAGES = r"(model\.)?(vision_model|multi_modal_projector)\..*"
_STEP_IMAGES = r"(model\.)?(vision_model|vit_large_projector|multi_modal_projector)\..*"
_SHARED_KEYS = (
    *("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id"),
)
"""What the whole checkpoint's part of config.json says of the model of texts. It counts if both say something."""


def text_fields(config: JsonFields) -> JsonFields:
    """Return the description of the model of texts in the config.json of a checkpoint that has others.

    Older ones of Qwen2.5-VL have no `text_config`: the whole of config.json describes that model.
    """
    if config.get("text_config") is None:
        return config
    shared = {key: config.get(key) for key in _SHARED_KEYS if config.get(key) is not None}
    return config.child("text_config").converted(lambda values: values | shared)


def text_family(family: Family, text: JsonFields) -> Family:
    """Return the family of the model of texts in a checkpoint of `family`, which has several models.

    Args:
        text: what `text_fields` has returned.
    """
    known = family.text_families
    made = known.get(text.get("model_type") or next(iter(known)))
    if made is None:
        raise text.error("model_type", f"one of {', '.join(known)}")
    return made


def _as_text(
    family: Family, roots: Roots = _ROOTS, others: list[Roots] = _OTHER_ROOTS, images: str = _IMAGES, **defaults: Any
) -> Family:
    """Return a family as the model of texts in checkpoints that have others. `defaults`: those that differ."""

    def parts(config: JsonFields) -> Parts:
        made = family.parts(config)
        names = msgspec.structs.replace(made.names, roots=roots, other_roots=others, images=images)
        return msgspec.structs.replace(made, names=names)

    return replace(family, defaults={**family.defaults, **defaults}, parts=parts)


def _as_tied_text(family: Family) -> Family:
    return _as_text(family, tie_word_embeddings=True)


def _as_qwen_text(family: Family) -> Family:
    return _as_text(family, _QWEN_ROOTS, [Roots()], _QWEN_IMAGES)


def _with_axes(family: Family, default: list[int], *, is_interleaved: bool = False, **defaults: Any) -> Family:
    """Return a family as Qwen's model of texts beside images, whose tokens have three positions.

    Args:
        default: the sections where config.json has none.
        is_interleaved: see `Rotation`.
    """
    text = _as_qwen_text(family)

    def parts(config: JsonFields) -> Parts:
        made = text.parts(config)
        rotations = [
            None if each is None else with_axes(each, config, default, is_interleaved=is_interleaved)
            for each in made.rotations
        ]
        return msgspec.structs.replace(made, rotations=rotations)

    return replace(text, defaults={**text.defaults, **defaults}, parts=parts)


def _qwen3_moe_parts(config: JsonFields) -> Parts:
    """Return the parts of Qwen3-MoE, whose stacked experts have a row for each input in such checkpoints.

    transformers 5 saves them with a row for each output.
    """
    check_known(config, {"norm_topk_prob": True})
    made = QWEN3_MOE.parts(config)
    moe = None if made.moe is None else msgspec.structs.replace(made.moe, is_transposed=True)
    return msgspec.structs.replace(made, moe=moe)


GEMMA3_MULTIMODAL = Family(text_families={"gemma3_text": _as_tied_text(GEMMA3)}, vision=gemma3_vision)
GEMMA3N_MULTIMODAL = Family(text_families={"gemma3n_text": _as_text(GEMMA3N, _QWEN_ROOTS, [Roots()], _GEMMA4_IMAGES)})
GEMMA4_MULTIMODAL = Family(text_families={"gemma4_text": _as_text(GEMMA4, _QWEN_ROOTS, [Roots()], _GEMMA4_IMAGES)})
GEMMA4_UNIFIED_MULTIMODAL = Family(
    text_families={"gemma4_unified_text": _as_text(GEMMA4_UNIFIED, _QWEN_ROOTS, [Roots()], _GEMMA4_IMAGES)}
)
_KIMI_TEXT = _as_text(DEEPSEEK_V3, images=_KIMI_IMAGES, tie_word_embeddings=True)
KIMI_K25 = Family(text_families={"deepseek_v3": _KIMI_TEXT, "kimi_k2": _KIMI_TEXT})
LLAMA4_MULTIMODAL = Family(text_families={"llama4_text": _as_text(LLAMA4, images=_LLAMA_IMAGES)})
_MINIMAX_TEXT = _as_text(MINIMAX_M3, images=_MINIMAX_IMAGES)
MINIMAX_M3_VL = Family(text_families={"minimax_m3_vl_text": _MINIMAX_TEXT, "minimax_m3": _MINIMAX_TEXT})
MISTRAL3 = Family(
    text_families={
        "mistral": _as_tied_text(MISTRAL),
        "ministral3": _as_tied_text(MINISTRAL3),
        "mistral4": _as_tied_text(MISTRAL4),
    }
)
_QWEN2_5_TEXT = _with_axes(QWEN2, [16, 24, 24], vocab_size=152064, rope_theta=1e6)
QWEN2_5_VL = Family(
    text_families={"qwen2_5_vl_text": _QWEN2_5_TEXT, "qwen2_5_vl": _QWEN2_5_TEXT}, vision=qwen2_5_vision
)
QWEN3_VL = Family(
    text_families={"qwen3_vl_text": _with_axes(QWEN3, [24, 20, 20], is_interleaved=True, rope_theta=500000.0)},
    vision=qwen3_vision,
)
_QWEN3_MOE_DEFAULTS = {
    **QWEN3_MOE.defaults,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "rope_theta": 500000.0,
}
_QWEN3_MOE_TEXT = replace(QWEN3_MOE, defaults=_QWEN3_MOE_DEFAULTS, parts=_qwen3_moe_parts)
QWEN3_VL_MOE = Family(
    text_families={"qwen3_vl_moe_text": _with_axes(_QWEN3_MOE_TEXT, [24, 20, 20], is_interleaved=True)},
    vision=qwen3_vision,
)
QWEN3_5_MULTIMODAL = Family(text_families={"qwen3_5_text": _as_qwen_text(QWEN3_5)})
QWEN3_5_MOE_MULTIMODAL = Family(text_families={"qwen3_5_moe_text": _as_qwen_text(QWEN3_5_MOE)})
STEP3P7 = Family(text_families={"step3p5": _as_text(STEP3P5, Roots(), [_QWEN_ROOTS], _STEP_IMAGES)})
