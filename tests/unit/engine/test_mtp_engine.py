"""Engines that draft with a layer of their own model: no output changes, whatever is cached, preempted or in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import NUM_NEW_TOKENS, prompts, reference
from mtp_checkpoints import MtpCheckpoint
from number_formats import BATCH_INVARIANT

from raycore.activity import RUNNING
from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=NUM_NEW_TOKENS, logprobs=1, ignore_eos=True)
ALWAYS = {"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 8, 3)]}


@pytest.fixture(scope="module", params=["glm4_moe", "deepseek_v3", "mimo_v2_flash", "qwen3_next", "qwen2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MtpCheckpoint(request.param, tmp_path_factory.mktemp("checkpoint")).path


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """Transformers' tokens, or those without drafts of an architecture that transformers doesn't know."""
    return run(engine(path)) if path.name == "qwen2" else reference(path)


def engine(path: Path, **options: Any) -> EngineCore:
    sizes = {"num_threads": 1, "max_num_seqs": 6, "max_num_batched_tokens": 24, "block_size": 8}
    config = resolve(path, **{"dtype": "float32", "num_gpu_blocks_override": 200, **sizes, **options})
    return EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))


def run(core: EngineCore, params: SamplingParams = GREEDY) -> list[list[Any]]:
    """The tokens of each prompt, and after them their log probabilities if they are asked for."""
    found: list[list[Any]] = [[] for _ in prompts()]
    logprobs: list[list[Any]] = [[] for _ in prompts()]
    for seq_id, prompt in enumerate(prompts()):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, params, seed=seq_id))
    while core.has_work():
        step = core.step()
        if step is not None:
            for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
                found[seq_id].append(token)
            for seq_id, entry in step.logprobs:
                logprobs[seq_id].append(list(entry.logprobs))
    core.scheduler.check_integrity()
    return [tokens + each for tokens, each in zip(found, logprobs, strict=True)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("blocks", [200, 20], ids=["enough blocks", "preemptions"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_drafts_of_the_models_own_layer_change_no_token(
    path: Path, expected: list[list[int]], backend: str, blocks: int, depth: int
) -> None:
    options = {"attention_backend": backend, "num_gpu_blocks_override": blocks, "max_concurrent_batches": depth}
    core = engine(path, speculative_config=ALWAYS, **options)
    for _ in range(2):  # the second time from cached prefixes
        assert run(core) == expected
    load = core.load()
    assert load.drafts.num_draft_tokens > 50
    # with windows of their own, few blocks keep no prefix
    assert load.prefix_cache_hits > 0 or (path.name, blocks) == ("mimo_v2_flash", 20)
    assert (load.num_preemptions > 0) == (blocks == 20)
    core.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("options", BATCH_INVARIANT)
def test_drafts_of_the_models_own_layer_change_no_bit(path: Path, options: dict[str, Any], depth: int) -> None:
    if "deepseek" in path.name and "kv_cache_dtype" in options:
        pytest.skip("latents aren't kept in integers")
    expected = run(engine(path, **options), SAMPLED)
    drafting = engine(path, speculative_config=ALWAYS, max_concurrent_batches=depth, **options)
    assert run(drafting, SAMPLED) == expected
    assert drafting.load().drafts.num_draft_tokens > 50


def test_a_sleeping_engine_reads_its_own_layer_again(path: Path, expected: list[list[int]]) -> None:
    core = engine(path, speculative_config=ALWAYS)
    assert run(core) == expected
    drafts = core.load().drafts.num_draft_tokens, sum(core.load().drafts.accepted_per_position)
    core.pause()
    core.set_activity(RUNNING.put_to_sleep(2))
    core.set_activity(RUNNING)
    assert run(core) == expected
    again = core.load().drafts.num_draft_tokens, sum(core.load().drafts.accepted_per_position)
    assert [new - old for new, old in zip(again, drafts, strict=True)] == [*drafts]
