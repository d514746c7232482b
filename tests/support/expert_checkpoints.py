"""Small checkpoints with experts, under the names that families have for them."""

from __future__ import annotations

import msgspec
import torch
from small_model import SPEC as DENSE

from raycore.parts.experts.models import ExpertNames, MoeSpec

HIDDEN, EXPERTS, SIZE = 32, 3, 4
MOE = MoeSpec(EXPERTS, 2, SIZE, [True, False, True])
QWEN = msgspec.structs.replace(
    DENSE, architecture="Qwen3MoeForCausalLM", qkv_bias=False, o_bias=False, mlp_bias=False, moe=MOE
)
MIXTRAL = msgspec.structs.replace(
    QWEN,
    architecture="MixtralForCausalLM",
    moe=msgspec.structs.replace(MOE, names=ExpertNames("block_sparse_moe", "w1", "w3", "w2")),
)
NAMES = {
    "Qwen3MoeForCausalLM": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "MixtralForCausalLM": ("block_sparse_moe", "w1", "w3", "w2"),
}


class Recorded(dict):
    """Tensors by name, made up when they are first asked for."""

    def get_or_make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self:
            self[name] = torch.randn(shape, generator=torch.Generator().manual_seed(len(self)))
        return self[name]


def make_tensors(spec, is_stacked: bool) -> dict[str, torch.Tensor]:
    """What `spec`'s checkpoint holds."""
    heads, kv, dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, HIDDEN
    made = Recorded()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        made.get_or_make(name, (spec.vocab_size, dim))
    made.get_or_make("model.norm.weight", (dim,))
    block, gate, up, down = ("mlp", *NAMES[spec.architecture][1:]) if is_stacked else NAMES[spec.architecture]
    for layer, is_sparse in enumerate(MOE.sparse_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_proj", (heads, dim)),
            ("self_attn.k_proj", (kv, dim)),
            ("self_attn.v_proj", (kv, dim)),
            ("self_attn.o_proj", (dim, heads)),
            ("self_attn.q_norm", (spec.head_dim,)),
            ("self_attn.k_norm", (spec.head_dim,)),
            ("input_layernorm", (dim,)),
            ("post_attention_layernorm", (dim,)),
        ):
            made.get_or_make(f"{prefix}{name}.weight", shape)
        if not is_sparse:
            for name in ("gate", "up"):
                made.get_or_make(f"{prefix}mlp.{name}_proj.weight", (spec.intermediate_size, dim))
            made.get_or_make(f"{prefix}mlp.down_proj.weight", (dim, spec.intermediate_size))
            continue
        made.get_or_make(f"{prefix}{block}.gate.weight", (EXPERTS, dim))
        if is_stacked:
            made.get_or_make(f"{prefix}mlp.experts.gate_up_proj", (EXPERTS, 2 * SIZE, dim))
            made.get_or_make(f"{prefix}mlp.experts.down_proj", (EXPERTS, dim, SIZE))
            continue
        for expert in range(EXPERTS):
            for name, shape in ((gate, (SIZE, dim)), (up, (SIZE, dim)), (down, (dim, SIZE))):
                made.get_or_make(f"{prefix}{block}.experts.{expert}.{name}.weight", shape)
    return dict(made)
