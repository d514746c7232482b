"""How a layer rotates queries and keys, read from config.json in all the forms that transformers has used.

`raycore.layers.rope` computes the frequencies.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from raycore.json_fields import JsonFields

RopeType = Literal["linear", "llama3", "yarn", "longrope"]


class RopeScaling(msgspec.Struct, frozen=True):
    """How the rotary frequencies are scaled. Fields that `rope_type` doesn't use keep their defaults."""

    rope_type: RopeType
    factor: float
    original_max_position_embeddings: int = 0
    """llama3, yarn, longrope: the model's maximum number of positions before scaling."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    """yarn, longrope: the factor by which cos and sin are multiplied, from the checkpoint or computed as in the papers
    (for YaRN arXiv 2309.00071, for LongRoPE arXiv 2402.13753)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the bounds of the interpolated dimensions are rounded outwards to whole dimensions."""
    short_factors: tuple[float, ...] = ()
    """longrope: by pair, what its frequency is divided by in an engine whose sequences have at most
    `original_max_position_embeddings` tokens."""
    long_factors: tuple[float, ...] = ()
    """longrope: the same in an engine whose sequences may have more tokens."""

    def is_long(self, max_length: int) -> bool:
        """Whether an engine whose sequences have at most `max_length` tokens has the frequencies of long ones."""
        return self.rope_type == "longrope" and max_length > self.original_max_position_embeddings


class Rotation(msgspec.Struct, frozen=True):
    """How a layer rotates the pairs of components of its queries and keys (RoPE)."""

    theta: float
    """The base of the frequencies."""
    scaling: RopeScaling | None = None
    fraction: float = 1.0
    """The fraction of a head's components that are rotated. They are the first ones."""
    is_proportional: bool = False
    """Whether pairs and frequencies are instead those of whole heads, of which only the first ones are turned."""
    is_adjacent: bool = False
    """Whether the components of a pair are adjacent in the checkpoint. Otherwise, a pair has one of each half."""
    sections: tuple[int, ...] = ()
    """How many of the pairs are rotated by each of three positions of a token: its frame, row and column in an image.
    Empty: a token has one position."""
    is_interleaved: bool = False
    """Whether the three positions take turns by pair, as long as rows and columns have pairs left. Otherwise, the pairs
    of each position are adjacent."""

    def num_components(self, head_dim: int) -> int:
        """Return how many of a head's components are rotated, those included that are turned by an angle of 0."""
        return head_dim if self.is_proportional else int(head_dim * self.fraction)

    def num_turned_pairs(self, head_dim: int) -> int:
        """Return how many of a head's pairs are turned by other angles than 0."""
        return int(head_dim * self.fraction) // 2

    def axes(self) -> list[int]:
        """Return for each rotated pair which of a token's three positions it is rotated by."""
        if not self.is_interleaved:
            return [axis for axis, num_pairs in enumerate(self.sections) for _ in range(num_pairs)]
        axes = [0] * sum(self.sections)
        for axis in (1, 2):
            for pair in range(axis, min(self.sections[axis] * 3, len(axes)), 3):
                axes[pair] = axis
        return axes


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
    is_proportional = _rope_type(rope) == "proportional"
    plain = Rotation(rope.float_("rope_theta"), None, fraction, is_proportional, is_adjacent)
    if fraction < 1 and (num_rotated := plain.num_components(head_dim(config))) % 2:
        of_head = f"one that gives an even number of a head's {head_dim(config)} components, not {num_rotated}"
        raise (rope if "partial_rotary_factor" in rope else config).error("partial_rotary_factor", of_head)
    return msgspec.structs.replace(plain, scaling=_rope_scaling(plain, rope, config))


def with_axes(rotation: Rotation, config: JsonFields, default: list[int], *, is_interleaved: bool) -> Rotation:
    """Return the rotation with the sections for three positions that config.json describes.

    Args:
        default: the sections where config.json has none.
        is_interleaved: see `Rotation`.
    """
    rope, num_pairs = rope_parameters(config), rotation.num_components(head_dim(config)) // 2
    sections = rope.list_("mrope_section") or default
    is_valid = len(sections) == 3 and all(type(each) is int and each >= 0 for each in sections)
    if not is_valid or sum(sections) != num_pairs:
        raise rope.error("mrope_section", f"three numbers whose sum is {num_pairs}, the pairs of a head")
    return msgspec.structs.replace(rotation, sections=tuple(sections), is_interleaved=is_interleaved)


