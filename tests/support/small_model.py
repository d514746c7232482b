"""A decoder small enough for tests, a runner around it, and the same decoder written the slow and obvious way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch.nn import functional

from raycore.attention.batch_invariant import BatchInvariantAttention
from raycore.attention.gather import GatherAttention
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.native import NativeAttention
from raycore.attention.scratch import GatherScratch
from raycore.attention.spec import Attention, AttentionSpec
from raycore.decoder.decoder import Decoder
from raycore.kernels import Backend
from raycore.layers.operations import Operations
from raycore.layers.part_place import PartPlace
from raycore.messages import NewRequest, StepPlan, StepResult
from raycore.models.rotation import Rotation
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.drafts.runner.drafter import NO_DRAFTER, Drafter
from raycore.parts.experts.layers.sparse_feed_forward import SparseFeedForward
from raycore.parts.experts.models import MoeSpec
from raycore.parts.experts.parallel import ExpertRanks
from raycore.parts.experts.weights import MoeWeights
from raycore.parts.pooling.layers.pooler import Pooler
from raycore.parts.pooling.runner import PoolingHead
from raycore.runner.decode_graphs import DecodeGraphs
from raycore.runner.execution import BY_OPERATION, GraphedSteps
from raycore.runner.runner import ModelRunner
from raycore.runner.sampling_head import SamplingHead
from raycore.runner.sources import Tokens
from raycore.sampling.kernels import SamplingKernels
from raycore.sampling.sampler import Sampler
from raycore.sampling_params import SamplingParams
from raycore.step.batch import SlotBatch
from raycore.step.device_batch import DeviceBatch
from raycore.weights.layer_part_weights import MlpWeights
from raycore.weights.loader import DecoderWeights, random_decoder_weights
from raycore.weights.share import WeightShare
from raycore.worker.compute_backend import ComputeBackend

GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_MODEL_LEN = 96

SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rotations=[Rotation(10000.0)] * 3,
    layer_windows=[None, 7, None],
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm="heads",
    tie_word_embeddings=False,
    max_position_embeddings=MAX_MODEL_LEN,
    dtype="float32",
    bos_token_id=None,
    eos_token_ids=[],
    generation_defaults={},
)


def make_weights(spec: ModelSpec = SPEC, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    """Weights large enough that tokens differ, norms that aren't all ones."""
    weights = random_decoder_weights(WeightShare(spec, dtype), seed=3)
    generator = torch.Generator().manual_seed(4)
    for layer in weights.layers:
        mixer = layer.mixer
        assert isinstance(layer.feed_forward, MlpWeights)
        for matrix in (mixer.qkv_OD, mixer.o_DO, layer.feed_forward.gate_up_FD, layer.feed_forward.down_DF):
            matrix.mul_(10)
        norms = layer.before_attention_D, mixer.q_norm_H, mixer.k_norm_H, layer.before_feed_forward_D
        for vector in (*norms, mixer.qkv_bias_O):
            if vector is not None:
                vector.add_(torch.randn(vector.shape, generator=generator) * 0.2)
        if mixer.sinks_N is not None:
            mixer.sinks_N.copy_(torch.randn(mixer.sinks_N.shape, generator=generator))
    return weights


