"""Whatever is combined, the tokens are transformers' own: a pairwise cover of capabilities, parallel sizes and kernels.

Each row of `ROWS` is an engine. Every two values of different columns are in some row together, unless they can't be
combined. Pauses, sleeps and scaling are calls, so every engine gets them: it is paused in the middle of requests, put
to sleep, and scaled if it has several ranks. Each method meets both levels of sleep, and pauses with and without its
cache. Some engines are profiled.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from drafting_checkpoints import head_config, random_head, write_checkpoint
from families import NUM_NEW_TOKENS, SIZES, VOCAB_SIZE, make_checkpoint, prompts, reference

from raycore import AsyncLLM, SamplingParams
from raycore.config import resolve
from raycore.errors import InvalidConfig

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


class Row(NamedTuple):
    """The options of an engine that are combined."""

    method: str | None
    """How tokens are guessed."""
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    attention_backend: str
    async_scheduling: bool

    @property
    def is_profiled(self) -> bool:
        """Each value of the other columns is profiled."""
        return self.method in (None, "ngram")

    @property
    def num_workers(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def name(self) -> str:
        """The test's id."""
        sizes = f"tp{self.tensor_parallel_size}-pp{self.pipeline_parallel_size}-dp{self.data_parallel_size}"
        return f"{self.method}-{sizes}-{'ep-' if self.enable_expert_parallel else ''}{self.attention_backend}"


BY_WORKERS = ("draft_model", "eagle3")
"""The methods for which workers compute guesses."""
COLUMNS = [
    (None, "ngram", "suffix", *BY_WORKERS),
    (1, 2),
    (1, 2),
    (1, 2),
    (False, True),
    ("native", "torch"),
    (False, True),
]
ROWS = [
    Row(None, 1, 2, 1, True, "native", False),
    Row(None, 2, 1, 2, False, "torch", True),
    Row("ngram", 2, 2, 1, False, "torch", True),
    Row("ngram", 1, 1, 2, True, "native", False),
    Row("suffix", 1, 2, 2, True, "torch", True),
    Row("suffix", 2, 1, 1, False, "native", False),
    Row("draft_model", 2, 2, 1, True, "native", True),
    Row("draft_model", 1, 1, 2, False, "torch", False),
    Row("eagle3", 2, 1, 2, True, "native", False),
    Row("eagle3", 1, 2, 1, False, "torch", True),
]


def test_the_cases_combine_every_two_values_of_different_options() -> None:
    for (i, first), (j, second) in itertools.combinations(enumerate(COLUMNS), 2):
        missing = set(itertools.product(first, second)) - {(row[i], row[j]) for row in ROWS}
        assert not missing, (Row._fields[i], missing)


class Checkpoints(NamedTuple):
    """A model with experts, transformers' continuations, and what guesses its tokens."""

    target: Path
    expected: list[list[int]]
    draft_model: Path
    head: Path

    def speculative_config(self, method: str | None) -> dict[str, Any] | None:
        settings: dict[str | None, dict[str, Any] | None] = {
            None: None,
            "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 2},
            "suffix": {},
            "draft_model": {"model": str(self.draft_model)},
            "eagle3": {"model": str(self.head)},
        }
        chosen = settings[method]
        always = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 4, 3)]}
        return chosen if chosen is None else {"method": method, **always, **chosen}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    directory = tmp_path_factory.mktemp("checkpoints")
    target = make_checkpoint("qwen3_moe", directory)
    head = head_config(SIZES["hidden_size"], VOCAB_SIZE, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    return Checkpoints(
        target,
        reference(target),
        make_checkpoint("llama3", directory),
        write_checkpoint(directory / "head", head, random_head(head)),
    )


@pytest.mark.parametrize("method", BY_WORKERS)
def test_stages_with_a_model_that_drafts_need_steps_in_flight(checkpoints: Checkpoints, method: str) -> None:
    with pytest.raises(InvalidConfig, match="needs async_scheduling=True with pipeline_parallel_size=2"):
        resolve(
            checkpoints.target,
            pipeline_parallel_size=2,
            speculative_config=checkpoints.speculative_config(method),
        )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_combination_of_options_gives_the_reference_tokens(
    ray_cluster: Any, checkpoints: Checkpoints, tmp_path: Path, row: Row
) -> None:
    asyncio.run(_check(row, checkpoints, tmp_path))


async def _check(row: Row, checkpoints: Checkpoints, traces: Path) -> None:
    expected, options = checkpoints.expected, row._asdict()
    engine = await AsyncLLM.create(
        str(checkpoints.target),
        speculative_config=checkpoints.speculative_config(options.pop("method")),
        **options,
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
        if row.is_profiled:
            await engine.start_profile()
        assert await _tokens(engine) == expected
        if row.is_profiled:
            await engine.stop_profile()
            assert len(list(traces.iterdir())) == row.num_workers + row.data_parallel_size
        is_second = ROWS.index(row) % 2 == 1
        assert await _tokens(engine, pauses=True, clear_cache=is_second) == expected
        await engine.sleep(1 + is_second)
        assert await engine.wake_up()
        assert await _tokens(engine) == expected
        if row.data_parallel_size > 1:
            await engine.scale(1)
            assert await _tokens(engine) == expected
        drafted = sum(counts.num_draft_tokens for counts in engine.read_metrics().counts.values())
        assert (drafted > 0) == (row.method is not None)
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
