"""Multi-head latent attention as config.json describes it.

A token's keys and values of all heads are linear functions of one vector, its *latent*, and of one rotated key that all
heads share. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. Does not import torch.
"""

from __future__ import annotations

__all__ = ["LatentHeads", "latent_heads", "latent_scale"]

import math

import msgspec

from raycore.checkpoint.json_fields import JsonFields
from raycore.models.rotation import rope_parameters


class LatentHeads(msgspec.Struct, frozen=True):
    """The sizes of multi-head latent attention. A model's `head_dim` is that of the rotated part then."""

    rank: int
    """Number of elements of a latent."""
    plain_dim: int
    """Number of elements of a query head, or a key head, that aren't rotated. They come before the others."""
    rotated_dim: int
    value_dim: int
    """Number of elements of a value head."""
    query_rank: int | None = None
    """Queries are linear functions of a normalized vector of this size. None: of the layer's input itself."""
    norm_eps: float = 1e-6
    """Of the norms of latents, and of what queries are made of."""

    @property
    def query_dim(self) -> int:
        """Number of elements of a query head."""
        return self.plain_dim + self.rotated_dim

    @property
    def width(self) -> int:
        """Number of elements that the cache has of a token: its latent, and the rotated key."""
        return self.rank + self.rotated_dim


def latent_heads(config: JsonFields) -> LatentHeads:
    """Return the sizes in config.json."""
    rank = config.int_("kv_lora_rank")
    if rank % 2:
        raise config.error("kv_lora_rank", "an even number")
    return LatentHeads(
        rank=rank,
        plain_dim=config.int_("qk_nope_head_dim"),
        rotated_dim=config.int_("qk_rope_head_dim"),
        value_dim=config.int_("v_head_dim"),
        query_rank=config.optional_int("q_lora_rank"),
    )


def latent_scale(config: JsonFields, heads: LatentHeads) -> float:
    """Return what scores are multiplied by: more where YaRN stretches positions, by `mscale_all_dim`."""
    rope = rope_parameters(config)
    scale, strength = heads.query_dim**-0.5, rope.strength("mscale_all_dim")
    if not strength or (rope.get("rope_type") or rope.get("type") or "default") == "default":
        return scale
    factor = rope.float_("factor")
    growth = 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scale * growth**2
