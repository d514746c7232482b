"""Ranks that share experts and read each other's blocks: also one that is added while the others run."""

from __future__ import annotations

import asyncio
from typing import Any

from test_peers import counted, transfers, until_readable

from raycore import AsyncLLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 8,
    "block_size": 8,
    "num_gpu_blocks_override": 200,
    "max_model_len": 200,
    "standby_delay_s": None,
    "batch_invariant": True,
    "enable_expert_parallel": True,
}
PROMPT = [7 + index * index % 83 for index in range(101)]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)


def test_an_added_rank_reads_from_the_others_and_they_from_it(ray_cluster: Any, checkpoints: Any) -> None:
    async def generate(llm: AsyncLLM, prompt: list[int], rank: int) -> tuple[list[int], int | None]:
        stream = llm.generate({"prompt_token_ids": prompt}, PARAMS, data_parallel_rank=rank)
        last = [output async for output in stream][-1]
        return last.outputs[0].token_ids, last.num_cached_tokens

    async def read(llm: AsyncLLM, num_blocks: int) -> None:
        found = await counted(llm)
        assert (found["read"], found["failed"]) == (num_blocks, 0)

    async def scenario() -> None:
        path = checkpoints["mixtral"][0]
        others = [3, *PROMPT[:80]]
        async with AsyncLLM(path, **OPTIONS, data_parallel_size=1) as llm:
            expected = [(await generate(llm, prompt, 0))[0] for prompt in (PROMPT, others)]
        async with AsyncLLM(path, **OPTIONS, **transfers("PeersConnector"), data_parallel_size=2) as llm:
            assert await generate(llm, PROMPT, 0) == (expected[0], 0)
            await until_readable(llm, PROMPT, 0)
            assert await generate(llm, PROMPT, 1) == (expected[0], 96)
            await read(llm, 12)
            await llm.scale(3)
            assert await generate(llm, PROMPT, 2) == (expected[0], 96)
            assert await generate(llm, others, 2) == (expected[1], 0)
            await until_readable(llm, others, 2)
            assert await generate(llm, others, 0) == (expected[1], 80)
            await read(llm, 12 + 12 + 10)
            await llm.scale(1)
            assert await generate(llm, [4, *PROMPT], 0) is not None

    asyncio.run(scenario())