def make_runner(
    spec: ModelSpec = SPEC,
    weights: DecoderWeights | None = None,
    max_gathered: int = 8,
    *,
    backend: Backend = "torch",
    attention_by: Backend | None = None,
    is_shared: bool = True,
    has_graphs: bool = False,
    batch_invariant: bool = False,
    cache_dtype: torch.dtype = torch.float32,
    make_drafter: Callable[[Decoder, DeviceBatch, Sampler, Operations], Drafter] | None = None,
    pooler: Pooler | None = None,
) -> ModelRunner:
    """A runner that computes in float32.

    Args:
        max_gathered: so many of the longest requests fit into the scratch memory of plain torch's attention.
        backend: what computes. For "triton", the test must have imported `interpreted_triton`.
        attention_by: what computes attention. None: `backend`.
        is_shared: whether host and device have the same memory. GPUs have their own.
        has_graphs: pad steps of decodes, and run them as CUDA graphs run: always the same function.
        make_drafter: makes what drafts, for this decoder, batch and sampler.
        pooler: makes results instead of tokens.
    """
    operations = make_operations(backend, batch_invariant=batch_invariant)
    decoder = Decoder(spec, weights or make_weights(spec), TensorParallel(), operations)
    kv = KVTensors(
        spec.num_layers, NUM_BLOCKS, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, cache_dtype, operations.device
    )
    attention = make_attention(
        spec,
        decoder,
        kv,
        MAX_MODEL_LEN,
        max_gathered,
        attention_by or backend,
        batch_invariant=batch_invariant,
        dtype=torch.float32,
    )
    sizes = [3, 8] if has_graphs else []
    slots = SlotBatch(8, MAX_MODEL_LEN, BLOCK_SIZE)
    batch = DeviceBatch(slots, operations.device, decode_sizes=sizes, is_shared=is_shared)
    sampler = Sampler(spec.vocab_size, make_sampling(backend, batch_invariant=batch_invariant))
    return ModelRunner(
        decoder,
        attention,
        batch,
        Tokens(batch),
        SamplingHead(decoder, batch, sampler) if pooler is None else PoolingHead(pooler, batch),
        NO_DRAFTER if make_drafter is None else make_drafter(decoder, batch, sampler, operations),
        execution=GraphedSteps(DecodeGraphs(lambda compute: compute)) if has_graphs else BY_OPERATION,
    )


def make_operations(backend: Backend = "torch", *, batch_invariant: bool = False) -> Operations:
    return make_backend(backend, batch_invariant=batch_invariant).operations()


def sparse_layer(
    moe: MoeSpec,
    weights: MoeWeights,
    experts: ExpertRanks,
    operations: Operations,
    ranks: TensorParallel | None = None,
    *,
    is_last: bool = False,
) -> SparseFeedForward:
    """Return the feed-forward part of the first layer of a model with experts."""
    spec = msgspec.structs.replace(SPEC, moe=moe, num_layers=1 if is_last else 2)
    return SparseFeedForward(PartPlace(spec, 0, 0, ranks or TensorParallel(), experts, operations), weights)


def make_sampling(backend: Backend = "torch", *, batch_invariant: bool = False) -> SamplingKernels:
    return make_backend(backend, batch_invariant=batch_invariant).sampling()


def make_backend(name: Backend, *, batch_invariant: bool = False) -> ComputeBackend:
    """What computes. Triton's kernels are compiled if there is a GPU, else interpreted."""
    device = torch.device("cuda:0") if name == "triton" and torch.cuda.is_available() else CPU
    return ComputeBackend(name, name, device, batch_invariant, torch.float32)


def make_attention(
    spec: ModelSpec,
    decoder: Decoder,
    kv: KVTensors,
    max_model_len: int,
    max_gathered: int,
    backend: Backend = "torch",
    *,
    batch_invariant: bool = False,
    dtype: torch.dtype | None = None,
) -> Attention:
    """
    Args:
        max_gathered: so many of the longest requests fit into the scratch memory of plain torch's attention.
        dtype: the decoder's. None: the cache's.
    """
    dtype = dtype or kv.blocks[0].dtype
    attention_spec = AttentionSpec.of(spec, 1, decoder.constants, max_model_len, dtype, kv.blocks[0].device)
    if backend == "native":
        return NativeAttention(attention_spec, kv)
    if backend == "triton":
        from raycore.attention.paged import TritonAttention

        return TritonAttention(attention_spec, kv, max_rows=8, batch_invariant=batch_invariant)
    attention = BatchInvariantAttention if batch_invariant else GatherAttention
    scratch = GatherScratch(kv, max_gathered, attention.max_blocks(max_model_len, kv.block_size))
    return attention(attention_spec, kv, scratch)


