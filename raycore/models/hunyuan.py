"""Hunyuan, dense: Llama with norms of query and key heads after the rotation."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, plain_parts
from raycore.models.rotation import Rotation, head_dim, parse_rotation, rope_parameters
from raycore.models.spec import Parts, TensorNames

_DEFAULTS = {**DEFAULTS, "vocab_size": 290943, "rms_norm_eps": 1e-5}
_NAMES = TensorNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def _rotation(config: JsonFields) -> Rotation:
    """Return the rotation. With `alpha`, one called dynamic has a larger base, and nothing dynamic.

    Source: NTK-aware scaling, https://www.reddit.com/r/LocalLLaMA/comments/14lz7j5
    """
    rope = rope_parameters(config)
    alpha = rope.strength("alpha")
    if not alpha or "dynamic" not in (rope.get("rope_type"), rope.get("type")):
        return parse_rotation(config)
    size = head_dim(config)
    return Rotation(rope.float_("rope_theta") * alpha ** (size / (size - 2)))


def _parts(config: JsonFields) -> Parts:
    return plain_parts(
        config,
        **attention_biases(config),
        qk_norm="heads",
        is_rotated_first=True,
        rotations=[_rotation(config)] * config.int_("num_hidden_layers"),
        names=_NAMES,
    )


HUNYUAN = Family(_DEFAULTS, _parts)
