"""Ranks start together or not at all, are replaced by what is at hand, and leave nothing behind."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
import pytest
from configs import make_config
from fake_runtime import DRIVER, PENDING, in_actor
from overtaking import overtake
from ray.exceptions import RayActorError

from raycore.activity import RUNNING
from raycore.cluster.manager import shape_of
from raycore.errors import InitializationError, InvalidConfig, PlacementShortage
from raycore.lora.request import LoRARequest
from raycore.parts.adapters.values import AddedAdapter, AddedAdapters

STANDBYS = {"standby_delay_s": 30.0}


@pytest.fixture
def start(make):
    """Start an engine that nobody supervises."""

    def start(*args: Any, **options: Any) -> Any:
        engine = make(*args, **options)
        engine.manager.start()
        return engine

    return start


def comes_up(actor: Any, **changes: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(actor.info(), **changes))


def replace(engine: Any, *dp_ranks: int) -> None:
    """Replace ranks, as their monitor does."""
    engine.manager.confirm(engine.manager.replace(dp_ranks))


# ---- starts


@pytest.mark.parametrize(
    ("device", "resources", "bundle"),
    [
        ("cpu", None, {"CPU": 1.0}),
        ("cpu", {"CPU": 0.5, "GPU": 1.0, "special": 2.0}, {"CPU": 0.5, "special": 2.0}),
        ("cuda", {"accelerator_type:H100": 0.001}, {"CPU": 1.0, "GPU": 1.0, "accelerator_type:H100": 0.001}),
    ],
)
def test_workers_reserve_what_they_are_told_to(device, resources, bundle):
    config = make_config()
    parallel = msgspec.structs.replace(config.parallel, resources_per_worker=resources)
    shape = shape_of(msgspec.structs.replace(config, device=device, parallel=parallel))
    assert shape.bundles == (bundle,)


def test_ranks_come_up_in_rank_order_each_in_its_group(make):
    engine = make(3)
    assert [info.pid for info in engine.manager.start()] == [1001, 1002, 1003]
    assert [actor.identity.num_local_workers for actor in engine.runtime.actors] == [3, 3, 3]
    prefix = f"raycore_{engine.manager.engine_id}_"
    title = f"engine {engine.manager.engine_id} of driver (pid 99, node driver at 10.0.0.1, job 01000000)"
    names = [f"{prefix}dp{dp_rank}: {title}" for dp_rank in range(3)]
    assert [group.name for group in engine.groups.standing] == names
    assert [actor.name for actor in engine.runtime.actors] == [f"{prefix}dp{dp_rank}" for dp_rank in range(3)]
    assert engine.runtime.called("run") == [([], RUNNING)] * 3


def test_workers_are_counted_by_node(make):
    engine = make(3, nodes={DRIVER: 2, "other": 2})
    engine.manager.start()
    assert [actor.identity.num_local_workers for actor in engine.runtime.actors] == [2, 2, 1]


@pytest.mark.parametrize("error", [InvalidConfig("max_model_len=7 is odd"), InitializationError("no disk")])
def test_a_start_fails_with_the_error_that_a_rank_raised(make, error):
    engine = make()
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: (
        in_actor(error) if actor.identity.dp_rank == 1 else PENDING
    )
    with pytest.raises(type(error), match=str(error)):
        engine.manager.start()
    assert (engine.runtime.running, engine.groups.standing, engine.manager.ranks) == ([], [], {})
    assert engine.runtime.num_connections == 0


def test_a_start_fails_with_the_death_of_a_rank_and_its_last_lines(make):
    engine = make()
    died = RayActorError(error_msg="The actor died.\n\tpid: 1002\nThe actor is dead because its node is gone")
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: died if actor.identity.dp_rank == 1 else PENDING
    with pytest.raises(InitializationError, match="its node is gone\ndp_rank 1 failed to start\nlast lines of 1002"):
        engine.manager.start()


def test_the_start_of_ranks_has_a_deadline(make):
    engine = make(3)
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: PENDING if actor.identity.dp_rank else comes_up(actor)
    with pytest.raises(InitializationError, match=r"dp_ranks \[1, 2\] didn't start within init_timeout_s=100"):
        engine.manager.start()
    assert engine.clock.now_s() == pytest.approx(100.0, abs=0.5)


def test_a_start_is_cancelled_when_its_caller_no_longer_wants_it(make):
    engine = make()
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: PENDING
    with pytest.raises(InitializationError, match="shut down while it was starting"):
        engine.manager.start(is_wanted=lambda: engine.clock.now_s() < 3.0)
    assert engine.clock.now_s() == pytest.approx(3.0, abs=0.3)
    assert engine.groups.standing == []


def test_a_start_is_cancelled_by_another_thread(make):
    engine = make()
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: PENDING
    engine.clock.start_thread("test", lambda: (engine.clock.let_pass(3.0), engine.manager.cancel()))
    with pytest.raises(InitializationError, match="shut down while it was starting"):
        engine.manager.start()
    assert engine.clock.now_s() < 4.0


def test_a_start_that_waits_for_nodes_is_cancelled(make):
    engine = make(2, nodes={DRIVER: 1}, wait_for_nodes_s=600.0)
    engine.clock.start_thread("test", lambda: (engine.clock.let_pass(3.0), engine.manager.cancel()))
    with pytest.raises(InitializationError, match="the engine was shut down"):
        engine.manager.start()
    assert engine.clock.now_s() < 4.0
    assert engine.groups.asked_for_nodes


def test_a_start_does_not_wait_for_a_node_that_has_crashed(make):
    engine = make(nodes={DRIVER: 1, "other": 1})
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: PENDING
    engine.groups.silent = {"other"}
    with pytest.raises(InitializationError, match="these nodes no longer answer: other"):
        engine.manager.start()
    assert engine.clock.now_s() < 1.0


def test_progress_is_the_mean_of_the_ranks_that_answer(make):
    engine = make()
    shares: list[float] = []
    engine.runtime.answers["load_progress"] = lambda actor: (
        RayActorError(error_msg="gone") if actor.identity.dp_rank else 0.5
    )
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: PENDING
    with pytest.raises(InitializationError):
        engine.manager.start(shares.append, lambda: engine.clock.now_s() < 1.0)
    assert set(shares) == {0.25}
    assert len(shares) == 3


def test_some_of_many_ranks_are_asked_for_their_progress(make, monkeypatch):
    monkeypatch.setattr("raycore.cluster.rank_starts._MAX_ASKED", 3)
    engine = make(8)
    shares: list[float] = []
    asked: list[int] = []
    engine.runtime.answers["load_progress"] = lambda actor: asked.append(actor.identity.dp_rank) or 0.5
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: PENDING
    with pytest.raises(InitializationError):
        engine.manager.start(shares.append, lambda: engine.clock.now_s() < 0.5)
    assert set(shares) == {0.5}
    assert asked == [0, 3, 6] * len(shares)


def test_answers_of_ranks_that_have_started_together_are_read_together(make):
    engine = make(8)
    waits: list[int] = []
    wait = engine.runtime.wait
    engine.runtime.wait = lambda refs, **options: waits.append(len(refs)) or wait(refs, **options)
    engine.manager.start()
    assert waits == [8]


def test_a_joined_listener_leaves_before_the_disconnect_if_the_start_fails(make):
    engine, joined = make(9), list[bool]()
    with pytest.raises(PlacementShortage):
        engine.manager.start(join=lambda: lambda: joined.append(engine.runtime.is_connected()))
    assert joined == [True], "while the process is still connected"


def test_a_start_is_refused_if_only_some_nodes_have_kernels(make):
    engine = make()
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: comes_up(
        actor, kernels=[("/raycore", actor.identity.dp_rank == 0, "")]
    )
    with pytest.raises(InitializationError, match="native kernels for CPUs are missing: dp_rank 1"):
        engine.manager.start()


def test_ranks_in_lockstep_meet_at_the_first_rank_and_get_each_others_actors(start):
    engine = start(3, enable_expert_parallel=True)
    first, second, third = engine.runtime.actors
    meeting = engine.runtime.called("wait_for_init")[0][0]
    assert meeting.result() == f"tcp://{first.name}"
    assert {args[0] for args in engine.runtime.called("wait_for_init")} == {meeting}
    assert [peers for peers, _ in engine.runtime.called("run")] == [[second, third], [first, third], [first, second]]


def test_the_first_rank_chooses_the_dtype_and_successors_keep_it(make):
    engine = make(dtype="auto")
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: comes_up(actor, dtype="bfloat16")
    engine.manager.start()
    assert len(engine.runtime.called("choose_dtype")) == 1
    replace(engine, 0)
    assert len(engine.runtime.called("choose_dtype")) == 1
    assert engine.actor(0).config.model.dtype == "bfloat16"


# ---- replacements


def test_a_successor_takes_its_predecessors_group_and_a_new_actor_name(start):
    engine = start()
    groups, name = list(engine.groups.standing), engine.actor(1).name
    old = engine.actor(1)
    replace(engine, 1)
    assert engine.groups.standing == groups
    assert old.is_dead
    assert engine.actor(1).name == f"{name}_3"


def test_a_stopped_process_is_killed_before_its_successor_starts(start):
    engine = start()
    old = engine.actor(1)
    old.is_stopped = True
    engine.manager.replace([1])
    assert (old.pid, signal.SIGKILL) in engine.runtime.signals
    assert old.is_dead
    engine.manager.confirm([engine.manager.ranks[1]])


def test_processes_on_other_nodes_get_no_signal(start):
    engine = start(nodes={DRIVER: 1, "other": 1})
    replace(engine, 1)
    assert engine.runtime.signals == []


def test_a_replacement_starts_in_the_engines_activity(start):
    engine = start()
    assert [rank.dp_rank for rank in engine.manager.desired.change(activity=RUNNING.paused())] == [0, 1]
    replace(engine, 1)
    assert engine.runtime.called("run")[-1] == ([], RUNNING.paused())


def test_an_unwanted_replacement_is_cancelled(start):
    engine = start(nodes={DRIVER: 1, "other": 1})
    engine.groups.draining = {"other"}
    with pytest.raises(InitializationError, match=r"dp_ranks \[1\] weren't placed"):
        engine.manager.replace([1], lambda: False)


def test_a_replacement_that_is_overtaken_by_the_engines_end_creates_no_actor(start, monkeypatch):
    engine = start()
    monkeypatch.setattr(engine.manager.reservations, "find_crashed", lambda nodes: engine.manager.cancel() or set())
    with pytest.raises(InitializationError, match="the engine was shut down"):
        engine.manager.replace([1])
    assert len(engine.runtime.actors) == 2


def test_no_rank_is_created_after_the_engines_end(start):
    engine = start()
    engine.manager.stop_ranks()
    with pytest.raises(InitializationError, match="the engine was shut down"):
        engine.manager.grow([2])
    assert engine.runtime.running == []


def test_another_checkpoint_and_another_number_of_ranks_at_the_same_time_both_count(start):
    engine = start(1)
    changed: list[str] = []

    def change() -> None:
        engine.manager.use_checkpoint("another")
        changed.append("the checkpoint")

    overtake(engine.manager, "_lock", change)
    engine.manager.resize(2)
    assert changed  # before the number
    replace(engine, 0)
    config = engine.runtime.actors[-1].config
    assert (config.model.model, config.parallel.data_parallel_size) == ("another", 2)


def test_who_looks_at_the_ranks_is_not_disturbed_by_added_ones(start):
    engine = start()
    looking = iter(engine.manager.ranks.values())
    next(looking)
    engine.manager.confirm(engine.manager.grow([2]))
    assert len(list(looking)) == 1
    assert sorted(engine.manager.ranks) == [0, 1, 2]


# ---- standbys


def wait_for_standbys(engine: Any, seconds: float = 31.0) -> list[Any]:
    engine.clock.let_pass(seconds)
    return [actor for actor in engine.runtime.running if actor.identity.dp_rank == -1]


def test_a_standby_replaces_a_rank_of_its_node(start):
    engine = start(recovery=STANDBYS)
    (standby,) = wait_for_standbys(engine)
    assert standby.is_stopped
    replace(engine, 1)
    assert engine.actor(1) is standby
    assert not standby.is_stopped
    assert standby.identity.dp_rank == 1
    assert standby.name.endswith("_dp1_4")
    assert standby.config.parallel.data_parallel_size == 2


def test_a_standby_of_another_node_replaces_no_rank(start):
    engine = start(nodes={DRIVER: 1, "other": 2}, recovery=STANDBYS)
    engine.runtime.answers["stand_by"] = lambda actor: (
        [actor.pid] if actor.node == DRIVER else RayActorError(error_msg="no memory")
    )
    assert [actor.node for actor in wait_for_standbys(engine)] == [DRIVER]
    replace(engine, 1)
    assert engine.runtime.called("adopt") == []


def test_a_rank_that_moves_takes_the_standby_of_its_new_node(start):
    engine = start(nodes={DRIVER: 2, "other": 2}, recovery=STANDBYS, placement_strategy="strict")
    assert set(engine.groups.names().values()) == {DRIVER, "other"}
    wait_for_standbys(engine)
    engine.groups.draining = {"other"}
    replace(engine, 1)
    assert engine.actor(1).node == DRIVER
    assert len(engine.runtime.called("adopt")) == 1


def test_a_standby_that_is_not_ready_is_not_waited_for(start):
    engine = start(recovery=STANDBYS)
    engine.runtime.answers["stand_by"] = lambda actor: PENDING
    assert len(wait_for_standbys(engine)) == 1
    replace(engine, 1)
    assert engine.runtime.called("adopt") == []


def test_the_next_standby_starts_soon_after_a_failure(start):
    engine = start(recovery=STANDBYS)
    assert wait_for_standbys(engine, 29.9) == []
    assert len(wait_for_standbys(engine, 0.2)) == 1
    replace(engine, 1)
    assert wait_for_standbys(engine, 0.4) == []
    assert len(wait_for_standbys(engine, 0.2)) == 1


@pytest.mark.parametrize(
    "options", [{"recovery": {"standby_delay_s": None}}, {"recovery": STANDBYS, "enable_expert_parallel": True}]
)
def test_no_standby_is_kept_if_standbys_are_off_or_ranks_share_experts(start, options):
    assert wait_for_standbys(start(**options)) == []


@pytest.mark.parametrize("moves", [False, True])
def test_a_standby_with_gpus_replaces_only_a_rank_with_the_same_gpus(make, moves):
    engine = make(3, nodes={DRIVER: 1, "other": 1, "third": 2}, recovery=STANDBYS, device="cuda")
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: comes_up(actor, gpu_ids=[f"{actor.node}'s"])
    engine.manager.start()
    assert len(wait_for_standbys(engine)) == 3
    engine.groups.draining = {"other"} if moves else set()
    replace(engine, 1)
    assert engine.actor(1).node == ("third" if moves else "other")
    adopted = [identity.gpu_ids for identity, _ in engine.runtime.called("adopt")]
    assert adopted == ([] if moves else [["other's"]])


def test_a_new_rank_takes_no_standby(start):
    engine = start(recovery=STANDBYS)
    wait_for_standbys(engine)
    engine.manager.confirm(engine.manager.grow([2]))
    assert engine.runtime.called("adopt") == []


# ---- adapters that were added


def adapters(*paths: str) -> AddedAdapters:
    each = [AddedAdapter(LoRARequest(path, i + 1, f"/{path}"), i + 1) for i, path in enumerate(paths)]
    return AddedAdapters(len(paths), tuple(each))


def test_a_rank_reads_the_adapters_before_it_serves(start):
    engine = start()
    added = adapters("one", "two")
    engine.manager.desired.change(adapters=added)
    engine.runtime.answers["utility"] = lambda actor, *_: PENDING
    ranks = engine.manager.replace([1])
    engine.clock.start_thread(
        "test", lambda: (engine.clock.let_pass(3.0), ranks[0].actor.pending["utility"].set_result({2: "no file"}))
    )
    engine.manager.confirm(ranks)
    assert engine.clock.now_s() == pytest.approx(3.0, abs=0.3)
    method, (told, wanted), _, timeout_s = engine.runtime.called("utility")[0]
    assert (method, told, timeout_s) == ("sync_adapters", added, 100.0)
    assert wanted == added.first_ids(engine.manager._config.lora.num_adapters)


def test_reading_adapters_has_the_deadline_of_the_start(start):
    engine = start()
    engine.manager.desired.change(adapters=adapters("one"))
    engine.runtime.answers["utility"] = lambda actor, *_: PENDING
    with pytest.raises(InitializationError, match=r"dp_ranks \[1\] haven't read their adapters within .*=100"):
        replace(engine, 1)
    assert engine.clock.now_s() == pytest.approx(100.0, abs=0.5)


def test_a_rank_that_dies_while_it_reads_adapters_is_not_waited_for(start):
    engine = start()
    engine.manager.desired.change(adapters=adapters("one"))
    engine.runtime.answers["utility"] = lambda actor, *_: RayActorError(error_msg="gone")
    replace(engine, 1)
    assert engine.clock.now_s() == 0.0


# ---- ends


def test_ranks_that_stop_by_themselves_get_no_signal(start):
    engine = start()
    engine.manager.stop_ranks()
    assert len(engine.runtime.called("stop")) == 2
    assert engine.clock.now_s() == 0.0
    assert engine.runtime.signals == []


def test_ranks_that_do_not_stop_are_killed(start):
    engine = start()
    engine.runtime.answers["stop"] = lambda actor: None
    deaf = engine.actor(1)
    deaf.outlives_end = True
    engine.manager.stop_timeout_s = 3.0
    engine.manager.stop_ranks()
    assert engine.runtime.signals == [(deaf.pid, signal.SIGKILL)]
    assert engine.clock.now_s() == pytest.approx(3.0 + 5.0)


def test_an_end_with_zero_timeout_kills_ranks_without_asking_them_to_stop(start):
    engine = start()
    engine.manager.stop_ranks(0.0)
    assert engine.runtime.called("stop") == []
    assert engine.runtime.running == []


def test_a_manager_may_be_shut_down_twice_and_before_its_start(make, start):
    make().manager.shutdown()
    engine = start(recovery=STANDBYS)
    wait_for_standbys(engine)
    engine.manager.shutdown()
    engine.manager.shutdown()
    assert engine.runtime.num_connections == 0
    assert engine.runtime.running == []


def test_a_shutdown_asks_nothing_of_ray_while_its_control_store_is_away(start, caplog):
    """Each call would wait until it is back."""
    engine = start(recovery=STANDBYS)
    num_calls, groups, running = len(engine.runtime.calls), list(engine.groups.standing), list(engine.runtime.running)
    engine.runtime.is_connected = lambda: False
    engine.manager.give_back()
    engine.manager.stop_ranks()
    assert len(engine.runtime.calls) == num_calls
    assert engine.runtime.running == running
    assert engine.groups.standing == groups
    assert caplog.text.count("Ray at 10.0.0.1:6379 is gone") == 1
    for actor in running:  # as at the program's end
        actor.die()
    engine.groups.standing.clear()
