"""How an engine's workers are numbered, and what they are called."""

from raycore.config.parallel import ParallelConfig
from raycore.worker.rank import WorkerRank


def test_workers_are_numbered_stage_by_stage() -> None:
    ranks = [
        WorkerRank(1, tp_rank, 2, 0, 6, pp_rank=pp_rank, pp_size=3) for pp_rank in range(3) for tp_rank in range(2)
    ]
    assert [rank.worker for rank in ranks] == list(range(6))
    assert {rank.world_size for rank in ranks} == {6}
    assert [rank.is_last_stage for rank in ranks] == [False] * 4 + [True] * 2
    assert [rank.reports_steps for rank in ranks] == [False] * 4 + [True, False]
    assert [rank.label for rank in ranks] == [f"dp1 pp{stage} tp{tp}" for stage in range(3) for tp in range(2)]
    assert WorkerRank(1, 1, 2, 1, 2).label == "dp1 tp1"


def test_workers_with_other_tokens_come_before_the_next_stage() -> None:
    places = [(stage, share, tp) for stage in range(2) for share in range(2) for tp in range(4)]
    ranks = [
        WorkerRank(0, tp, 4, 0, 16, pp_rank=stage, pp_size=2, pcp_rank=share, pcp_size=2, dcp_size=2)
        for stage, share, tp in places
    ]
    assert [rank.worker for rank in ranks] == list(range(16))
    assert {rank.world_size for rank in ranks} == {16}
    assert [rank.worker for rank in ranks if rank.reports_steps] == [8]
    assert {rank.context_size for rank in ranks} == {4}
    assert [rank.context_rank for rank in ranks[:8]] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert ranks[13].label == "dp0 pp1 pcp1 tp1 dcp1"


def test_a_worker_with_a_share_of_the_experts_has_its_number_in_its_name() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True)
    labels = [
        WorkerRank(dp_rank, tp_rank, 2, 0, 4).with_experts(parallel, None).label
        for dp_rank in range(2)
        for tp_rank in range(2)
    ]
    assert labels == ["dp0 tp0 ep0", "dp0 tp1 ep1", "dp1 tp0 ep2", "dp1 tp1 ep3"]
    alone = ParallelConfig(enable_expert_parallel=True)
    assert WorkerRank(0, 0, 1, 0, 1).with_experts(alone, None).label == "dp0 tp0"
