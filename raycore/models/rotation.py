"""How a layer rotates queries and keys, read from config.json in all the forms that transformers has used.

`raycore.layers.rope` computes the frequencies.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from raycore.checkpoint.json_fields import JsonFields

RopeType = Literal["linear", "llama3", "yarn"]


class RopeScaling(msgspec.Struct, frozen=True):
    """How the rotary frequencies are scaled. Fields that `rope_type` doesn't use keep their defaults."""

    rope_type: RopeType
    factor: float
    original_max_position_embeddings: int = 0
    """llama3, yarn: the model's maximum number of positions before scaling."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    """yarn: the factor by which cos and sin are multiplied, from the checkpoint or computed as in the YaRN paper."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the bounds of the interpolated dimensions are rounded outwards to whole dimensions."""


class Rotation(msgspec.Struct, frozen=True):
    """How a layer rotates the pairs of components of its queries and keys (RoPE)."""

    theta: float
    """The base of the frequencies."""
    scaling: RopeScaling | None = None
    fraction: float = 1.0
    """The share of a head's components that are rotated. They are the first ones."""
    is_adjacent: bool = False
    """Whether the components of a pair are adjacent in the checkpoint. Otherwise, a pair has one of each half."""


def parse_rotation(config: JsonFields, kind: str | None = None, *, is_adjacent: bool = False) -> Rotation:
    """Return the rotation that config.json describes.

    Args:
        kind: which one, if config.json has one for each type of layers: `full_attention` or `sliding_attention`. None:
            there is one for all layers.
        is_adjacent: see `Rotation`.

    Raises:
        InvalidCheckpoint: the scaling isn't one of `RopeType`, or lacks a parameter. The message names the key.
    """
    rope = rope_parameters(config, kind)
    fraction = rope.optional_float("partial_rotary_factor") or config.optional_float("partial_rotary_factor") or 1.0
    if fraction > 1:
        raise config.error("partial_rotary_factor", "a number up to 1")
    return Rotation(rope.float_("rope_theta"), _rope_scaling(rope, config), fraction, is_adjacent)


def rope_parameters(config: JsonFields, kind: str | None = None) -> JsonFields:
    """Return `rope_parameters` as transformers 5 writes it, or transformers 4's `rope_scaling` and `rope_theta`.

    `kind`: as in `parse_rotation`.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.child(key)
    kinds = [name for name in ("full_attention", "sliding_attention") if rope.get(name) is not None]
    if kinds and kind is None and any(rope.get(name) != rope.get(kinds[0]) for name in kinds):
        raise config.error(key, "the same parameters for all layer types")
    if kinds:
        rope = rope.child(kind if kind in kinds else kinds[0])
    return rope.with_defaults({"rope_theta": config.get("rope_theta")})


def _rope_scaling(rope: JsonFields, config: JsonFields) -> RopeScaling | None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return RopeScaling("linear", rope.float_("factor"))
    max_positions = config.int_("max_position_embeddings")
    original = config.optional_int("original_max_position_embeddings")
    original = original or rope.optional_int("original_max_position_embeddings") or max_positions
    if rope_type == "llama3":
        low, high = rope.float_("low_freq_factor"), rope.float_("high_freq_factor")
        return RopeScaling("llama3", rope.float_("factor"), original, low, high)
    if rope_type == "yarn":
        return _yarn(rope, rope.optional_float("factor") or max_positions / original, original)
    raise rope.error("rope_type" if "rope_type" in rope else "type", "default, linear, llama3 or yarn")


def _yarn(rope: JsonFields, factor: float, original: int) -> RopeScaling:
    mscale, mscale_all_dim = rope.optional_float("mscale"), rope.optional_float("mscale_all_dim")
    derived = _yarn_attention_factor(factor, 1.0)
    if mscale and mscale_all_dim:
        derived = _yarn_attention_factor(factor, mscale) / _yarn_attention_factor(factor, mscale_all_dim)
    given = rope.optional_float("attention_factor")
    return RopeScaling(
        "yarn",
        factor,
        original,
        attention_factor=derived if given is None else given,
        beta_fast=rope.optional_float("beta_fast") or 32.0,
        beta_slow=rope.optional_float("beta_slow") or 1.0,
        truncate=rope.bool_("truncate", default=True),
    )


def _yarn_attention_factor(factor: float, mscale: float) -> float:
    """Return `sqrt(1 / t)` for YaRN's attention temperature `t`: section 3.4 of the YaRN paper (arXiv 2309.00071)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
