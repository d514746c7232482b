"""The end of a rank is noticed by its call and by its processes, and Ray's explanation is preferred."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from configs import make_config
from fake_runtime import DRIVER, FakeRef, FakeRuntime, in_actor
from ray.exceptions import RayActorError
from waiting import LONG_S

from raycore.cluster import process_watch
from raycore.cluster.process_watch import Ends
from raycore.cluster.rank import Rank
from raycore.errors import WorkerDied


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its input does."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        yield process


@pytest.fixture
def make_rank(process):
    def make_rank(dp_rank: int = 0, node: str = DRIVER) -> Any:
        actor: Any = FakeRuntime().create_standby("rank", make_config(), node)
        info = actor.info()
        info.dp_rank, info.pid = dp_rank, process.pid
        return Rank(dp_rank, None, [node], actor, FakeRef(), info, FakeRef())

    return make_rank


@pytest.fixture
def watch():
    watches: list[Ends] = []

    def watch(*ranks: Rank) -> Ends:
        watches.append(Ends(ranks, DRIVER))
        return watches[-1]

    num_before = len(os.listdir("/proc/self/fd"))
    yield watch
    for ends in watches:
        ends.close()
    assert len(os.listdir("/proc/self/fd")) <= num_before


def test_a_process_watch_of_a_living_rank_returns_none(watch, make_rank):
    assert watch(make_rank()).wait(0.0) is None


def test_a_watch_sees_an_end_in_a_process_with_many_descriptors(watch, make_rank, process, monkeypatch):
    """As a server has whose clients have a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this process may have {hard} descriptors")

    def pidfd_open(pid: int) -> int:
        low = open_pidfd(pid)
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1100)
        os.close(low)
        return high

    open_pidfd = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        ends = watch(make_rank())
        process.kill()
        found = ends.wait(LONG_S)
        assert found is not None
        assert found.pid == process.pid
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_run_call_that_raises_wakes_the_watch_with_its_error(watch, make_rank):
    rank, other = make_rank(1), make_rank(0)
    ends = watch(other, rank)
    rank.run_ref.set_exception(in_actor(WorkerDied(0, 4711, "n1", "out of memory")))
    error = ends.wait(LONG_S)
    assert str(error).startswith("worker 0 (pid 4711, node n1) died: out of memory\ndp_rank 1 (pid ")
    assert (error.pid, error.node) == (4711, "n1")
    assert ends.explain(error).__cause__ is rank.run_ref.exception()


def test_a_run_call_that_returns_unasked_counts_as_the_ranks_end(watch, make_rank):
    rank = make_rank()
    ends = watch(rank)
    rank.run_ref.set_result(None)
    assert "run() returned without a request to stop" in str(ends.wait(LONG_S))


def test_a_process_that_ends_is_noticed_before_ray_explains_it(watch, make_rank, process):
    rank = make_rank()
    ends = watch(rank)
    process.stdin.close()
    error = ends.wait(LONG_S)
    assert str(error).endswith(f"died: its process {process.pid} ended")
    rank.run_ref.set_exception(RayActorError(error_msg="The actor is dead because it was killed"))
    explained = ends.explain(error)
    assert "it was killed" in str(explained)
    assert (explained.pid, explained.node) == (process.pid, DRIVER)


def test_a_process_end_that_ray_does_not_explain_is_reported_as_noticed(watch, make_rank, process, monkeypatch):
    monkeypatch.setattr(process_watch, "_EXPLANATION_S", 0.0)
    ends = watch(make_rank())
    process.stdin.close()
    error = ends.wait(LONG_S)
    assert ends.explain(error) is error


def test_an_explanation_of_another_ranks_failure_keeps_the_process_that_died(watch, make_rank, process):
    rank, other = make_rank(0), make_rank(1)
    ends = watch(rank, other)
    process.stdin.close()
    error = ends.wait(LONG_S)
    other.run_ref.set_exception(in_actor(ValueError("lost a peer")))
    assert (ends.explain(error).pid, error.node) == (process.pid, DRIVER)


def test_processes_of_other_nodes_are_not_watched(watch, make_rank, process):
    ends = watch(make_rank(node="other"))
    process.stdin.close()
    process.wait(LONG_S)
    assert ends.wait(0.0) is None


def test_a_rank_that_is_not_up_is_not_watched(watch, make_rank, process):
    rank = make_rank()
    rank.run_ref = None
    ends = watch(rank)
    process.stdin.close()
    process.wait(LONG_S)
    assert ends.wait(0.0) is None


def test_a_run_call_that_ends_after_the_watch_closed_is_ignored(make_rank):
    rank = make_rank()
    Ends([rank], DRIVER).close()
    rank.run_ref.set_result(None)
