"""MiMo-7B: Qwen2, and a layer that predicts the next token but one."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family, plain_parts, predictors
from raycore.models.qwen2 import QWEN2_DEFAULTS, windows
from raycore.models.spec import Parts
from raycore.parts.drafts.models import MtpNames

_MTP = MtpNames(
    layer="model.mtp_layers.{}.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norms=("final_layernorm",),
    copies=(),
    reads_hidden_first=True,
    reads_normed=False,
)


def _parts(config: JsonFields) -> Parts:
    return plain_parts(config, qkv_bias=True, layer_windows=windows(config), **predictors(config, _MTP))


MIMO = Family(QWEN2_DEFAULTS, _parts)
