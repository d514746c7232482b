"""The memory that a worker sets aside for a step holds the worst step that its limits allow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caches import cache_of
from drafting_checkpoints import head_config
from msgspec.structs import replace
from native_kernels import needs_kernels
from peak_memory import peak_bytes

from raycore.config import resolve
from raycore.kernels import library
from raycore.messages import NO_STATE, NewRequest, StatePlan, StepPlan, StepTokens
from raycore.parallel.context_parallel import ContextParallel
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.worker import worst_steps as measured
from raycore.worker.groups import WorkerGroups
from raycore.worker.rank import WorkerRank
from raycore.worker.worker import Worker

ALONE = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1)
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
SHARED = MIXTURE | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "shared_expert_intermediate_size": 4096,
}
GROUPS = MIXTURE | {
    "architectures": ["Glm4MoeForCausalLM"],
    "num_experts": 512,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 0,
}
STATES = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
GATED = {"architectures": ["AfmoeForCausalLM"], "num_dense_layers": 2, "intermediate_size": 64, "head_dim": 64}
DIFFERING = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 256,
    "mlp_layer_types": ["dense", "dense"],
    "num_key_value_heads": 2,
    "head_dim": 64,
    "v_head_dim": 32,
    "partial_rotary_factor": 0.5,
}
"""Layers with different heads."""
SHARING = {
    "architectures": ["Gemma4ForCausalLM"],
    "layer_types": ["full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "num_key_value_heads": 2,
    "global_head_dim": 64,
    "vocab_size_per_layer_input": 5000,
    "hidden_size_per_layer_input": 64,
}
"""A layer that reads another's keys and values, and inputs of layers."""
STREAMS = {
    "architectures": ["Gemma3nForCausalLM"],
    "layer_types": ["full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "activation_sparsity_pattern": [0.9, 0.0],
    "vocab_size_per_layer_input": 5000,
    "hidden_size_per_layer_input": 64,
}
KDA = {
    "architectures": ["KimiLinearForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
    "linear_num_heads": 8,
    "linear_head_dim": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
BESIDE = {
    "architectures": ["FalconH1ForCausalLM"],
    "mamba_d_ssm": 512,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 64,
    "attention_in_multiplier": 0.5,
    "ssm_in_multiplier": 0.5,
    "ssm_multipliers": [0.5, 0.5, 0.5, 0.5, 0.5],
    "mlp_multipliers": [0.5, 0.5],
}
CHANNELS = {
    "architectures": ["JambaForCausalLM"],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "intermediate_size": 128,
}
LIGHTNING = {
    "architectures": ["MiniMaxForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "intermediate_size": 128,
    "head_dim": 64,
}
SHORT_CONVOLUTIONS = {
    "architectures": ["Lfm2ForCausalLM"],
    "layer_types": ["conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "conv_bias": True,
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 128,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
}
SELECTING = LATENT | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 128,
    "index_head_dim": 64,
    "index_n_heads": 16,
}
SELECTED_BEFORE = SELECTING | {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": ["full", "shared"]}
"""The second layer sees the tokens that the first one has selected."""
BLOCKS = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "text_config": DENSE
    | {
        "dense_intermediate_size": 160,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "dense"],
        "rotary_dim": 16,
        "index_head_dim": 32,
        "index_block_size": 32,
        "index_topk_blocks": 4,
    },
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 1}
SEVEN_GROUPS = WINDOWS | {"num_hidden_layers": 7, "sliding_window": 64}
CAPPED = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 256}
LARGE_VOCABULARY = {"vocab_size": 60_000, "num_hidden_layers": 1}

BLOCK_SIZE = 16
MANY = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": 1024}
"""Requests and their lengths take most."""
MANY_SHORTER = MANY | {"max_model_len": 512}
"""For a draft model, which computes all of these requests' tokens."""
BIG = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 512}
"""A step's tokens take most."""
BIGGER = {"max_num_seqs": 4, "max_num_batched_tokens": 1024, "max_model_len": 1024}
"""The same, of experts, who share among few tokens what is set aside for each."""
LONG = MANY | {"max_model_len": 2048}
"""The same as `MANY`, of requests that are pooled, which keep little."""
EVERYTHING = replace(measured.EVERYTHING, top_k=0, top_p=0.9999999, logit_bias={3: 1.0})
GREEDY = SamplingParams(temperature=0.0)


def plans(name: str, lengths: list[int], counts: list[int], params: SamplingParams = GREEDY) -> tuple[str, StepPlan]:
    """A step that computes the last `counts` tokens of requests that are so long. All share one block."""
    requests = [
        NewRequest(
            slot,
            np.full(length, slot % 50, np.int32).tobytes(),
            length if count > 1 else 1,  # penalties take more for output tokens
            length - count,
            bytes(4 * -(-length // BLOCK_SIZE)),
            GREEDY if slot % 8 == 7 else params,
            seed=slot,
        )
        for slot, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]
    slots = np.arange(len(lengths), dtype=np.int32)
    states = StatePlan(np.stack([slots, np.full_like(slots, NO_STATE)], 1).tobytes())
    counted = np.array(counts, np.int32).tobytes()
    return name, StepPlan(0, slots.tobytes(), counted, new_requests=requests, states=states)


DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


def with_drafts(name: str, lengths: list[int], params: SamplingParams = GREEDY) -> tuple[str, StepPlan]:
    """A step that computes three drafts for each of these requests, after its last token."""
    _, plan = plans(name, lengths, [4] * len(lengths), params)
    starts = np.array(lengths, np.int32) - 4
    plan.tokens = StepTokens(
        starts.tobytes(), np.full(len(lengths), 4, np.int32).tobytes(), bytes(4 * 4 * len(lengths))
    )
    return name, plan


def worst_steps(num_seqs: int, num_tokens: int, max_model_len: int) -> Iterator[tuple[str, StepPlan]]:
    longest, ones = max_model_len - 1, [1] * num_seqs
    chunk, share = min(num_tokens, longest), num_tokens // num_seqs
    lengths = [longest * (slot + 1) // num_seqs for slot in range(num_seqs)]
    yield plans("one long and many short decodes", [longest, *[20] * (num_seqs - 1)], ones)
    yield plans("long decodes", [longest] * num_seqs, ones)
    yield plans("decodes of all lengths", lengths, ones)
    yield plans("a prompt", [chunk], [chunk])
    yield plans("equal prompts", [share] * num_seqs, [share] * num_seqs)
    yield plans("a long prompt's end", [longest], [chunk - 1])
    yield plans("ends of long prompts", [longest] * num_seqs, [share] * num_seqs)
    yield plans("decodes and a prompt's end", [longest] * num_seqs, [*ones[1:], num_tokens - num_seqs])
    yield plans("long requests that ask for everything", [longest] * num_seqs, ones, EVERYTHING)
    yield plans("a prompt that asks for everything", [chunk], [chunk], EVERYTHING)


def choose_kernels(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """Have workers compute in plain torch if `kernels` is "none", with less scratch memory than usual."""
    if kernels == "none":
        monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr("raycore.attention.scratch.SCRATCH_BYTES", 4 << 20)


@pytest.mark.parametrize(
    ("shape", "limits", "dtype", "batch_invariant"),
    [
        ({}, MANY, "float32", False),
        ({}, MANY, "bfloat16", False),
        ({}, MANY, "float32", True),
        (DRAFTS, MANY, "float32", False),
        (DRAFTS | LARGE_VOCABULARY, MANY, "float32", True),
        (WINDOWS, MANY, "float32", False),
        (SEVEN_GROUPS, MANY, "float32", False),
        (SEVEN_GROUPS, BIG, "float32", True),
        (SEVEN_GROUPS, BIG, "bfloat16", False),
        (LARGE_VOCABULARY, MANY, "float32", False),
        ({}, BIG, "float32", False),
        ({}, BIG, "bfloat16", False),
        ({}, BIG, "float32", True),
        (CAPPED, MANY, "bfloat16", False),
        (CAPPED, BIG, "float32", False),
        (CAPPED, BIG, "float32", True),
        (MIXTURE, BIGGER, "float32", False),
        (MIXTURE, BIGGER, "float32", True),
        (SHARED, BIGGER, "float32", False),
        (SHARED, BIGGER, "float32", True),
        (GROUPS, BIGGER, "float32", False),
        (GROUPS, BIGGER, "bfloat16", False),
        (GATED, BIG, "float32", False),
        (GATED, BIG, "bfloat16", True),
        (DIFFERING, MANY, "float32", False),
        (DIFFERING, BIG, "bfloat16", False),
        (DIFFERING, BIG, "float32", True),
        (SHARING, MANY, "float32", False),
        (SHARING, BIG, "bfloat16", False),
        (SHARING, BIG, "float32", True),
        (STREAMS, MANY, "float32", False),
        (STREAMS, BIG, "bfloat16", False),
        (STREAMS, BIG, "float32", True),
        (STATES, MANY, "float32", False),
        (STATES | DRAFTS, MANY, "bfloat16", False),
        (STATES, BIG, "float32", False),
        (STATES, BIG, "bfloat16", True),
        (KDA, MANY, "float32", False),
        (KDA | DRAFTS, MANY, "bfloat16", False),
        (KDA, BIG, "float32", False),
        (KDA, BIG, "bfloat16", True),
        (BESIDE, MANY, "float32", False),
        (BESIDE, BIG, "float32", False),
        (BESIDE, BIG, "bfloat16", True),
        (LIGHTNING, MANY, "bfloat16", False),
        (LIGHTNING, BIG, "float32", False),
        (LIGHTNING, BIG, "float32", True),
        (CHANNELS, MANY, "float32", False),
        (CHANNELS | DRAFTS, MANY, "bfloat16", False),
        (CHANNELS, BIG, "float32", False),
        (CHANNELS, BIG, "bfloat16", True),
        (SHORT_CONVOLUTIONS, MANY, "float32", False),
        (SHORT_CONVOLUTIONS | DRAFTS, MANY, "bfloat16", False),
        (SHORT_CONVOLUTIONS, BIG, "float32", True),
        (SHORT_CONVOLUTIONS, BIG, "bfloat16", False),
        (LATENT, MANY, "float32", False),
        (LATENT, MANY, "bfloat16", False),
        (LATENT, MANY, "float32", True),
        (LATENT, BIG, "float32", False),
        (LATENT, BIG, "bfloat16", False),
        (LATENT, BIG, "float32", True),
        (SELECTING, MANY, "float32", False),
        (SELECTING, MANY, "bfloat16", False),
        (SELECTING, BIG, "float32", False),
        (SELECTING, BIG, "float32", True),
        (SELECTED_BEFORE, MANY, "float32", False),
        (BLOCKS, MANY, "float32", False),
        (BLOCKS, MANY, "bfloat16", False),
        (BLOCKS, BIG, "float32", False),
        (BLOCKS, BIG, "float32", True),
    ],
)
@pytest.mark.parametrize("kernels", ["none", pytest.param("auto", marks=needs_kernels)])
def test_the_largest_step_fits_the_estimated_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, Any],
    limits: dict[str, int],
    dtype: str,
    batch_invariant: bool,
    kernels: str,
) -> None:
    choose_kernels(monkeypatch, kernels)
    drafts = {name: value for name, value in shape.items() if name in DRAFTS}
    shape = {name: value for name, value in shape.items() if name not in DRAFTS}
    (tmp_path / "config.json").write_text(json.dumps(DENSE | shape | {"torch_dtype": dtype}))
    options: dict[str, Any] = {"load_format": "dummy", "num_threads": 1, "dtype": dtype, "block_size": BLOCK_SIZE}
    options |= drafts
    worker = Worker(resolve(str(tmp_path), batch_invariant=batch_invariant, **options, **limits), ALONE)
    worker.init_device()
    worker.load_model()
    set_aside = worker._core.sizes.step
    at_start = peak_bytes(lambda: worker.initialize_cache(cache_of(worker, 2)))
    at_start -= worker._core.sizes.states
    peaks: dict[str, int] = {}
    steps = list(worst_steps(*limits.values()))
    if drafts:
        long = [limits["max_model_len"] - 1] * limits["max_num_seqs"]
        steps += [
            with_drafts("drafts", long),
            with_drafts("drafts of requests that ask for everything", long, EVERYTHING),
        ]
    for name, plan in steps:
        for request in plan.new_requests:
            request.block_ids *= worker._core.sizes.layout.num_groups
        peaks[name] = peak_bytes(lambda plan=plan: worker.execute_model(plan))
        worker.execute_model(StepPlan(1, freed_slots=list(range(limits["max_num_seqs"]))))
    worker.shutdown()
    worst = at_start + max(peaks.values())
    assert worst <= set_aside < 3 * worst, f"{peaks}, {at_start} of it from the start on; set aside: {set_aside}"


@pytest.mark.parametrize("limits", [LONG, BIG], ids=["many", "big"])
@pytest.mark.parametrize("kernels", ["none", pytest.param("auto", marks=needs_kernels)])
def test_the_largest_step_that_pools_fits_the_estimated_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], kernels: str
) -> None:
    choose_kernels(monkeypatch, kernels)
    config = DENSE | {"architectures": ["Qwen3Model"], "hidden_size": 512, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"load_format": "dummy", "num_threads": 1, "dtype": "bfloat16", "block_size": BLOCK_SIZE}
    worker = Worker(resolve(str(tmp_path), **options, **limits), ALONE)
    worker.init_device()
    worker.load_model()
    set_aside = worker._core.sizes.step
    at_start = peak_bytes(lambda: worker.initialize_cache(cache_of(worker, 2)))
    num_seqs, num_tokens, longest = limits.values()
    share = num_tokens // num_seqs
    peaks: dict[str, int] = {}
    for lengths in ([min(num_tokens, longest - 1)], [share] * num_seqs):
        name, plan = plans(f"{len(lengths)} prompts", lengths, lengths)
        for request in plan.new_requests:
            request.pooling = PoolingParams(task="token_embed")
        peaks[name] = peak_bytes(lambda plan=plan: worker.execute_model(plan))
        worker.execute_model(StepPlan(1, freed_slots=list(range(num_seqs))))
    worker.shutdown()
    worst = at_start + max(peaks.values())
    assert worst <= set_aside < 3 * worst, f"{peaks}, {at_start} of it from the start on; set aside: {set_aside}"


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "mtp"])
@pytest.mark.parametrize("kernels", ["none", pytest.param("auto", marks=needs_kernels)])
def test_the_largest_draft_step_fits_the_estimated_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kernels: str
) -> None:
    choose_kernels(monkeypatch, kernels)
    target, draft = tmp_path / "target", tmp_path / "draft"
    own = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1} if kind == "mtp" else {}
    for path, config in (
        (target, DENSE | {"num_hidden_layers": 4} | own),
        (draft, DENSE if kind == "draft_model" else head_config(DENSE["hidden_size"], DENSE["vocab_size"])),
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    what = {"method": "mtp"} if kind == "mtp" else {"model": str(draft)}
    speculative = {"num_speculative_tokens": 8} | what
    options: dict[str, Any] = {"load_format": "dummy", "num_threads": 1, "dtype": "float32", "block_size": BLOCK_SIZE}
    worker = Worker(resolve(str(target), speculative_config=speculative, **options, **MANY_SHORTER), ALONE)
    worker.init_device()
    worker.load_model()
    set_aside = worker._core.sizes.step
    at_start = peak_bytes(lambda: worker.initialize_cache(cache_of(worker, 2)))
    num_seqs, num_tokens, longest = MANY_SHORTER.values()
    _, plan = plans("many long prompts", [longest - 9] * num_seqs, [num_tokens // num_seqs] * num_seqs, EVERYTHING)
    in_step = peak_bytes(lambda: worker.execute_model(plan))
    _, drafts = with_drafts("drafts", [longest - 9] * num_seqs, EVERYTHING)
    in_step = max(in_step, peak_bytes(lambda: worker.execute_model(drafts)))
    slots, lengths = list(range(num_seqs)), [8] * num_seqs
    guessed: list[list[list[int]]] = []
    in_draft = peak_bytes(lambda: guessed.append(worker.take_draft_token_ids(slots, lengths)))
    assert len(guessed[0][0]) == 8
    worker.shutdown()
    worst = at_start + max(in_step, in_draft)
    assert worst <= set_aside < 3 * worst, f"{at_start}, {in_step}, {in_draft}; set aside: {set_aside}"


class Repeating:
    """In the place of the collectives of two workers that compute the same."""

    def all_gather(self, x):
        return [x.clone(), x.clone()]

    def gather_columns(self, x_RC, columns):
        return torch.stack([x_RC[:, columns]] * 2)


@pytest.mark.parametrize(
    ("shape", "limits", "dtype", "batch_invariant"),
    [
        ({}, MANY, "float32", False),
        ({}, MANY, "bfloat16", True),
        ({}, BIG, "float32", False),
        (WINDOWS, BIG, "bfloat16", False),
        (CAPPED, BIG, "float32", True),
        (LATENT, MANY, "float32", False),
        (LATENT, MANY, "bfloat16", True),
        (LATENT, BIG, "float32", False),
        (LATENT, BIG, "bfloat16", False),
    ],
)
@pytest.mark.parametrize("kernels", ["none", pytest.param("auto", marks=needs_kernels)])
def test_the_largest_step_of_a_share_of_the_keys_fits_the_estimated_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, Any],
    limits: dict[str, int],
    dtype: str,
    batch_invariant: bool,
    kernels: str,
) -> None:
    choose_kernels(monkeypatch, kernels)
    (tmp_path / "config.json").write_text(json.dumps(DENSE | shape | {"torch_dtype": dtype}))
    options: dict[str, Any] = {"load_format": "dummy", "num_threads": 1, "dtype": dtype, "block_size": BLOCK_SIZE // 2}
    options |= {"prefill_context_parallel_size": 2, "disable_hybrid_kv_cache_manager": True}
    worker = Worker(resolve(str(tmp_path), batch_invariant=batch_invariant, **options, **limits), ALONE)
    worker.init_device()
    worker._core.groups.context = ContextParallel(0, 2, Repeating())
    worker.load_model()
    set_aside = worker._core.sizes.step
    at_start = peak_bytes(lambda: worker.initialize_cache(cache_of(worker, 2)))
    peaks: dict[str, int] = {}
    for name, plan in worst_steps(*limits.values()):
        peaks[name] = peak_bytes(lambda plan=plan: worker.execute_model(plan))
        worker.execute_model(StepPlan(1, freed_slots=list(range(limits["max_num_seqs"]))))
    worker._core.groups = WorkerGroups()
    worker.shutdown()
    worst = at_start + max(peaks.values())
    assert worst <= set_aside < 4 * worst, f"{peaks}, {at_start} of it from the start on; set aside: {set_aside}"
