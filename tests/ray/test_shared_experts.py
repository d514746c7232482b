"""Ranks that share experts, through `LLM`: the reference tokens, whoever has work and when, and whoever dies."""

from __future__ import annotations

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import pytest
from families import NUM_NEW_TOKENS, make_checkpoint, prompts, reference
from faults import signal_in_step
from number_formats import BATCH_INVARIANT

from raycore import LLM, InvalidConfig, SamplingParams
from raycore.config import EngineConfig, resolve

# workers can't import a test module, so what they are to call travels whole
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_BLOCKS = 200
OPTIONS = {
    "num_threads": 1,
    "max_num_seqs": 8,
    "block_size": 8,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_num_batched_tokens": 24,
    "standby_delay_s": None,
}
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}
    for family in ("mixtral", "qwen3_moe"):
        path = make_checkpoint(family, tmp_path_factory.mktemp("moe"))
        made[family] = str(path), reference(path)
    return made


SHAPES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "tp{}-dp{}-pp{}".format(*shape))
def shape(request) -> dict[str, Any]:
    sizes = dict(
        zip(("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"), request.param, strict=True)
    )
    shape = {**sizes, "enable_expert_parallel": True}
    return {"dtype": "float32", **shape, **OPTIONS}


@pytest.fixture(scope="module")
def living_llm(ray_cluster, checkpoints, shape):
    """An `LLM` of each shape, which the families take turns in."""
    with LLM(checkpoints["mixtral"][0], **shape) as llm:
        yield llm


def _become(worker, config: EngineConfig) -> None:
    worker.config = config
    worker.load_model()
    worker.initialize_cache(NUM_BLOCKS)


def tokens(llm: LLM, ids, params=PARAMS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(ids, params, use_tqdm=False)]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_uneven_arrivals_give_the_reference_tokens(living_llm, checkpoints, shape, family):
    path, expected = checkpoints[family]
    assert living_llm.reset_prefix_cache()
    living_llm.collective_rpc(_become, args=(resolve(path, **shape),))
    assert tokens(living_llm, prompts()) == expected
    rnd = random.Random(0)
    for _ in range(15):  # one alone, several, a pause in which all rest, and the next before the last is over
        indices = rnd.sample(range(len(expected)), rnd.randrange(1, 4))
        assert tokens(living_llm, [prompts()[i] for i in indices]) == [expected[i] for i in indices]
        time.sleep(rnd.choice([0, 0, 0.01, 0.05]))


def test_ranks_pause_and_sleep_together(living_llm, checkpoints, shape):
    path, expected = checkpoints["mixtral"]
    assert living_llm.reset_prefix_cache()
    living_llm.collective_rpc(_become, args=(resolve(path, **shape),))
    rnd = random.Random(1)
    with ThreadPoolExecutor() as pool:
        for number in range(6):
            indices = rnd.sample(range(len(expected)), rnd.randrange(1, 4))
            results = pool.submit(tokens, living_llm, [prompts()[i] for i in indices])
            time.sleep(rnd.random() * 0.05)
            if number % 2:
                living_llm.pause_generation(mode="keep", clear_cache=bool(number % 4 == 1))
                living_llm.resume_generation()
            else:
                living_llm.sleep(level=1 + number // 2 % 2, mode="keep")
                assert living_llm.wake_up()
            assert results.result(60) == [expected[i] for i in indices]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", BATCH_INVARIANT)
def test_a_rank_that_dies_takes_its_group_along_and_no_request(ray_cluster, checkpoints, mode):
    path, _ = checkpoints["mixtral"]
    shape = {"data_parallel_size": 2, "enable_expert_parallel": True, "step_timeout_s": 5.0}
    with LLM(path, **shape, **mode, **OPTIONS) as llm:
        expected = tokens(llm, prompts() * 2, LONG)
        before = [info.pid for info in llm.engine_infos]
        signal_in_step(llm, dp_rank=1, pid=before[1], num_steps=50)
        assert tokens(llm, prompts() * 2, LONG) == expected
        assert not set(before) & {info.pid for info in llm.engine_infos}, "all of the group are others"

        llm.scale(3, drain_timeout_s=0.0)
        assert len(llm.engine_infos) == 3
        assert tokens(llm, prompts() * 2, LONG) == expected
        with pytest.raises(InvalidConfig, match="data_parallel_size=1"):
            llm.scale(1)
