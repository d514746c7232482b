"""Ranks that read each other's prefixes: each request gets the tokens that a rank alone would give it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from faults import signal_in_step
from number_formats import DTYPE
from waiting import LONG_S, eventually

from raycore import LLM, AsyncLLM, RequestOutput, SamplingParams
from raycore.demo import demo_model_path
from raycore.parts.transfers.client.routes import PrefixTransfers
from raycore.parts.transfers.worker import WorkerTransfers

CHANCE = random.Random(5)
LIMITS = {"num_threads": 1, "max_model_len": 512, "dtype": DTYPE, "block_size": 16, "batch_invariant": True}
ALWAYS = {"min_fetch_tokens": 16, "compare_costs": False}
SHARED = [CHANCE.randrange(10, 90) for _ in range(320)]
PROMPTS = [{"prompt_token_ids": [*SHARED[: 80 + 50 * index], 7 + index]} for index in range(5)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=20, ignore_eos=True, n=2),
    SamplingParams(temperature=0.8, seed=6, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1),
]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(ray_cluster: Any) -> list[list[list[int]]]:
    """What one rank without a connector gives."""
    with LLM(demo_model_path(), **LIMITS) as llm:
        return tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def transfers(kind: str, **extra: object) -> dict[str, object]:
    return {"kv_transfer_config": {"kv_connector": kind, "kv_connector_extra_config": {**ALWAYS, **extra}}}


def count(llm: LLM | AsyncLLM) -> Counter[str]:
    """What all workers have read."""

    def counts(worker: Any) -> Counter[str]:
        return worker._parts[WorkerTransfers].connector.counts

    return sum((Counter(each) for each in llm.collective_rpc(counts)), Counter[str]())


async def generate(llm: AsyncLLM, index: int, rank: int) -> RequestOutput:
    stream = llm.generate(PROMPTS[index], PARAMS[index], data_parallel_rank=rank)
    return [output async for output in stream][-1]


async def counted(llm: AsyncLLM) -> Counter[str]:
    def counts(worker: Any) -> Counter[str]:
        return worker._parts[WorkerTransfers].connector.counts

    return sum((Counter(each) for each in await llm.collective_rpc(counts)), Counter[str]())


async def until_readable(llm: AsyncLLM, prompt: list[int], rank: int) -> None:
    """Wait until a rank has said that it holds all full blocks of a prompt, and its worker lets others read them."""
    routes, block_size = llm._client._requests.routes, llm.config.tokens_per_block
    assert isinstance(routes, PrefixTransfers)

    async def is_readable() -> bool:
        keys = routes.held.keys(prompt)

        def lets_read(worker: Any) -> bool:
            held = worker._parts[WorkerTransfers].connector._held
            return all(held.find(key) is not None for key in keys)

        num_told = sum(more for ranks, more in routes.held.match_stored(keys) if ranks >> rank & 1)
        return num_told == len(keys) * block_size and (await llm.collective_rpc(lets_read))[rank]

    async with asyncio.timeout(LONG_S):
        while not await is_readable():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", ["PeersConnector", "faulty_peers.FaultyPeersConnector"])
def test_a_prefix_is_read_from_the_rank_that_has_it_or_computed(kind: str, expected: list[list[list[int]]]):
    async def scenario() -> None:
        extra = {"fetch_timeout_s": 1.0}
        async with AsyncLLM(demo_model_path(), data_parallel_size=2, **LIMITS, **transfers(kind, **extra)) as llm:
            first = [await generate(llm, index, 0) for index in range(5)]
            assert tokens_of(first) == expected
            await until_readable(llm, PROMPTS[4]["prompt_token_ids"], 0)
            second = [await generate(llm, index, 1) for index in range(5)]
            assert tokens_of(second) == expected
            found = await counted(llm)
            if kind == "PeersConnector":
                assert found["failed"] == 0
                assert found["read"] >= 280 // 16
                assert [output.num_cached_tokens for output in second[:2]] == [80, 128]
            else:
                assert found["failed"] >= 3

    asyncio.run(scenario())


def test_what_a_dead_rank_had_is_read_from_another_one(expected: list[list[list[int]]]):
    async def scenario() -> None:
        options = {**LIMITS, **transfers("PeersConnector"), "data_parallel_size": 3}
        async with AsyncLLM(demo_model_path(), **options) as llm:
            await generate(llm, 4, 0)
            await until_readable(llm, PROMPTS[4]["prompt_token_ids"], 0)
            long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
            lengths: list[int] = []
            async for output in llm.generate(PROMPTS[4], long, data_parallel_rank=1):
                lengths.append(len(output.outputs[0].token_ids))
                if len(lengths) == 10:
                    assert (await counted(llm))["read"] == 280 // 16
                    os.kill(llm.engine_infos[1].pid, signal.SIGKILL)
            whole = [each async for each in llm.generate(PROMPTS[4], long, data_parallel_rank=0)][-1]
            assert output.outputs[0].token_ids == whole.outputs[0].token_ids
            assert len(lengths) > 11

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["PeersConnector", "DisaggregationConnector"])
def test_states_are_read_with_their_prefixes(kind: str, ray_cluster: Any, checkpoints: Any) -> None:
    limits = LIMITS | {"max_model_len": 200, "block_size": 8, "mamba_block_size": 32}
    prompts = [{"prompt_token_ids": [5 + index, *(7 + at * at % 80 for at in range(90 + index))]} for index in range(6)]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    path = checkpoints["qwen3_next"][0]
    with LLM(path, **limits) as llm:
        plain = tokens_of(llm.generate(prompts, params, use_tqdm=False))

    async def scenario() -> None:
        async with AsyncLLM(path, data_parallel_size=2, **limits, **transfers("PeersConnector")) as llm:
            for rank in (0, 1):
                outputs = [await last_of(llm.generate(each, params, data_parallel_rank=rank)) for each in prompts]
                assert tokens_of(outputs) == plain
                if not rank:
                    for each in prompts:
                        await until_readable(llm, each["prompt_token_ids"], 0)
            assert [output.num_cached_tokens for output in outputs] == [88, 88, 88, 88, 88, 88]
            assert (await counted(llm))["failed"] == 0

    if kind == "PeersConnector":
        asyncio.run(scenario())
        return
    with LLM(path, data_parallel_size=2, **limits, **transfers(kind, min_prefill_tokens=32)) as llm:
        assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == plain
        found = count(llm)
        assert found["failed"] == 0
        assert found["read"] >= 6 * 11


async def last_of(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


@pytest.mark.parametrize(("dp", "tp"), [(3, 1), (2, 2)])
def test_prompts_are_computed_on_some_ranks_and_go_on_on_others(dp: int, tp: int, expected: list[list[list[int]]]):
    options = {**LIMITS, **transfers("DisaggregationConnector", min_prefill_tokens=32)}
    with LLM(demo_model_path(), data_parallel_size=dp, tensor_parallel_size=tp, **options) as llm:
        assert tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        found = count(llm)
        assert found["failed"] == 0
        assert found["fetches"] >= tp
        assert found["read"] >= 5 * tp
        if tp > 1:
            return
        # either kind of rank dies in the middle
        long = SamplingParams(temperature=1.0, seed=8, max_tokens=120, ignore_eos=True)
        fresh = [{"prompt_token_ids": [11 + index, *SHARED[: 200 + 10 * index]]} for index in range(12)]
        undisturbed = tokens_of(llm.generate(fresh, long, use_tqdm=False))
        for victim in (0, 2):
            pid = next(info.pid for info in llm.engine_infos if info.dp_rank == victim)
            assert llm.reset_prefix_cache()
            signal_in_step(llm, victim, pid, 6)
            assert tokens_of(llm.generate(fresh, long, use_tqdm=False)) == undisturbed
            wait_for_ranks(llm, dp)


def wait_for_ranks(llm: LLM, count: int) -> None:
    eventually(lambda: sum(rank.state == "serving" for rank in llm.ranks) >= count)
