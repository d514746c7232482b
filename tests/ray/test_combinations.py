"""Whatever is combined, the tokens are transformers' own: a pairwise cover of capabilities, parallel sizes and kernels.

Each row of `ROWS` is an engine. Every two values of different columns are in some row together. Pauses, sleeps and
profiles are calls, so every engine gets them: it is profiled, paused in the middle of requests, and put to sleep at
both levels.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from families import NUM_NEW_TOKENS, make_checkpoint, prompts, reference

from raycore import AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


class Row(NamedTuple):
    """The options of an engine that are combined."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    attention_backend: str

    @property
    def num_workers(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def name(self) -> str:
        """The test's id."""
        sizes = f"tp{self.tensor_parallel_size}-pp{self.pipeline_parallel_size}-dp{self.data_parallel_size}"
        return f"{sizes}-{'ep-' if self.enable_expert_parallel else ''}{self.attention_backend}"


COLUMNS = [(1, 2), (1, 2), (1, 2), (False, True), ("native", "torch")]
ROWS = [
    Row(1, 1, 1, False, "native"),
    Row(1, 2, 2, True, "torch"),
    Row(2, 1, 2, True, "native"),
    Row(2, 2, 1, True, "native"),
    Row(2, 2, 2, False, "torch"),
    Row(1, 1, 1, True, "torch"),
]


def test_every_two_values_are_combined() -> None:
    for (i, first), (j, second) in itertools.combinations(enumerate(COLUMNS), 2):
        missing = set(itertools.product(first, second)) - {(row[i], row[j]) for row in ROWS}
        assert not missing, (Row._fields[i], Row._fields[j], missing)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model with experts, and transformers' continuations."""
    path = make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("checkpoints"))
    return path, reference(path)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_tokens_are_the_references(
    ray_cluster: Any, checkpoint: tuple[Path, list[list[int]]], tmp_path: Path, row: Row
) -> None:
    asyncio.run(_check(row, *checkpoint, tmp_path))


async def _check(row: Row, path: Path, expected: list[list[int]], traces: Path) -> None:
    engine = await AsyncLLM.create(
        str(path),
        **row._asdict(),
        dtype="float32",
        num_threads=1,
        max_num_seqs=4,  # some requests wait
        block_size=8,
        max_num_batched_tokens=24,  # prompts are computed in chunks
        num_gpu_blocks_override=40,
        standby_delay_s=None,
        profiler_config={"profiler": "torch", "torch_profiler_dir": str(traces)},
    )
    try:
        await engine.start_profile()
        assert await _tokens(engine) == expected
        await engine.stop_profile()
        assert len(list(traces.iterdir())) == row.num_workers + row.data_parallel_size
        for clear_cache in (False, True):
            assert await _tokens(engine, pauses=True, clear_cache=clear_cache) == expected
        for level in (1, 2):
            await engine.sleep(level)
            assert await engine.wake_up()
            assert await _tokens(engine) == expected
    finally:
        engine.shutdown()


async def _tokens(engine: AsyncLLM, *, pauses: bool = False, clear_cache: bool = False) -> list[list[int]]:
    """Generate from all prompts at once. With `pauses`, the engine is paused as soon as a request has a token."""
    has_begun = asyncio.Event()

    async def stream(prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate({"prompt_token_ids": prompt}, PARAMS):
            tokens = output.outputs[0].token_ids
            has_begun.set()
        return tokens

    streams = [asyncio.create_task(stream(prompt)) for prompt in prompts()]
    if pauses:
        await has_begun.wait()
        await engine.pause_generation(mode="keep", clear_cache=clear_cache)
        await engine.resume_generation()
    return await asyncio.gather(*streams)
