"""Ranks that share experts, through `LLM`: the reference tokens, whoever has work and when, and whoever dies."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import cloudpickle
import pytest
from equality import Lasting
from families import NUM_NEW_TOKENS, prompts
from faults import signal_in_step
from waiting import LONG_S, eventually

from raycore import LLM, InvalidConfig, SamplingParams
from raycore.config import EngineConfig, resolve

# workers can't import a test module, so what they are to call travels whole
cloudpickle.register_pickle_by_value(sys.modules[__name__])

FAMILIES = ("mixtral", "glm4_moe", "qwen2_moe", "minimax_m2")
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


SHAPES = [(2, 1, 1), (1, 2, 2), (2, 2, 1)]
"""TP, DP and PP."""


def shape_of(sizes: tuple[int, ...]) -> dict[str, Any]:
    """One shape has one step in flight, the others several."""
    names = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
    shape = {**dict(zip(names, sizes, strict=True)), "async_scheduling": sizes != SHAPES[0]}
    return {"dtype": "float32", **shape, "enable_expert_parallel": True, **OPTIONS}


@pytest.fixture(scope="module")
def living_llms(ray_cluster, checkpoints):
    """By shape: an `LLM`, which the families take turns in."""
    with Lasting(lambda sizes: LLM(checkpoints["mixtral"][0], **shape_of(sizes))) as llms:
        yield llms


def _become(worker, config: EngineConfig) -> None:
    from raycore.cache_layout import KVCacheConfig
    from raycore.worker.cache_specs import expected_layout
    from raycore.worker.setup import set_up

    worker._core.take(set_up(config, worker.rank))
    worker.load_model()
    worker.initialize_cache(KVCacheConfig(NUM_BLOCKS, expected_layout(worker._core.setup)))


def tokens(llm: LLM, ids, params=PARAMS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(ids, params, use_tqdm=False)]


# a family differs from the others in what a worker does with its experts, which the ranks' shape doesn't change
@pytest.mark.parametrize(
    ("sizes", "family"),
    [(sizes, family) for sizes in SHAPES for family in (FAMILIES if sizes == SHAPES[-1] else FAMILIES[:1])],
    ids=lambda value: value if isinstance(value, str) else "tp{}-dp{}-pp{}".format(*value),
)
def test_uneven_arrivals_give_the_reference_tokens(living_llms, checkpoints, sizes, family):
    path, expected = checkpoints[family]
    llm = become(living_llms, path, sizes)
    assert tokens(llm, prompts()) == expected
    rnd = random.Random(0)
    for _ in range(6):  # one alone, several, a pause in which all rest, and the next before the last is over
        indices = rnd.sample(range(len(expected)), rnd.randrange(1, 4))
        assert tokens(llm, [prompts()[i] for i in indices]) == [expected[i] for i in indices]
        time.sleep(rnd.choice([0, 0, 0.01, 0.05]))


def become(llms: Lasting[tuple[int, ...], LLM], path: str, sizes: tuple[int, ...]) -> LLM:
    llm = llms.of(sizes)
    assert llm.reset_prefix_cache()
    llm.collective_rpc(_become, args=(resolve(path, **shape_of(sizes)),))
    return llm


def test_ranks_pause_and_sleep_together(living_llms, checkpoints):
    path, expected = checkpoints["mixtral"]
    llm = become(living_llms, path, SHAPES[-1])
    rnd = random.Random(1)
    with ThreadPoolExecutor() as pool:
        for number in range(6):
            indices = rnd.sample(range(len(expected)), rnd.randrange(1, 4))
            results = pool.submit(tokens, llm, [prompts()[i] for i in indices])
            time.sleep(rnd.random() * 0.05)
            if number % 2:
                llm.pause_generation(mode="keep", clear_cache=bool(number % 4 == 1))
                llm.resume_generation()
            else:
                llm.sleep(level=1 + number // 2 % 2, mode="keep")
                assert llm.wake_up()
            assert results.result(LONG_S) == [expected[i] for i in indices]


@pytest.mark.timeout(300)
def test_a_dead_rank_restarts_its_whole_expert_group_and_fails_no_request(ray_cluster, checkpoints):
    path, _ = checkpoints["mixtral"]
    mode = {"dtype": "bfloat16", "batch_invariant": True, "async_scheduling": True}
    shape = {"data_parallel_size": 2, "enable_expert_parallel": True, "step_timeout_s": 5.0}
    with LLM(path, **shape, **mode, **OPTIONS) as llm:
        expected = tokens(llm, prompts() * 2, LONG)
        before = [info.pid for info in llm.engine_infos]
        signal_in_step(llm, dp_rank=1, pid=before[1], num_steps=50)
        assert tokens(llm, prompts() * 2, LONG) == expected
        assert not set(before) & {info.pid for info in llm.engine_infos}, "all of the group are others"


@contextmanager
def requests_without_end(llm: LLM, expected: list[list[int]]) -> Iterator[Callable[[], None]]:
    """While the block runs, send requests, always several at a time, which have to get the expected tokens.

    Yields a function that waits until requests run.
    """
    is_over, num_started = threading.Event(), itertools.count()

    def send(first: int) -> int:
        for number in range(first, 10_000):
            next(num_started)
            index = number % len(expected)
            assert tokens(llm, [(prompts() * 2)[index]], LONG) == [expected[index]]
            if is_over.is_set():
                return number - first + 1
        raise AssertionError("the block never ended")

    def wait() -> None:
        before = next(num_started)
        eventually(lambda: next(num_started) >= before + 4 and any(rank.num_running for rank in llm.ranks))

    with ThreadPoolExecutor(3) as pool:
        sent = [pool.submit(send, first) for first in range(3)]
        try:
            yield wait
        finally:
            is_over.set()
        assert sum(each.result(120) for each in sent) >= len(sent)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "sizes", "scales"),
    [("qwen3_moe", (1, 2), (3, 2)), ("glm4_moe", (2, 1), (1, 2))],
    ids=["pp2", "tp2, shared experts"],
)
def test_ranks_of_an_expert_group_are_added_and_removed_without_reading_the_checkpoint(
    ray_cluster, checkpoints, tmp_path, family, sizes, scales
):
    path = shutil.copytree(checkpoints[family][0], tmp_path / "model")
    tp_size, pp_size = sizes
    mode = {
        "tensor_parallel_size": tp_size,
        "pipeline_parallel_size": pp_size,
        "dtype": "float32",
        "batch_invariant": True,
    }
    with LLM(str(path), data_parallel_size=2, enable_expert_parallel=True, **mode, **OPTIONS) as llm:
        expected = tokens(llm, prompts() * 2, LONG)
        for file in path.glob("*.safetensors"):
            file.unlink()
        first = llm.engine_infos[0].pid
        with requests_without_end(llm, expected) as wait_for_requests:
            for num_ranks in scales:
                wait_for_requests()
                llm.scale(num_ranks, drain_timeout_s=0.0 if num_ranks == 1 else None)
                infos = llm.engine_infos
                assert [info.dp_rank for info in infos] == list(range(num_ranks))
                assert infos[0].pid == first
                assert [rank.state for rank in llm.ranks] == ["serving"] * num_ranks
            wait_for_requests()
        assert {rank.num_restarts for rank in llm.ranks} == {0}
        ep_sizes = llm.collective_rpc(lambda worker: worker.rank.ep_size)
        assert ep_sizes == [2 * tp_size] * (2 * tp_size * pp_size)


@pytest.mark.timeout(300)
def test_a_rank_that_dies_while_experts_move_costs_a_restart_and_no_request(ray_cluster, checkpoints):
    path, _ = checkpoints["mixtral"]
    mode = {"dtype": "float32", "batch_invariant": True}
    with LLM(path, data_parallel_size=2, enable_expert_parallel=True, **mode, **OPTIONS) as llm:
        expected = tokens(llm, prompts() * 2, LONG)
        before = [info.pid for info in llm.engine_infos]
        llm.collective_rpc(_die_when_experts_move, args=(1,))
        with requests_without_end(llm, expected) as wait_for_requests:
            wait_for_requests()
            llm.scale(3)
            wait_for_requests()
        assert len(llm.engine_infos) == 3
        assert not set(before) & {info.pid for info in llm.engine_infos}
        assert [rank.num_restarts for rank in llm.ranks] == [1] * 3


def _die_when_experts_move(worker, dp_rank: int) -> None:
    if worker.rank.dp_rank == dp_rank:
        worker._core.model.exchange_experts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(300)
def test_ranks_added_to_a_paused_engine_are_paused_and_too_little_memory_is_an_error(ray_cluster, checkpoints):
    path, expected = checkpoints["mixtral"]
    with LLM(path, data_parallel_size=1, enable_expert_parallel=True, dtype="float32", **OPTIONS) as llm:
        llm.pause_generation(mode="keep")
        with ThreadPoolExecutor() as pool:
            results = pool.submit(tokens, llm, prompts())
            llm.scale(2)
            assert [rank.state for rank in llm.ranks] == ["paused"] * 2
            llm.resume_generation()
            assert results.result(LONG_S) == expected
        llm.collective_rpc(_have_no_memory)
        with pytest.raises(InvalidConfig, match=r"worker 0 of dp_rank 0 would need .* MiB more .* and 0.0 MiB"):
            llm.scale(1)
        assert tokens(llm, prompts()) == expected
        llm.sleep(level=1, mode="keep")
        llm.scale(1)
        assert [rank.state for rank in llm.ranks] == ["asleep"]
        assert llm.wake_up()
        assert tokens(llm, prompts()) == expected


def _have_no_memory(worker) -> None:
    from raycore.parts.experts.worker import regrouping as module

    module.free_bytes = lambda device: 0
