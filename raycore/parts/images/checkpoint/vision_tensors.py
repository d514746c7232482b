"""The tensors of an encoder of images in a checkpoint, and how tensor-parallel ranks divide them. Doesn't import torch.

Shapes: D hidden size, F intermediate size, M elements of the patches that become one embedding, E size of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from raycore.parts.images.models import VisionSpec


class VisionTensor(NamedTuple):
    """A tensor of an encoder."""

    key: str
    """What the encoder calls it."""
    name: str
    """What the checkpoint calls it."""
    shape: tuple[int, ...]
    divided: Literal["outputs", "inputs", "once"] | None = None
    """Which dimension ranks divide. `once`: only the first rank has it, because results are summed over ranks. None:
    each rank has the whole tensor."""
    num_fused: int = 1
    """How many layers the tensor has the outputs of, one after the other. Each of them is divided."""

    def part(self, rank: int, size: int) -> list[tuple[slice, ...]]:
        """Return the indexes of the parts of the tensor that a rank of `size` has, one for each fused layer."""
        if self.divided in ("outputs", "inputs"):
            dim = 0 if self.divided == "outputs" else 1
            whole = self.shape[dim] // self.num_fused
            each = whole // size
            starts = [fused * whole + rank * each for fused in range(self.num_fused)]
            return [(*[slice(None)] * dim, slice(start, start + each)) for start in starts]
        return [(slice(None),)]


def vision_tensors(spec: VisionSpec) -> Iterator[VisionTensor]:
    """Yield the tensors of an encoder."""
    makers = {"qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3, "siglip": _siglip}
    for made in makers[spec.kind](spec):
        yield made if made.name else made._replace(name=f"{spec.prefix}{made.key}")


def divides(spec: VisionSpec, tp_size: int) -> bool:
    """Whether `tp_size` ranks can divide an encoder. Otherwise, each has all of it."""
    return spec.num_heads % tp_size == 0 and spec.intermediate_size % tp_size == 0


def _linear(
    key: str,
    num_outputs: int,
    num_inputs: int,
    divided: Literal["outputs", "inputs"] | None = None,
    num_fused: int = 1,
    *,
    has_bias: bool = True,
) -> Iterator[VisionTensor]:
    yield VisionTensor(f"{key}.weight", "", (num_outputs, num_inputs), divided, num_fused)
    if has_bias:
        bias = {"outputs": "outputs", "inputs": "once", None: None}[divided]
        yield VisionTensor(f"{key}.bias", "", (num_outputs,), bias, num_fused)  # pyright: ignore[reportArgumentType]


def _norm(key: str, size: int, *, has_bias: bool) -> Iterator[VisionTensor]:
    yield VisionTensor(f"{key}.weight", "", (size,))
    if has_bias:
        yield VisionTensor(f"{key}.bias", "", (size,))


def _patches(spec: VisionSpec) -> tuple[int, ...]:
    return spec.hidden_size, spec.num_channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size


def _attention(spec: VisionSpec, block: str) -> Iterator[VisionTensor]:
    hidden = spec.hidden_size
    yield from _linear(f"{block}.attn.qkv", 3 * hidden, hidden, "outputs", 3)
    yield from _linear(f"{block}.attn.proj", hidden, hidden, "inputs")


def _qwen2_5(spec: VisionSpec) -> Iterator[VisionTensor]:
    hidden, size, merged = spec.hidden_size, spec.intermediate_size, spec.hidden_size * spec.merge_size**2
    yield VisionTensor("patch_embed.proj.weight", "", _patches(spec))
    for layer in range(spec.num_layers):
        block = f"blocks.{layer}"
        yield from _norm(f"{block}.norm1", hidden, has_bias=False)
        yield from _attention(spec, block)
        yield from _norm(f"{block}.norm2", hidden, has_bias=False)
        yield from _linear(f"{block}.mlp.gate_proj", size, hidden, "outputs")
        yield from _linear(f"{block}.mlp.up_proj", size, hidden, "outputs")
        yield from _linear(f"{block}.mlp.down_proj", hidden, size, "inputs")
    yield from _norm("merger.ln_q", hidden, has_bias=False)
    yield from _linear("merger.mlp.0", merged, merged)
    yield from _linear("merger.mlp.2", spec.out_size, merged)


def _qwen3(spec: VisionSpec) -> Iterator[VisionTensor]:
    hidden, size, merged = spec.hidden_size, spec.intermediate_size, spec.hidden_size * spec.merge_size**2
    yield VisionTensor("patch_embed.proj.weight", "", _patches(spec))
    yield VisionTensor("patch_embed.proj.bias", "", (hidden,))
    yield VisionTensor("pos_embed.weight", "", (spec.num_positions, hidden))
    for layer in range(spec.num_layers):
        block = f"blocks.{layer}"
        yield from _norm(f"{block}.norm1", hidden, has_bias=True)
        yield from _attention(spec, block)
        yield from _norm(f"{block}.norm2", hidden, has_bias=True)
        yield from _linear(f"{block}.mlp.linear_fc1", size, hidden, "outputs")
        yield from _linear(f"{block}.mlp.linear_fc2", hidden, size, "inputs")
    deep = [f"deepstack_merger_list.{index}" for index in range(len(spec.deepstack_layers))]
    for merger, norm_size in [("merger", hidden), *((name, merged) for name in deep)]:
        yield from _norm(f"{merger}.norm", norm_size, has_bias=True)
        yield from _linear(f"{merger}.linear_fc1", merged, merged)
        yield from _linear(f"{merger}.linear_fc2", spec.out_size, merged)


def _siglip(spec: VisionSpec) -> Iterator[VisionTensor]:
    hidden, size = spec.hidden_size, spec.intermediate_size
    patch = hidden, spec.num_channels, spec.patch_size, spec.patch_size
    yield VisionTensor("embeddings.patch_embedding.weight", "", patch)
    yield VisionTensor("embeddings.patch_embedding.bias", "", (hidden,))
    yield VisionTensor("embeddings.position_embedding.weight", "", (spec.num_positions, hidden))
    for layer in range(spec.num_layers):
        block = f"encoder.layers.{layer}"
        yield from _norm(f"{block}.layer_norm1", hidden, has_bias=True)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from _linear(f"{block}.self_attn.{name}", hidden, hidden, "outputs")
        yield from _linear(f"{block}.self_attn.out_proj", hidden, hidden, "inputs")
        yield from _norm(f"{block}.layer_norm2", hidden, has_bias=True)
        yield from _linear(f"{block}.mlp.fc1", size, hidden, "outputs")
        yield from _linear(f"{block}.mlp.fc2", hidden, size, "inputs")
    yield from _norm("post_layernorm", hidden, has_bias=True)
    projection, norm = "mm_input_projection_weight", "mm_soft_emb_norm.weight"
    yield VisionTensor(f"projector.{projection}", f"{spec.projector}{projection}", (hidden, spec.out_size))
    yield VisionTensor(f"projector.{norm}", f"{spec.projector}{norm}", (hidden,))
