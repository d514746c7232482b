"""StableLM: Llama with layer norms, and a quarter of each head is rotated. Some have norms of heads, or a feed-forward
part that reads the norm of attention."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, norm_eps_at, plain_parts
from raycore.models.spec import Parts, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _parts(config: JsonFields) -> Parts:
    is_parallel = config.bool_("use_parallel_residual")
    return plain_parts(
        config,
        qkv_bias=config.bool_("use_qkv_bias"),
        norm="biased_layer",
        qk_norm="own_heads" if config.bool_("qk_layernorm") else None,
        is_parallel=is_parallel,
        names=TensorNames(
            before_feed_forward="input_layernorm" if is_parallel else "post_attention_layernorm",
            q_norm="self_attn.q_layernorm.norms.{}",
            k_norm="self_attn.k_layernorm.norms.{}",
        ),
    )


STABLELM = Family(_DEFAULTS, _parts, norm_eps_at("layer_norm_eps"))