def head_dim(config: JsonFields) -> int:
    """Return the number of components of a head."""
    num_heads, given = config.int_("num_attention_heads"), config.optional_int("head_dim")
    if given is None and config.int_("hidden_size") % num_heads:
        raise config.error("hidden_size", f"a multiple of num_attention_heads={num_heads}, or an explicit head_dim")
    found = given or config.int_("hidden_size") // num_heads
    if found % 2 and given is None:
        even = f"an even hidden_size / num_attention_heads, for the rotary embedding, not {found}"
        raise config.error("num_attention_heads", even)
    if found % 2:
        raise config.error("head_dim", "an even number, for the rotary embedding")
    return found


def parse_minimax_rotation(config: JsonFields) -> Rotation:
    """Return the rotation of MiniMax's families, which may say at `rotary_dim` how many components of a head turn.

    Other engines read it. transformers' code of MiniMax-M3 reads only `partial_rotary_factor`, which published files
    have, too, and which counts if both are there.
    """
    rotation, num_rotated, size = parse_rotation(config), config.optional_int("rotary_dim"), head_dim(config)
    if num_rotated is None or rotation.fraction != 1.0:
        return rotation
    if num_rotated > size or num_rotated % 2:
        raise config.error("rotary_dim", f"an even number, at most head_dim={size}")
    return msgspec.structs.replace(rotation, fraction=rotated_fraction(num_rotated, size))


def rotated_fraction(num_rotated: int, size: int) -> float:
    """Return the fraction of a head of `size` components with which `num_rotated` of them turn."""
    fraction = num_rotated / size
    return fraction if int(size * fraction) == num_rotated else math.nextafter(fraction, 1.0)


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


def _rope_scaling(plain: Rotation, rope: JsonFields, config: JsonFields) -> RopeScaling | None:
    rope_type = _rope_type(rope)
    if rope_type in ("default", "mrope"):  # the latter only says that there are sections
        return None
    if rope_type == "proportional":
        factor = rope.optional_float("factor")
        return None if factor is None else RopeScaling("linear", factor)
    if rope_type == "linear":
        return RopeScaling("linear", rope.float_("factor"))
    max_positions = config.int_("max_position_embeddings")
    original = config.optional_int("original_max_position_embeddings")
    original = original or rope.optional_int("original_max_position_embeddings") or max_positions
    if rope_type == "llama3":
        low, high = rope.float_("low_freq_factor"), rope.float_("high_freq_factor")
        return RopeScaling("llama3", rope.float_("factor"), original, low, high)
    factor = rope.optional_float("factor") or max_positions / original
    # early configurations of Phi-3 have LongRoPE under the names su and yarn
    if rope_type in ("longrope", "su") or (rope_type == "yarn" and rope.get("short_factor") is not None):
        return _longrope(rope, plain.num_components(head_dim(config)) // 2, factor, original)
    if rope_type == "yarn":
        return _yarn(rope, factor, original)
    raise rope.error(
        "rope_type" if "rope_type" in rope else "type", "default, linear, llama3, proportional, yarn or longrope"
    )


def _rope_type(rope: JsonFields) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _longrope(rope: JsonFields, num_pairs: int, factor: float, original: int) -> RopeScaling:
    derived = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=rope.optional_float("attention_factor") or derived,
        short_factors=_factors(rope, "short_factor", num_pairs),
        long_factors=_factors(rope, "long_factor", num_pairs),
    )


def _factors(rope: JsonFields, key: str, num_pairs: int) -> tuple[float, ...]:
    found = rope.list_(key) or []
    if len(found) != num_pairs or not all(type(each) in (int, float) and each > 0 for each in found):
        raise rope.error(key, f"a list of {num_pairs} positive numbers, one for each rotated pair of components")
    return tuple(map(float, found))


def _yarn(rope: JsonFields, factor: float, original: int) -> RopeScaling:
    mscale, mscale_all_dim = rope.strength("mscale"), rope.strength("mscale_all_dim")
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
