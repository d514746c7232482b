"""The groups of workers, each of which is a thread here."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from test_worker import ALONE, MOE, SHAPE
from waiting import LONG_S

from raycore.config import EngineConfig, resolve
from raycore.errors import InvalidConfig
from raycore.node.listeners import offer
from raycore.worker.groups import WorkerGroups
from raycore.worker.rank import WorkerRank
from raycore.worker.setup import set_up


def configure(path: Path, **options: Any) -> EngineConfig:
    (path / "config.json").write_text(json.dumps(SHAPE | MOE))
    return resolve(str(path), num_threads=1, load_format="dummy", **options)


def make_ranks(config: EngineConfig) -> list[WorkerRank]:
    parallel = config.parallel
    own = [offer("127.0.0.1") for _ in range(parallel.data_parallel_size)]
    of_all = offer("127.0.0.1")
    coordinates = [divmod(number, parallel.tensor_parallel_size) for number in range(parallel.world_size)]
    return [
        WorkerRank(
            dp_rank,
            tp_rank,
            parallel.tensor_parallel_size,
            0,
            4,
            own[dp_rank],
            pp_rank=stage,
            pp_size=parallel.pipeline_parallel_size,
        ).with_experts(parallel, of_all)
        for dp_rank in range(parallel.data_parallel_size)
        for stage, tp_rank in coordinates
    ]


def join_all(config: EngineConfig, use: Any) -> list[Any]:
    """Join the groups of all workers, and return what `use` returns for each."""
    ranks = make_ranks(config)
    all_done = Barrier(len(ranks))

    def run(rank: WorkerRank) -> Any:
        groups = WorkerGroups()
        groups.join(set_up(config, rank))
        found = use(groups)
        all_done.wait(LONG_S)
        groups.leave()
        return found

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


def test_a_single_worker_joins_no_groups(tmp_path: Path) -> None:
    groups = WorkerGroups()
    groups.join(set_up(configure(tmp_path), ALONE))
    assert (groups.ranks.size, groups.experts, groups.source, groups.sink, groups.token_links) == (
        1,
        None,
        None,
        None,
        [],
    )
    assert groups.waited_s() == 0
    groups.leave()


def test_workers_of_a_stage_share_collectives_and_workers_of_two_stages_are_linked(tmp_path: Path) -> None:
    config = configure(tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2)

    def use(groups: WorkerGroups) -> tuple[float, float]:
        total = groups.ranks.all_reduce_(torch.full((2,), 1.0 + groups.ranks.rank))
        if groups.sink is not None:
            groups.sink.send(torch.full((2,), 10.0 + groups.ranks.rank))
            assert groups.source is None
            return float(total[0]), 0.0
        assert groups.source is not None
        return float(total[0]), float(groups.source.receive_into(torch.empty(2))[0])

    assert join_all(config, use) == [(3.0, 0.0), (3.0, 0.0), (3.0, 10.0), (3.0, 11.0)]


def test_only_the_first_and_the_last_stage_have_a_link_for_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 3}))
    config = resolve(str(tmp_path), num_threads=1, load_format="dummy", pipeline_parallel_size=3)
    assert join_all(config, lambda groups: len(groups.token_links)) == [1, 0, 1]


def test_all_stages_have_a_link_for_tokens_if_workers_draft(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 3}))
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "async_scheduling": True}
    config = resolve(str(tmp_path), num_threads=1, load_format="dummy", pipeline_parallel_size=3, **drafts)
    assert join_all(config, lambda groups: len(groups.token_links)) == [1, 1, 2]


def test_workers_of_all_engines_join_one_expert_group(tmp_path: Path) -> None:
    config = configure(tmp_path, data_parallel_size=2, enable_expert_parallel=True)
    assert join_all(config, lambda groups: groups.experts.begin(3, 1) and groups.experts.num_tokens) == [6, 6]


def test_workers_that_join_groups_need_a_rendezvous_address(tmp_path: Path) -> None:
    rank = WorkerRank(dp_rank=0, tp_rank=0, tp_size=2, local_rank=0, num_local_workers=2)
    with pytest.raises(InvalidConfig, match="distributed_init"):
        WorkerGroups().join(set_up(configure(tmp_path, tensor_parallel_size=2), rank))
    config = configure(tmp_path, enable_expert_parallel=True, data_parallel_size=2)
    with pytest.raises(InvalidConfig, match="rendezvous"):
        WorkerGroups().join(set_up(config, ALONE.with_experts(config.parallel, None)))
