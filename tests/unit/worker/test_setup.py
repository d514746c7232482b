"""What a worker decides from its configuration and its ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from test_worker import ALONE, MOE, SHAPE

from raycore.config import resolve
from raycore.errors import InvalidConfig
from raycore.worker.rank import WorkerRank
from raycore.worker.setup import WorkerSetup, gpu_id, set_up


def make(path: Path, rank: WorkerRank = ALONE, shape: dict[str, Any] = SHAPE, **options: Any) -> WorkerSetup:
    (path / "config.json").write_text(json.dumps(shape))
    config = resolve(str(path), **{"num_threads": 1, "load_format": "dummy"} | options)
    return set_up(config, rank.with_experts(config.parallel, None))


def test_a_workers_threads_are_those_of_num_threads_or_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycore.worker.setup.host.usable_cores", lambda: 7)
    num_threads = torch.get_num_threads()
    try:
        shared = msgspec.structs.replace(ALONE, num_local_workers=3)
        assert make(tmp_path, num_threads=2).max_threads == torch.get_num_threads() == 2
        assert make(tmp_path, shared, num_threads=None).max_threads == torch.get_num_threads() == 2
        crowded = msgspec.structs.replace(ALONE, num_local_workers=20)
        assert make(tmp_path, crowded, num_threads=None).max_threads == 1
    finally:
        torch.set_num_threads(num_threads)


def test_a_workers_weight_share_follows_from_its_ranks(tmp_path: Path) -> None:
    rank = WorkerRank(0, tp_rank=1, tp_size=2, local_rank=0, num_local_workers=4, pp_rank=1, pp_size=2)
    setup = make(tmp_path, rank, tensor_parallel_size=2, pipeline_parallel_size=2, dtype="bfloat16")
    share = setup.share
    assert (share.tp_rank, share.tp_size, share.dtype, share.layers) == (1, 2, torch.bfloat16, range(1, 2))
    assert (share.has_embedding, share.has_head, share.experts) == (False, True, None)
    assert setup.dtype_name == "bfloat16"
    assert setup.hidden_bytes == 2048 * 16 * 2


@pytest.mark.parametrize(("dp_rank", "experts"), [(0, range(1)), (1, range(1, 3)), (2, range(0))])
def test_a_rank_of_an_expert_group_holds_whole_experts_and_one_that_leaves_holds_none(
    tmp_path: Path, dp_rank: int, experts: range
) -> None:
    rank = msgspec.structs.replace(ALONE, dp_rank=dp_rank)
    setup = make(tmp_path, rank, SHAPE | MOE, data_parallel_size=2, enable_expert_parallel=True)
    assert setup.experts is not None
    assert (setup.experts.experts, setup.experts.rows) == (experts, range(8))
    assert make(tmp_path, rank, SHAPE | MOE).experts is None
    more = setup.with_ranks(3, "tcp://host:1")
    assert (more.config.parallel.data_parallel_size, more.rank.ep_size, more.rank.rendezvous) == (3, 3, "tcp://host:1")
    assert more.experts is not None
    assert more.experts.experts == range(dp_rank, dp_rank + 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_a_worker_that_sees_no_gpu_refuses_device_cuda(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="sees no GPU"):
        make(tmp_path, device="cuda")


@pytest.mark.parametrize(("visible", "number"), [("2,5", "5"), ("", "1"), (None, "1")])
def test_a_workers_gpu_id_is_the_gpus_number_on_its_node(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, number: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_id(torch.device("cuda", 1)) == number
