"""Results of pooling that equal transformers' own, on any workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pooling_checkpoints import CASES, checkpoint, prompts, references

from raycore.config import EngineConfig, resolve
from raycore.engine.core import EngineCore
from raycore.messages import EngineRequest
from raycore.parts.pooling.client.pooling import PLACEHOLDER, resolved

Results = dict[str, NDArray[np.float32]]
TOLERANCE = 2e-5
CHUNKING_BUDGET = 24
SCHEDULES = [
    {"enable_prefix_caching": True, "max_num_batched_tokens": CHUNKING_BUDGET},
    {"enable_prefix_caching": False, "max_num_batched_tokens": 2048},
]


class PoolingCheckpoints:
    """By the name of a case: its checkpoint, and its results. Each is made when it is asked for."""

    def __init__(self, make_directory: Callable[[], Path]):
        self._make_directory = make_directory
        self._made: dict[str, tuple[Path, list[Results]]] = {}

    def __getitem__(self, name: str) -> tuple[Path, list[Results]]:
        if name not in self._made:
            path = checkpoint(name, self._make_directory())
            self._made[name] = path, references(name, path, prompts())
        return self._made[name]


def configured(name: str, path: Path, **options: Any) -> EngineConfig:
    """The configuration of a case's engine."""
    return resolve(
        str(path),
        dtype="float32",
        num_threads=1,
        max_num_seqs=8,
        num_gpu_blocks_override=200,
        **CASES[name].options,
        **options,
    )


def pool(
    core: EngineCore, task: str, all_prompts: Sequence[list[int]], *, interrupts: bool = False
) -> tuple[list[NDArray[np.float32]], int]:
    """Return the results of prompts, and how many of their tokens were cached.

    `interrupts`: preempt what runs after two steps.
    """
    spec = core.config.model.spec.pooling
    assert spec is not None
    params = resolved(None, task, spec)
    for seq_id, prompt in enumerate(all_prompts):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, PLACEHOLDER, seed=0, pooling=params))
    found: dict[int, NDArray[np.float32]] = {}
    num_steps = num_cached = 0
    while core.has_work():
        outputs = core.step()
        if outputs is None:
            continue
        num_steps += 1
        if interrupts and num_steps == 2:
            assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert not len(outputs.token_ids), "what stands for a result isn't a token of an output"
        num_cached += sum(cached for _, cached in outputs.started)
        found |= {seq_id: np.ndarray(each.shape, np.float32, each.data) for seq_id, each in outputs.pooled}
        assert {end.seq_id for end in outputs.finished} == {seq_id for seq_id, _ in outputs.pooled}
        assert {end.finish_reason for end in outputs.finished} <= {"stop"}
    core.scheduler.check_integrity()
    return [found[seq_id] for seq_id in range(len(all_prompts))], num_cached


def assert_equal(found: Sequence[NDArray[np.float32]], expected: Sequence[Results], task: str) -> None:
    for each, results in zip(found, expected, strict=True):
        assert each.shape == results[task].shape
        np.testing.assert_allclose(each, results[task], atol=TOLERANCE)


def check_every_schedule(
    name: str, checkpoints: PoolingCheckpoints, make_core: Callable[[EngineConfig], EngineCore], **options: Any
) -> None:
    """Check that results are the reference's: chunked and whole, with and without cached prefixes, interrupted."""
    path, expected = checkpoints[name]
    for schedule in SCHEDULES:
        config = configured(name, path, block_size=8, **schedule, **options)
        spec = config.model.spec.pooling
        assert spec is not None
        core = make_core(config)
        for task in expected[-1]:
            assert task in spec.tasks
            found, num_cached = pool(core, task, prompts())
            assert_equal(found, expected, task)
            found, num_cached = pool(core, task, prompts())
            assert_equal(found, expected, task)
            reads_cache = schedule["enable_prefix_caching"] and not spec.needs_all_tokens(task)
            assert bool(num_cached) == reads_cache, "only the last token's results need no other tokens' hidden states"
            found, _ = pool(core, task, prompts(), interrupts=schedule["max_num_batched_tokens"] == CHUNKING_BUDGET)
            assert_equal(found, expected, task)
