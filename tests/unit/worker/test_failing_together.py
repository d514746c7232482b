"""When one worker of a group fails, wherever it is, the others stop waiting for it. Each is a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from caches import cache_of
from test_worker import MOE, SHAPE, a_request_and_its_plans

from raycore.config import resolve
from raycore.messages import StepPlan
from raycore.node.listeners import offer
from raycore.parallel import meeting, peer_memory
from raycore.parallel.meeting import PeerFailed
from raycore.worker.rank import Regrouping, WorkerRank
from raycore.worker.worker import Worker

LONG_S = 600.0
"""How long workers wait. No test does: what ends has heard of the failure."""
STAGES = {
    "before it meets the others": "raycore.worker.worker.set_up",
    "while they meet": "raycore.parallel.rendezvous.Meeting.set",
    "in a group's shared memory": "raycore.parallel.collectives.share_memory",
    "in a link's shared memory": "raycore.parallel.links.share_memory",
    "when all have formed their groups": "raycore.parallel.rendezvous.Rendezvous.part",
    "after they have met": "raycore.worker.worker.WorkerModel",
    "with its cache": "raycore.worker.worker.make_runner",
    "in the warm-up": "raycore.worker.worker.warm_up_plans",
    "in a step": "raycore.runner.runner.ModelRunner.launch",
    "in an exchange": "raycore.parallel.collectives.SharedMemoryCollectives._exchange",
}
KINDS = {
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "experts": {"data_parallel_size": 2, "enable_expert_parallel": True},
}
ABSENT = {False: {"in a link's shared memory"}, True: {"in a group's shared memory", "in an exchange"}}
"""Where workers of other kinds, and of a pipeline, never come."""


class Injected(Exception):
    pass


class Saboteur:
    """Makes one thread fail in a function."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        module, _, name = path.rpartition(".")
        owner: Any = _import(module)
        real = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is self.thread:
                raise Injected("on purpose")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, replaced)


def _import(path: str) -> Any:
    """A module, or a class of one."""
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


@pytest.fixture
def saboteur(monkeypatch: pytest.MonkeyPatch) -> Saboteur:
    monkeypatch.setattr(meeting, "GRACE_S", 0.0)
    return Saboteur()


def make_workers(path: Path, options: dict[str, Any]) -> list[Worker]:
    (path / "config.json").write_text(json.dumps(SHAPE | MOE))
    config = resolve(str(path), load_format="dummy", num_threads=1, init_timeout_s=LONG_S, **options)
    parallel = config.parallel
    of_all = offer("127.0.0.1")
    ranks: list[WorkerRank] = []
    for dp_rank in range(parallel.data_parallel_size):
        own = offer("127.0.0.1") if parallel.world_size > 1 else None
        for number in range(parallel.world_size):
            stage, tp_rank = divmod(number, parallel.tensor_parallel_size)
            sizes = {"pp_rank": stage, "pp_size": parallel.pipeline_parallel_size}
            rank = WorkerRank(dp_rank, tp_rank, parallel.tensor_parallel_size, number, 2, own, **sizes)
            ranks.append(rank.with_experts(parallel, of_all))
    return [Worker(config, rank) for rank in ranks]


def live(worker: Worker) -> None:
    """What a worker does, from its start on."""
    worker.init_device()
    worker.load_model()
    worker.initialize_cache(cache_of(worker, 4))
    worker.warm_up()
    plans = a_request_and_its_plans([3, 9, 27, 17, 51], 5)
    for plan in plans if worker.rank.dp_rank == 0 else [StepPlan(-1)] * len(plans):
        worker.execute_model(plan)


def outcomes(workers: list[Worker], failing: int, saboteur: Saboteur, work: Callable[[Worker], None]) -> list[Any]:
    """What each worker raises if one of them fails."""

    def run(worker: Worker) -> Any:
        if worker is workers[failing]:
            saboteur.thread = threading.current_thread()
        try:
            work(worker)
        except Exception as error:
            return error
        finally:
            if worker is workers[failing]:
                saboteur.thread = None  # the pool may use the thread again

    with ThreadPoolExecutor(len(workers)) as pool:
        found = list(pool.map(run, workers))
    for worker in workers:
        worker.shutdown()
    return found


def check(found: list[Any], failing: int, label: str) -> None:
    assert isinstance(found.pop(failing), Injected)
    assert [type(error) for error in found] == [PeerFailed] * len(found)
    assert {str(error) for error in found} == {f"{label} failed: Injected: on purpose"}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("kind", "stage"), [(kind, stage) for kind in KINDS for stage in STAGES if stage not in ABSENT[kind == "pipeline"]]
)
def test_all_workers_stop_waiting_when_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saboteur: Saboteur, kind: str, stage: str, failing: int
) -> None:
    workers = make_workers(tmp_path, KINDS[kind])
    saboteur.install(monkeypatch, STAGES[stage])
    check(outcomes(workers, failing, saboteur, live), failing, workers[failing].rank.label)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", ["tensor parallel", "pipeline"])
def test_workers_on_several_nodes_stop_waiting_when_one_fails_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saboteur: Saboteur, kind: str, failing: int
) -> None:
    monkeypatch.setattr(peer_memory, "_open", lambda store, num_bytes: None)
    workers = make_workers(tmp_path, KINDS[kind])
    saboteur.install(monkeypatch, STAGES["in a step"])
    check(outcomes(workers, failing, saboteur, live), failing, workers[failing].rank.label)


@pytest.mark.parametrize("failing", [0, 1])
def test_all_workers_stop_waiting_when_one_fails_in_a_change_of_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saboteur: Saboteur, failing: int
) -> None:
    workers = make_workers(tmp_path, KINDS["experts"])
    regrouping = Regrouping(2, 1, offer("127.0.0.1"), 1)
    saboteur.install(monkeypatch, "raycore.parts.experts.worker.exchange.WeightExchange.exchange")

    def work(worker: Worker) -> None:
        live(worker)
        worker.regroup(regrouping)

    check(outcomes(workers, failing, saboteur, work), failing, workers[failing].rank.label)


def test_weights_that_one_worker_cannot_read_again_are_no_failure_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saboteur: Saboteur
) -> None:
    """A reload may be tried again, with better files."""
    workers = make_workers(tmp_path, KINDS["tensor parallel"])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(live, workers))
    told: list[BaseException] = []
    monkeypatch.setattr(Worker, "tell_peers", lambda worker, error: told.append(error))
    saboteur.install(monkeypatch, "raycore.worker.worker_weights.read_weights")
    saboteur.thread = threading.current_thread()
    with pytest.raises(Injected):
        workers[1].load_model()
    assert told == []
    for worker in workers:
        worker.shutdown()
