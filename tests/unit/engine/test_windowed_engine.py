"""Engines whose layers have sliding windows: they give blocks back, and their outputs stay the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafting_checkpoints import head_config, random_head, write_checkpoint
from families import SIZES, VOCAB_SIZE, make_checkpoint
from native_kernels import needs_kernels

from raycore.activity import RUNNING
from raycore.cache_layout import CacheLayout
from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

FAMILIES = ["gemma3", "gemma4", "gpt_oss", "mistral", "mimo_v2_flash", "llama4"]
WITHOUT_DRAFT_MODELS = ["gemma4", "mimo_v2_flash", "llama4"]
"""Layers with different heads, and chunks, can't be those of draft models."""
BLOCK_SIZE = 4
NUM_NEW = 60
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": BLOCK_SIZE, "num_threads": 1}
PARAMS = SamplingParams(temperature=0.8, max_tokens=NUM_NEW, ignore_eos=True, logprobs=1)
MASKS_ONLY = {"disable_hybrid_kv_cache_manager": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_checkpoint(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def requests_of() -> list[EngineRequest]:
    """Prompts that begin alike, and are longer than the windows of 17 tokens."""
    common = [7, 8, 9, 3, 11, 12, 5] * 12
    prompts = [common[:71], common[:40], [*common[:60], 1, 2, 3], [4], common[:71], common[:33]]
    return [EngineRequest(seq_id, str(seq_id), prompt, PARAMS, seed=seq_id) for seq_id, prompt in enumerate(prompts)]


def make_core(path: Path, **options: Any) -> EngineCore:
    config = resolve(path, dtype="float32", batch_invariant=True, **LIMITS | options)
    return EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))


def begin() -> tuple[dict[int, list[int]], dict[int, list[Any]]]:
    """By seq_id: tokens, and their log probabilities."""
    seq_ids = [request.seq_id for request in requests_of()]
    return {seq_id: [] for seq_id in seq_ids}, {seq_id: [] for seq_id in seq_ids}


def step(core: EngineCore, outputs: tuple[dict[int, list[int]], dict[int, list[Any]]]) -> None:
    found = core.step()
    core.scheduler.check_integrity()
    if found is not None:
        for seq_id, token in zip(found.seq_ids.tolist(), found.token_ids.tolist(), strict=True):
            outputs[0][seq_id].append(token)
        for seq_id, entry in found.logprobs:
            outputs[1][seq_id].append(entry.logprobs)


def run(path: Path, **options: Any) -> tuple[Any, EngineCore]:
    """What requests get, and the engine, which has been shut down."""
    core, outputs = make_core(path, **options), begin()
    for request in requests_of():
        core.submit(request)
    while core.has_work():
        step(core, outputs)
    core.shutdown()
    return outputs, core


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_would_not_fit_without_windows_get_the_same_bits(
    checkpoints: dict[str, Path], family: str, backend: str
) -> None:
    path, options = checkpoints[family], {"attention_backend": backend}
    expected, plain = run(path, num_gpu_blocks_override=200, **MASKS_ONLY, **options)
    assert plain.cache.layout.num_groups == 1
    assert plain.scheduler.load().prefix_cache_hits > 0
    layout = make_layout(path)
    longest = 71 + NUM_NEW - 1
    num_blocks = layout.num_blocks_for(longest) + 4
    assert num_blocks < layout.num_groups * -(-longest // BLOCK_SIZE), "each group would have blocks for all tokens"
    found, core = run(path, num_gpu_blocks_override=num_blocks, **options)
    assert found == expected
    assert core.cache.layout == layout
    many, core = run(path, num_gpu_blocks_override=400, **options)
    assert many == expected
    assert core.scheduler.load().prefix_cache_hits > 0


def make_layout(path: Path) -> CacheLayout:
    core = make_core(path, num_gpu_blocks_override=200)
    core.shutdown()
    return core.cache.layout


@pytest.mark.parametrize(
    ("family", "method"),
    [
        (family, method)
        for family in FAMILIES
        for method in ("ngram", "draft_model")
        if method == "ngram" or family not in WITHOUT_DRAFT_MODELS
    ],
)
def test_drafts_for_models_with_windows_change_no_output(
    checkpoints: dict[str, Path], family: str, method: str
) -> None:
    path = checkpoints[family]
    expected, _ = run(path, num_gpu_blocks_override=200, **MASKS_ONLY)
    settings = {"prompt_lookup_min": 1, "prompt_lookup_max": 2} if method == "ngram" else {"model": str(path)}
    always = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 4, 3)]}
    for num_blocks in (120, 400):
        found, core = run(
            path, num_gpu_blocks_override=num_blocks, speculative_config={"method": method, **always, **settings}
        )
        assert found == expected
        drafts = core.scheduler.load().drafts
        assert drafts.num_draft_tokens > 50
        if method == "draft_model":
            assert core.cache.layout.windows[0] is None, "what drafts needs all tokens"
            assert sum(drafts.accepted_per_position) == drafts.num_draft_tokens


def test_a_head_drafts_for_a_model_with_windows(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    expected, _ = run(checkpoints["gemma3"], num_gpu_blocks_override=200, **MASKS_ONLY)
    config = head_config(SIZES["hidden_size"], VOCAB_SIZE, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    head = write_checkpoint(tmp_path / "head", config, random_head(config))
    always = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 4, 3)]}
    settings = {"method": "eagle3", "model": str(head), **always}
    found, core = run(checkpoints["gemma3"], num_gpu_blocks_override=120, speculative_config=settings)
    assert found == expected
    assert core.scheduler.load().drafts.num_draft_tokens > 50
    assert core.cache.layout.windows == [None, 17, 17]


def test_the_cache_of_groups_is_allocated_again_after_a_sleep(checkpoints: dict[str, Path]) -> None:
    expected, _ = run(checkpoints["gemma3"], num_gpu_blocks_override=200)
    core = make_core(checkpoints["gemma3"], num_gpu_blocks_override=200)
    outputs = begin()
    for request in requests_of():
        core.submit(request)
    for _ in range(30):
        step(core, outputs)
    core.pause()
    core.set_activity(RUNNING.put_to_sleep(1))
    core.set_activity(RUNNING)
    while core.has_work():
        step(core, outputs)
    core.shutdown()
    assert outputs == expected


def test_memory_says_how_many_blocks_there_are_and_windows_make_room_for_more(checkpoints: dict[str, Path]) -> None:
    """The same bytes hold more requests, because half of the layers keep 17 tokens of them."""
    path = checkpoints["gpt_oss"]
    assert json.loads((path / "config.json").read_text())["sliding_window"] == 17
    sizes = {"kv_cache_memory_bytes": 1 << 18, "max_model_len": 256, "max_num_seqs": 64, "max_num_batched_tokens": 64}
    grouped, plain = (make_core(path, **sizes, **extra) for extra in ({}, MASKS_ONLY))
    tokens = [core.cache.layout.num_tokens_in(core.cache.num_blocks) for core in (grouped, plain)]
    grouped.shutdown()
    plain.shutdown()
    assert tokens[1] == plain.cache.num_blocks * BLOCK_SIZE
    assert 1.6 * tokens[1] < tokens[0] < 2 * tokens[1]
