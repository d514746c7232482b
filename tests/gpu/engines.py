"""Small random checkpoints, and engines in this process that run them, for `benchmarks/gpu.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# isort: off
import raycore.worker.openmp  # noqa: F401  # before torch: sets the environment of its OpenMP

# isort: on
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from raycore.checkpoint.model_spec import load_model_spec
from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest, TokenLogprobs
from raycore.models.spec import ModelSpec
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

Device = Literal["cpu", "cuda"]

VOCAB_SIZE = 512

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "torch_dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    # prompts outgrow the window
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 17,
        "num_key_value_heads": 1,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    # a dense layer beside a sparse one
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_key_value_heads": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


# ---- checkpoints


def write_checkpoint(family: str, path: Path) -> Path:
    """Write a checkpoint in float32 whose next tokens are rarely almost equally likely."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(SIZES | FAMILIES[family]))
    spec = load_model_spec(path)
    generator = torch.Generator().manual_seed(sum(map(ord, family)))
    tensors: dict[str, Tensor] = {}
    for name, shape in _shapes(spec):
        values = torch.randn(shape, generator=generator)
        # norms that aren't 1 show whether they are applied
        tensors[name] = 1 + 0.2 * values if name.endswith("norm.weight") else values / math.sqrt(shape[-1])
    head = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    tensors[head] *= 3
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    dim, num_q, num_kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "model.embed_tokens.weight", (spec.vocab_size, dim)
    if not spec.tie_word_embeddings:
        yield "lm_head.weight", (spec.vocab_size, dim)
    yield "model.norm.weight", (dim,)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (dim,)
        yield f"{prefix}post_attention_layernorm.weight", (dim,)
        for name, size in (("q", num_q), ("k", num_kv), ("v", num_kv)):
            yield f"{prefix}self_attn.{name}_proj.weight", (size, dim)
        yield f"{prefix}self_attn.o_proj.weight", (dim, num_q)
        if spec.qk_norm:
            yield f"{prefix}self_attn.q_norm.weight", (spec.head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (spec.head_dim,)
        yield from _feed_forward_shapes(spec, layer, prefix)


def _feed_forward_shapes(spec: ModelSpec, layer: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    dim, moe = spec.hidden_size, spec.moe
    if moe is None or not moe.sparse_layers[layer]:
        experts, size, names = [f"{prefix}mlp"], spec.intermediate_size, ("gate_proj", "up_proj", "down_proj")
    else:
        is_mixtral = spec.architecture == "MixtralForCausalLM"
        block = f"{prefix}block_sparse_moe" if is_mixtral else f"{prefix}mlp"
        yield f"{block}.gate.weight", (moe.num_experts, dim)
        experts = [f"{block}.experts.{expert}" for expert in range(moe.num_experts)]
        size, names = moe.intermediate_size, ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    for expert in experts:
        for name, shape in zip(names, ((size, dim), (size, dim), (dim, size)), strict=True):
            yield f"{expert}.{name}.weight", shape


# ---- engines


@dataclass
class Answer:
    """What an engine has answered to one request."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    states: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """By position: float32[D], the final hidden state."""


def make_core(path: Path, device: Device, **options: Any) -> EngineCore:
    """Start an engine core with its worker in this process."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 128,
        "num_threads": 1,
    }
    config = resolve(path, device=device, **defaults | options)
    return EngineCore(config, InlineExecutor(config, RankIdentity(dp_rank=0, num_local_workers=1)))


@contextmanager
def engine(path: Path, device: Device, **options: Any) -> Iterator[EngineCore]:
    """An engine core that is shut down at the end of the `with` statement."""
    core = make_core(path, device, **options)
    try:
        yield core
    finally:
        core.shutdown()


def prompts() -> list[list[int]]:
    """Prompts of many lengths. The last two have a prefix of several blocks in common."""
    rng = np.random.default_rng(7)
    made = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 5, 16, 33, 50)]
    return [*made, [*made[4][:40], 3, 1, 4]]


def generate(core: EngineCore, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[Answer]:
    """Run all requests together, in the order in which they are asked."""
    answers = [Answer() for _ in asked]
    for seq_id, (prompt, params) in enumerate(asked):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, params, seed=params.seed or len(prompt)))
    while core.has_work():
        outputs = core.step()
        if outputs is None:
            continue
        for seq_id, token_id in zip(outputs.seq_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            answers[seq_id].token_ids.append(token_id)
        for seq_id, entry in outputs.logprobs:
            answers[seq_id].logprobs.append(entry)
        for seq_id, _, entries in outputs.prompt_logprobs:
            answers[seq_id].prompt_logprobs += entries
        for seq_id, report in outputs.reports:
            size = len(report.data) // report.num_tokens
            rows = [report.data[start : start + size] for start in range(0, len(report.data), size)]
            answers[seq_id].states |= dict(enumerate(rows, start=report.position))
        refused = [each for each in outputs.finished if each.finish_reason in ("error", "failed")]
        assert not refused, f"requests failed: {refused}"
    return answers


def int32(values: Sequence[int] | range | np.ndarray) -> bytes:
    """The bytes of an array in a plan."""
    return np.asarray(values, np.int32).tobytes()
