"""OLMoE: Llama with experts in every layer, and norms of all query and of all key heads together."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, plain_parts
from raycore.models.spec import Parts
from raycore.parts.experts.models import ExpertChoice, MoeSpec, num_chosen, num_experts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "bos_token_id": None,
    "eos_token_id": 50279,
}


def _parts(config: JsonFields) -> Parts:
    experts = MoeSpec(
        num_experts(config),
        num_chosen(config),
        config.int_("intermediate_size"),
        [True] * config.int_("num_hidden_layers"),
        ExpertChoice(is_normalized=config.bool_("norm_topk_prob")),
        size_key="intermediate_size",
    )
    return plain_parts(config, **attention_biases(config), qk_norm="width", moe=experts)


OLMOE = Family(_DEFAULTS, _parts, only={"clip_qkv": None})
