"""Models that transformers' code computes give transformers' own greedy tokens, whatever the scheduler does.

They run through `EngineCore` on living workers of TP 1 and 2, as raycore's families do in `test_equality.py`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from equality import LivingWorkers, count_preemptions, generate
from families import OTHERS, make_checkpoint, reference

from placement.reserve import RankBundles
from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.executor.ray_executor import RayExecutor
from raycore.worker.rank import RankIdentity

KNOWN = ["llama3", "gemma2", "phi3", "gpt_oss"]
"""Families of raycore's that are also computed by transformers' code."""
DIVIDED = ["gpt_neox", "cohere2", "deepseek_v3_heads", "llama3", "gemma2", "phi3"]
"""Those that transformers has a plan for."""
CHUNKING_BUDGET, PREEMPTING_BLOCKS = 24, 12
SCHEDULES = [(True, CHUNKING_BUDGET, PREEMPTING_BLOCKS), (True, 2048, 200), (False, CHUNKING_BUDGET, 200)]
"""Prefix caching, tokens in a step, and blocks of 8 tokens."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, tuple[Path, list[list[int]]]]:
    made = {}
    for name in [*OTHERS, *KNOWN]:
        path = make_checkpoint(name, tmp_path_factory.mktemp("checkpoints"))
        made[name] = path, reference(path)
    return made


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def workers(request, ray_cluster, checkpoints):
    size = request.param
    options = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "tensor_parallel_size": size}
    config = resolve(str(checkpoints["llama3"][0]), **options)
    group = None
    if size == 1:
        executor = InlineExecutor(config, RankIdentity(0, 1))
    else:
        group = ray_cluster.util.placement_group([{"CPU": 1}] * size)
        executor = RayExecutor(config, RankIdentity(0, size), RankBundles(group, range(size)))
    executor.initialize()
    yield LivingWorkers(executor, {"tensor_parallel_size": size})
    executor.shutdown()
    if group is not None:
        ray_cluster.util.remove_placement_group(group)


@pytest.mark.parametrize("name", [*OTHERS, *KNOWN])
def test_every_schedule_gives_the_reference_tokens(workers, checkpoints, name):
    if workers.shape["tensor_parallel_size"] > 1 and name not in DIVIDED:
        pytest.skip("transformers has no plan for it that raycore knows")
    path, expected = checkpoints[name]
    distinct = set(itertools.chain(*expected))
    assert len(distinct) > 5, "a model that repeats itself would show little"
    for caching, budget, blocks in SCHEDULES:
        scheduling = {"enable_prefix_caching": caching, "max_num_batched_tokens": budget}
        config = resolve(
            str(path),
            dtype="float32",
            model_impl="transformers" if name in KNOWN else "auto",
            num_threads=1,
            max_num_seqs=8,
            block_size=8,
            num_gpu_blocks_override=blocks,
            **workers.shape,
            **scheduling,
        )
        assert config.model.spec.implementation == "transformers"
        core = EngineCore(config, workers.for_engine(config))
        preempted = count_preemptions(core)
        for _ in range(1 + caching):  # the second time finds prefixes
            assert generate(core) == expected, scheduling
        core.scheduler.check_integrity()
        assert bool(preempted) == (blocks == PREEMPTING_BLOCKS)


def test_guessed_tokens_change_nothing(checkpoints):
    path, expected = checkpoints["gpt_neox"]
    guesses = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        # whether or not it pays
        "num_speculative_tokens_per_batch_size": [(1, 8, 3)],
    }
    config = resolve(str(path), dtype="float32", num_threads=1, max_num_seqs=8, speculative_config=guesses)
    executor = InlineExecutor(config, RankIdentity(0, 1))
    executor.initialize()
    core = EngineCore(config, executor)
    steps = _steps_with_guesses(core)
    assert generate(core) == expected
    assert any(steps)
    core.shutdown()


def _steps_with_guesses(core: EngineCore) -> list[bool]:
    """A list that grows by an entry for each step: whether it has guesses."""
    found: list[bool] = []
    execute = core.executor.execute

    def noting(plan):
        found.append(plan.has_drafts)
        return execute(plan)

    core.executor.execute = noting
    return found