def new_request(
    slot: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    num_computed: int = 0,
    params: SamplingParams = GREEDY,
) -> NewRequest:
    return NewRequest(slot, int32(token_ids), len(token_ids), num_computed, int32(block_ids), params, seed=slot)


def plan(slots: Sequence[int], num_tokens: Sequence[int] | None = None, **fields: object) -> StepPlan:
    return StepPlan(0, int32(slots), b"" if num_tokens is None else int32(num_tokens), **fields)  # pyright: ignore


def int32(values: Sequence[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


def tokens_of(result: StepResult) -> list[int]:
    return np.frombuffer(result.token_ids, np.int32).tolist()


def reference_logits(
    token_ids: Sequence[int],
    spec: ModelSpec = SPEC,
    layer_inputs: list[torch.Tensor] | None = None,
    weights: DecoderWeights | None = None,
) -> torch.Tensor:
    """[T, V], straight from the formulas: no cache, no fusing, a dense mask, float64.

    Args:
        layer_inputs: gets the hidden states [T, D] before each layer.
        weights: None: those of `make_weights`.
    """
    weights = make_weights(spec) if weights is None else weights
    num_q, num_kv, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    positions = torch.arange(len(token_ids), dtype=torch.float64)
    frequencies = spec.rotations[0].theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.cat([positions[:, None] * frequencies] * 2, dim=1)
    behind = positions[:, None] - positions[None, :]

    def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        assert weight is not None
        return x / (x.square().mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * weight.double()

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x @ weight.double().t() + (0 if bias is None else bias.double())

    def capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
        return x if cap is None else cap * torch.tanh(x / cap)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos()[:, None] + torch.cat([-second, first], -1) * angles.sin()[:, None]

    h = weights.embed_VD[list(token_ids)].double()
    for layer, window in zip(weights.layers, spec.layer_windows, strict=True):
        if layer_inputs is not None:
            layer_inputs.append(h)
        mixer = layer.mixer
        heads = linear(norm(h, layer.before_attention_D), mixer.qkv_OD, mixer.qkv_bias_O).view(len(h), -1, head_dim)
        q, k, v = heads.split([num_q, num_kv, num_kv], dim=1)
        q, k = rotate(norm(q, mixer.q_norm_H)), rotate(norm(k, mixer.k_norm_H))
        k, v = (x.repeat_interleave(num_q // num_kv, 1) for x in (k, v))
        scores = torch.einsum("tnh,snh->nts", q, k) / head_dim**0.5
        scores = capped(scores, spec.attention_softcap)
        is_seen = (behind >= 0) & (behind < (window or len(h)))
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if mixer.sinks_N is not None:
            scores = torch.cat([scores, mixer.sinks_N.double()[:, None, None].expand(-1, len(h), 1)], 2)
        weights_NTS = scores.softmax(-1)[..., : len(h)]
        out = torch.einsum("nts,snh->tnh", weights_NTS, v).reshape(len(h), -1)
        h = h + linear(out, mixer.o_DO, mixer.o_bias)
        mlp = layer.feed_forward
        gate, up = linear(norm(h, layer.before_feed_forward_D), mlp.gate_up_FD, mlp.gate_up_bias).chunk(2, -1)
        h = h + linear(functional.silu(gate) * up, mlp.down_DF, mlp.down_bias)
    return capped(linear(norm(h, weights.final_norm_D), weights.lm_head_VD, None), spec.logits_softcap)


def reference_tokens(prompt: Sequence[int], num_tokens: int, spec: ModelSpec = SPEC) -> list[int]:
    """What greedy decoding gives."""
    token_ids, weights = list(prompt), make_weights(spec)
    for _ in range(num_tokens):
        token_ids.append(int(reference_logits(token_ids, spec, weights=weights)[-1].argmax()))
    return token_ids[len(prompt) :]
