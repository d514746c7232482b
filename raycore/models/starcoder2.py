"""StarCoder 2: layer norms and biases everywhere, and a feed-forward part without a gate."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, norm_eps_at, ungated_parts
from raycore.models.spec import Parts, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "use_bias": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "tie_word_embeddings": True,
}
_NAMES = TensorNames(up="mlp.c_fc", down="mlp.c_proj")


def _parts(config: JsonFields) -> Parts:
    windows = [config.optional_int("sliding_window")] * config.int_("num_hidden_layers")
    has_bias = attention_biases(config, "use_bias")
    return ungated_parts(config, layer_windows=windows, **has_bias, mlp_bias=has_bias["o_bias"], names=_NAMES)


STARCODER2 = Family(_DEFAULTS, _parts, norm_eps_at("norm_epsilon"))
