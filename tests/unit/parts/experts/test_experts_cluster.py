"""Ranks that share experts change together; one that fails or is silent ends the change at once."""

from __future__ import annotations

from typing import Any

import pytest
from configs import make_config
from fake_runtime import DRIVER, PENDING, FakeActor, FakeRuntime, in_actor
from ray.exceptions import RayActorError, RayTaskError

from raycore.cluster.rank import Rank
from raycore.errors import EngineDeadError, InvalidConfig, WorkerFailed
from raycore.parts.experts.cluster import CannotMove, GroupChange
from raycore.worker.rank import RankIdentity, Regrouping

MIB = 1 << 20


class Group:
    """A change of two ranks that become three."""

    def __init__(self) -> None:
        self.runtime = FakeRuntime()
        self.actors: list[Any] = [self._actor(dp_rank) for dp_rank in range(3)]
        ranks = [
            Rank(i, None, [DRIVER], actor, self.runtime.call(actor, "wait_for_init"), actor.info(), actor.run.remote())
            for i, actor in enumerate(self.actors)
        ]
        self.change = GroupChange(ranks[:2], ranks[2:], DRIVER, 5.0, 100.0, self.runtime)

    def _actor(self, dp_rank: int) -> FakeActor:
        actor: Any = self.runtime.create_standby(f"dp{dp_rank}", make_config(), DRIVER)
        actor.identity = RankIdentity(dp_rank, 3)
        return actor

    def check_memory(self, **needs: Any) -> None:
        self.runtime.answers["utility"] = lambda actor, *_: needs.get(actor.name, [(1, 2)])
        self.change.check_memory(3, {0: [1], 1: [2], 2: [2]})


@pytest.fixture
def group():
    group = Group()
    yield group
    group.change.close()


def test_only_ranks_of_the_present_group_are_paused(group):
    group.change.pause()
    assert [name for name, method, _ in group.runtime.calls if method == "pause_for_regrouping"] == ["dp0", "dp1"]
    assert group.runtime.called("pause_for_regrouping") == [(100.0,)] * 2


def test_all_ranks_of_the_new_group_are_given_each_others_actors(group):
    group.change.move(3, 7)
    first, second, third = group.actors
    regrouping = Regrouping(2, 3, "tcp://dp0", 7)
    assert group.runtime.called("regroup") == [
        (regrouping, [second, third], 100.0),
        (regrouping, [first, third], 100.0),
        (regrouping, [first, second], 100.0),
    ]


def test_ranks_that_leave_the_group_are_told_of_the_regrouping(group):
    group.change.move(1, 7)
    first = group.actors[0]
    assert [peers for _, peers, _ in group.runtime.called("regroup")] == [[], [first], [first]]


def test_each_rank_is_asked_how_much_memory_its_workers_need(group):
    group.check_memory()
    assert [args[1] for args in group.runtime.called("utility")] == [(3, [1]), (3, [2]), (3, [2])]


def test_a_worker_may_need_all_available_memory(group):
    group.check_memory(dp1=[(3 * MIB, 3 * MIB)])
    with pytest.raises(
        InvalidConfig, match=r"worker 1 of dp_rank 1 would need 5\.0 MiB more .* 3\.0 MiB are available"
    ):
        group.check_memory(dp1=[(0, 0), (5 * MIB, 3 * MIB)])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (in_actor(WorkerFailed(0, "no such call", "")), "the workers can't move experts: no such call"),
        (RayActorError(error_msg="gone"), "a rank has failed: gone"),
        (in_actor(ValueError("a bug")), "a rank has failed"),
    ],
)
def test_experts_are_not_moved_if_a_rank_cannot_tell_its_memory_need(group, answer, message):
    with pytest.raises(CannotMove, match=message):
        group.check_memory(dp1=answer)


def test_a_rank_s_raycore_error_is_raised_unwrapped_and_other_errors_as_rays_task_error(group):
    group.runtime.answers["pause_for_regrouping"] = lambda actor, _: in_actor(EngineDeadError("it has failed"))
    with pytest.raises(EngineDeadError, match=r"^it has failed$"):
        group.change.pause()
    group.runtime.answers["pause_for_regrouping"] = lambda actor, _: in_actor(ValueError("a bug"))
    with pytest.raises(RayTaskError, match="a bug"):
        group.change.pause()


def test_a_regrouping_does_not_wait_for_a_rank_that_ends(group):
    group.runtime.answers["pause_for_regrouping"] = lambda actor, _: PENDING
    group.runtime.clock.start_thread(
        "test", lambda: (group.runtime.clock.let_pass(2.0), group.actors[2].die(in_actor(ValueError("a bug"))))
    )
    with pytest.raises(EngineDeadError, match=r"dp_rank 2 ended: (.|\n)*a bug"):
        group.change.pause()
    assert group.runtime.clock.now_s() == pytest.approx(2.0, abs=0.2)


def test_a_regrouping_waits_for_a_silent_rank_up_to_the_step_timeout(group):
    group.runtime.answers["pause_for_regrouping"] = lambda actor, _: PENDING
    group.actors[1].is_stopped = True
    with pytest.raises(EngineDeadError, match="dp_rank 1: it hasn't answered for"):
        group.change.pause()
    assert group.runtime.clock.now_s() == pytest.approx(5.2, abs=0.3)


def test_a_regrouping_has_a_deadline(group):
    group.runtime.answers["pause_for_regrouping"] = lambda actor, _: PENDING if actor.name == "dp1" else None
    with pytest.raises(EngineDeadError, match=r"dp_ranks \[1\] didn't follow a change within 100 s"):
        group.change.pause()
    assert group.runtime.clock.now_s() == pytest.approx(100.0, abs=0.3)
