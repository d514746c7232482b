"""Engines of models of each new family fail in a step, and others go on with their requests.

Those of models with experts share them in two ranks, of which one has far less work than the other. They are threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from families import FAMILIES, NUM_NEW_TOKENS, make_checkpoint, predicted, prompts

from raycore.checkpoint.model_spec import load_model_spec
from raycore.config import EngineConfig, resolve
from raycore.engine.core import EngineCore
from raycore.errors import WorkerFailed
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.parallel import meeting
from raycore.sampling_params import SamplingParams
from raycore.scheduler.outputs import StepOutputs
from raycore.worker.rank import RankIdentity

T = TypeVar("T")

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
FATAL_STEP = 5
"""Some requests have tokens then, and some have part of their prompts computed."""


class Ranks:
    """The engines of a model, which all run a step together."""

    def __init__(self, config: EngineConfig, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.num_rests = 0
        """How often a rank had no token in a step of the others."""
        size = config.parallel.data_parallel_size
        executors = [InlineExecutor(config, RankIdentity(rank, size)) for rank in range(size)]
        address = executors[0].rendezvous() if size > 1 else None
        self.cores = self._each(lambda executor: EngineCore(config, executor, address), executors)

    def _each(self, function: Callable[[Any], T], values: list[Any]) -> list[T]:
        return list(self._pool.map(function, values))

    def submit(self, shares: list[list[int]], tokens: list[list[int]]) -> None:
        """Have each rank continue the prompts of its share, of which these tokens are known."""
        for core, share in zip(self.cores, shares, strict=True):
            for index in share:
                request = EngineRequest(
                    index, str(index), prompts()[index], GREEDY, 0, output_token_ids=[*tokens[index]]
                )
                core.submit(request)

    def run(self, tokens: list[list[int]]) -> list[bool]:
        """Run until no rank has work, or a step fails. Returns for each rank whether it failed."""

        def run_one(core: EngineCore) -> bool:
            try:
                for outputs in _shared_steps(core) if core.is_in_lockstep else _own_steps(core):
                    if outputs is None:
                        self.num_rests += 1
                        continue
                    for index, token in zip(outputs.seq_ids.tolist(), outputs.token_ids.tolist(), strict=True):
                        tokens[index].append(token)
            except WorkerFailed:
                return True
            return False

        return self._each(run_one, self.cores)

    def fail_in(self, number: int) -> None:
        """Have the last rank's worker fail in a step."""

        def sabotage(worker: Any) -> None:
            runner, numbers = worker._core.runner, count(1)
            launch = runner.launch

            def launch_or_fail(plan: Any) -> Any:
                if next(numbers) == number:
                    raise RuntimeError("on purpose")
                return launch(plan)

            runner.launch = launch_or_fail

        self.cores[-1].executor.collective_rpc(sabotage)

    def end(self) -> None:
        for core in self.cores:
            core.shutdown()


def _own_steps(core: EngineCore) -> Iterator[StepOutputs | None]:
    while core.has_work():
        yield core.step()


def _shared_steps(core: EngineCore) -> Iterator[StepOutputs | None]:
    is_anyone_busy: bool | None = True
    while is_anyone_busy:
        outputs, is_anyone_busy = core.lockstep_step()
        yield outputs


@pytest.mark.parametrize("family", [family for family, toy in FAMILIES.items() if toy.switches])
def test_requests_of_ranks_that_fail_go_on_at_others(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "GRACE_S", 0.0)
    path = make_checkpoint(family, tmp_path)
    size = 1 if load_model_spec(path).moe is None else 2
    sizes: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 8, "block_size": 8, "num_gpu_blocks_override": 100}
    config = resolve(
        path,
        dtype="float32",
        data_parallel_size=size,
        enable_expert_parallel=size > 1,
        max_num_batched_tokens=24,
        async_scheduling=False,
        **sizes,
    )
    every = list(range(len(prompts())))
    shares = [every] if size == 1 else [every[1:], every[:1]]
    tokens: list[list[int]] = [[] for _ in every]
    with ThreadPoolExecutor(size) as pool:
        ranks = Ranks(config, pool)
        ranks.fail_in(FATAL_STEP)
        ranks.submit(shares, tokens)
        assert ranks.run(tokens) == [True] * size
        ranks.end()
        assert min(map(len, tokens)) == 0 < max(map(len, tokens))
        others = Ranks(config, pool)
        others.submit(shares[::-1], tokens)
        assert others.run(tokens) == [False] * size
        assert size == 1 or others.num_rests > 3
        others.end()
    assert predicted(path, prompts(), tokens) == tokens
