"""Models that transformers' code computes give transformers' own greedy tokens, whatever the scheduler does.

They run through `EngineCore` on living workers of TP 1 and 2, as raycore's families do in `test_equality.py`.
"""

from __future__ import annotations

import itertools
from importlib.metadata import version

import pytest
from equality import CORNERS, PREEMPTING_BLOCKS, count_preemptions, few, generate
from families import OTHERS

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.executor.inline import InlineExecutor
from raycore.node.versions import TESTED
from raycore.worker.rank import RankIdentity

KNOWN = ["gpt_neox", "llama3", "gemma2", "phi3", "gpt_oss", "cohere2", "stablelm"]
"""Families of raycore's that are also computed by transformers' code."""
DIVIDED = ["gpt_neox", "cohere2", "deepseek_v3_heads", "llama3", "gemma2", "phi3"]
"""Those that transformers has a plan for."""
NEWEST = TESTED["transformers"][1] + "."
"""Of older versions, some refuse models that this one computes."""


@pytest.mark.parametrize("name", [*OTHERS, *KNOWN])
@pytest.mark.parametrize("workers", [(1, 1, 1, 1), (2, 1, 1, 1)], ids=["tp1", "tp2"], indirect=True)
def test_every_schedule_gives_the_reference_tokens(workers, checkpoints, name):
    if workers.shape["tensor_parallel_size"] > 1 and name not in DIVIDED:
        pytest.skip("transformers has no plan for it that raycore knows")
    path, expected = checkpoints[name]
    if not version("transformers").startswith(NEWEST):
        try:
            resolve(str(path), model_impl="transformers", **workers.shape)
        except (InvalidCheckpoint, InvalidConfig) as error:
            pytest.skip(str(error))
    distinct = set(itertools.chain(*expected))
    assert len(distinct) > 5, "a model that repeats itself would show little"
    for caching, budget, blocks in CORNERS:
        scheduling = {"enable_prefix_caching": caching, "max_num_batched_tokens": budget}
        config = resolve(
            str(path),
            dtype="float32",
            model_impl="transformers",
            num_threads=1,
            max_num_seqs=8,
            block_size=8,
            num_gpu_blocks_override=blocks,
            **workers.shape,
            **scheduling,
        )
        if blocks == PREEMPTING_BLOCKS:
            config = few(config)
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
    options = {"model_impl": "transformers", "dtype": "float32", "num_threads": 1, "max_num_seqs": 8}
    config = resolve(str(path), speculative_config=guesses, **options)
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
