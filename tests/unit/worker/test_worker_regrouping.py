"""Workers go on computing while the number of ranks that share their experts changes. Each is a thread."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from caches import cache_of
from drafting_checkpoints import head_config
from test_worker import MOE, SHAPE, a_request_and_its_plans, run_together

from raycore.config import resolve
from raycore.messages import StepPlan, StepResult
from raycore.node.listeners import offer
from raycore.parts.adapters.weights import largest_lora_bytes
from raycore.parts.drafts.weights.eagle3 import random_eagle3_weights
from raycore.weights.loader import random_decoder_weights
from raycore.weights.share import WeightShare
from raycore.worker.rank import Regrouping, WorkerRank
from raycore.worker.worker import Worker

OPTIONS = {"load_format": "dummy", "num_threads": 1, "enable_expert_parallel": True}
NUM_BLOCKS = 4
NUM_RANKS = [2, 3, 1, 2]
"""One after the other."""


def address() -> str:
    return offer("127.0.0.1")


class Group:
    """The workers of all ranks that there ever are. Rank 0 has a request; others only help."""

    def __init__(self, path: Path, tp_size: int, pp_size: int, batch_invariant: bool = False) -> None:
        self.config = resolve(
            str(path),
            data_parallel_size=NUM_RANKS[0],
            tensor_parallel_size=tp_size,
            pipeline_parallel_size=pp_size,
            batch_invariant=batch_invariant,
            **OPTIONS,
        )
        first = address()
        self.again = [address() for _ in range(max(NUM_RANKS))]
        """By rank, where its workers meet once more, if it comes again."""
        self.workers = [
            self._worker(dp_rank, number, own, first)
            for dp_rank, own in enumerate(address() for _ in range(max(NUM_RANKS)))
            for number in range(tp_size * pp_size)
        ]
        self.regroupings = [
            Regrouping(before, after, address(), generation)
            for generation, (before, after) in enumerate(pairwise(NUM_RANKS), start=1)
        ]

    def _worker(self, dp_rank: int, number: int, own: str, first: str) -> Worker:
        parallel = self.config.parallel
        pp_rank, tp_rank = divmod(number, parallel.tensor_parallel_size)
        rank = WorkerRank(
            dp_rank,
            tp_rank,
            parallel.tensor_parallel_size,
            number,
            4,
            own if parallel.world_size > 1 else None,
            pp_rank=pp_rank,
            pp_size=parallel.pipeline_parallel_size,
            is_new=dp_rank >= NUM_RANKS[0],
        )
        config = self.config if not rank.is_new else self.config.with_num_ranks(dp_rank + 1)
        return Worker(config, rank.with_experts(config.parallel, None if rank.is_new else first))

    def run(self, plans: list[StepPlan]) -> list[list[StepResult | None]]:
        """Run a quarter of the plans with each number of ranks. Returns the results of each worker."""
        quarter = -(-len(plans) // len(NUM_RANKS))
        phases = [plans[start : start + quarter] for start in range(0, len(plans), quarter)]
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(lambda worker: self._live(worker, phases), self.workers))

    def _live(self, worker: Worker, phases: list[list[StepPlan]]) -> list[StepResult | None]:
        is_member, results = not worker.rank.is_new, []
        worker.init_device()
        if is_member:
            worker.load_model()
            worker.initialize_cache(cache_of(worker, NUM_BLOCKS))
            worker.warm_up()
        for phase, num_ranks in enumerate(NUM_RANKS):
            if phase > 0:
                is_member = self._change(worker, self.regroupings[phase - 1])
            if is_member:
                assert worker.config.parallel.data_parallel_size == num_ranks
                own = phases[phase] if worker.rank.dp_rank == 0 else [StepPlan(-1)] * len(phases[phase])
                results += [worker.execute_model(plan) for plan in own]
        worker.shutdown()
        return results

    def _change(self, worker: Worker, regrouping: Regrouping) -> bool:
        """Take part in a change, unless it doesn't concern the worker. Returns whether the worker is in the new group.

        A rank that has left may come again later, as new workers.
        """
        dp_rank = worker.rank.dp_rank
        if dp_rank >= regrouping.num_involved:
            return False
        if dp_rank >= regrouping.num_ranks_before and not worker.rank.is_new:
            worker.shutdown()
            worker.config = self.config.with_num_ranks(regrouping.num_ranks)
            worker.rank = msgspec.structs.replace(
                worker.rank, is_new=True, distributed_init=None if worker.rank.world_size == 1 else self.again[dp_rank]
            )
            worker.init_device()
        is_new = worker.rank.is_new
        worker.regroup(regrouping)
        if dp_rank >= regrouping.num_ranks:
            return False
        if is_new:
            worker.initialize_cache(cache_of(worker, NUM_BLOCKS))
            worker.warm_up()
        elif regrouping.num_ranks > regrouping.num_ranks_before:
            worker.accompany_warm_up()
        return True


def expected_tokens(path: Path, plans: list[StepPlan]) -> list[bytes]:
    alone = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1)
    (results,) = run_together([Worker(resolve(str(path), load_format="dummy", num_threads=1), alone)], [plans])
    return [result.token_ids for result in results]


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "batch_invariant"), [(1, 1, False), (1, 1, True), (2, 1, False), (1, 2, False)]
)
def test_a_request_continues_through_all_changes_of_the_expert_group(
    tmp_path: Path, tp_size: int, pp_size: int, batch_invariant: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | MOE | {"num_hidden_layers": 3}))
    plans = a_request_and_its_plans([3, 9, 27, 17, 51, 4, 8, 15, 16, 23, 42], 5)
    group = Group(tmp_path, tp_size, pp_size, batch_invariant)
    found = group.run(plans)
    reporting = found[(pp_size - 1) * tp_size]
    assert [result.token_ids for result in reporting] == expected_tokens(tmp_path, plans)


@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_a_new_worker_needs_memory_for_adapters_and_its_drafter(tmp_path: Path, kind: str) -> None:
    head = head_config(SHAPE["hidden_size"], SHAPE["vocab_size"])
    target = SHAPE | MOE | {"num_hidden_layers": 4}
    for name, shape in ("target", target), ("draft", SHAPE if kind == "draft_model" else head):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape))

    def new_worker(**options: Any) -> Worker:
        config = resolve(str(tmp_path / "target"), data_parallel_size=2, **OPTIONS, **options)
        rank = WorkerRank(dp_rank=1, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1, is_new=True)
        worker = Worker(config, rank.with_experts(config.parallel, "tcp://nowhere:1"))
        worker.init_device()
        return worker

    def needed(worker: Worker) -> int:
        return worker.memory_need(2, [1], 0).needed - worker._core.sizes.step

    alone = needed(new_worker())
    adapted = new_worker(enable_lora=True, max_loras=2, max_lora_rank=8)
    share = WeightShare(adapted.config.model.spec, torch.float32)
    # one more slot than max_loras, for what replaces an adapter
    assert needed(adapted) - alone == 3 * largest_lora_bytes(share, 8)
    drafting = new_worker(speculative_config={"model": str(tmp_path / "draft"), "num_speculative_tokens": 2})
    drafter = drafting.config.drafter
    assert drafter is not None
    if drafter.head is None:
        weights: object = random_decoder_weights(WeightShare(drafter.spec, torch.float32))
        more = 0
    else:
        weights = random_eagle3_weights(WeightShare(drafter.spec, torch.float32), drafter.head)
        more = 4 * SHAPE["vocab_size"] * SHAPE["hidden_size"]  # it may have an embedding of its own
    assert needed(drafting) - alone == bytes_in(weights) + more


def bytes_in(weights: object) -> int:
    if isinstance(weights, torch.Tensor):
        return weights.nbytes
    if isinstance(weights, list):
        return sum(map(bytes_in, weights))
    return sum(map(bytes_in, vars(weights).values())) if is_dataclass(weights) else 0
