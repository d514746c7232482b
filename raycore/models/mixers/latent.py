"""Multi-head latent attention as config.json describes it.

A token's keys and values of all heads are linear functions of one vector, its *latent*, and of one rotated key that all
heads share. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. Does not import torch.
"""

from __future__ import annotations

__all__ = ["LatentHeads", "latent_heads", "latent_scale"]

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from raycore.json_fields import JsonFields
from raycore.models.layer_part import PartTensor, Refusable
from raycore.models.linears import FusedLinear
from raycore.models.mixers.spec import Cached, Copies, HeadShape, MixerSpec
from raycore.models.rotation import rope_parameters
from raycore.models.rows import divided, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec


class LatentHeads(MixerSpec, frozen=True):
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
    block: str = "self_attn"
    """What the names of tensors begin with, besides those that `TensorNames` has."""
    has_gate: bool = False
    """Whether the values of each head are multiplied by the sigmoid of a number that is made of the layer's input."""

    computed_by: ClassVar[str] = "raycore.decoder.latent_mixer.LatentMixer"
    weights_class: ClassVar[str] = "raycore.weights.latent_weights.LatentWeights"
    described: ClassVar[str] = "has attention"
    memory: ClassVar[str] = "raycore.attention.latent_memory.LatentMemory"
    refused: ClassVar[Mapping[Refusable, str]] = {"roofline": "has latent attention"}
    refused_adapters: ClassVar[Mapping[str, str]] = {
        "kv_b_proj": "adapters of kv_b_proj, which attention applies to queries and values, aren't supported"
    }

    def renamed(self, model: ModelSpec) -> Mapping[str, str]:
        names = "q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "g_proj"
        return {f"self_attn.{name}": f"{self.block}.{name}" for name in names} | {"self_attn.o_proj": model.names.o}

    @property
    def query_dim(self) -> int:
        """Number of elements of a query head."""
        return self.plain_dim + self.rotated_dim

    @property
    def rope_dim(self) -> int:
        """Number of elements of a head of which a rotation may turn some."""
        return self.rotated_dim

    def shared_sizes(self, model: ModelSpec) -> dict[str, int]:
        return {"num_key_value_heads": model.num_kv_heads}

    @property
    def width(self) -> int:
        """Number of elements that the cache has of a token: its latent, and the rotated key."""
        return self.rank + self.rotated_dim

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        of_rank, num_heads, names = (tp_rank, tp_size), model.num_heads, model.names
        q_a, kv_a = f"{self.block}.q_a_proj", f"{self.block}.kv_a_proj_with_mqa"
        key = whole(kv_a, self.width)  # every rank has all latents and rotated keys
        queries = divided(names.q, num_heads * self.query_dim, *of_rank)
        if self.query_rank is not None:
            queries = whole(q_a, self.query_rank)
        biased = frozenset([q_a, kv_a] if model.qkv_bias else [])
        read = whole("", num_inputs or model.hidden_size)
        found = [FusedLinear("inputs_OD", (queries, key), read, "inputs_bias_O", biased, adapted="qkv")]
        if self.query_rank is not None:
            q_b = divided(f"{self.block}.q_b_proj", num_heads * self.query_dim, *of_rank)
            found.append(FusedLinear("q_b_PQ", (q_b,), whole("", self.query_rank), adapted="q_b"))
        # head by head, the key without its rotated part, and then the value
        kv_b = divided(f"{self.block}.kv_b_proj", num_heads * (self.plain_dim + self.value_dim), *of_rank)
        found.append(FusedLinear("kv_b_XR", (kv_b,), whole("", self.rank), is_plain=True))
        if self.has_gate:
            gate = divided(f"{self.block}.g_proj", num_heads, *of_rank)
            found.append(FusedLinear("gate_ND", (gate,), read, adapted="gate", is_plain=True))
        values = divided("", num_heads * self.value_dim, *of_rank)
        of_output = frozenset([names.o] if model.o_bias else [])
        output = (whole(names.o, model.hidden_size),)
        found.append(FusedLinear("o_DY", output, values, "o_bias", of_output, reads_divided=True, adapted="o"))
        return tuple(found)

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        kv_norm = PartTensor("kv_norm_R", (whole(f"{self.block}.kv_a_layernorm.weight", self.rank),))
        if self.query_rank is None:
            return (kv_norm,)
        return PartTensor("q_norm_Q", (whole(f"{self.block}.q_a_layernorm.weight", self.query_rank),)), kv_norm

    def sizes(self, model: ModelSpec, tp_size: int) -> dict[str, int]:
        num_heads, more = model.num_heads // tp_size, {}
        queries = num_heads * self.query_dim
        if self.query_rank is not None:
            more = {"query dimensions": queries, "dimensions that queries are made of": self.query_rank}
            queries = self.query_rank
        fused = {"query and latent dimensions": queries + self.width, "value dimensions": num_heads * self.value_dim}
        return more | fused

    def heads(self, model: ModelSpec, tp_size: int) -> HeadShape:
        """Return the heads of one of `tp_size` ranks, as attention to latents has them."""
        return HeadShape(model.num_heads // tp_size, 1, self.width, self.rank)

    def head_norm_eps(self, model: ModelSpec) -> float:
        """Return what the norms of latents add to the mean square."""
        return self.norm_eps

    def copies(self, model: ModelSpec, tp_size: int) -> Copies:
        """Return how many of `tp_size` ranks have the same latents: all."""
        return Copies(tp_size, "latents", "tensor-parallel workers")

    def cached(self, model: ModelSpec, layer: int) -> Cached:
        return Cached("latent")

    def cached_numbers(self, model: ModelSpec, tp_size: int) -> int:
        return self.width


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
