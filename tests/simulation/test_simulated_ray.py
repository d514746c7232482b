"""Small programs against the simulated Ray, each over some tens of seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import (
    ActorAlreadyExistsError,
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)

from simulation.ray import actors, api, groups, objects
from simulation.ray.cluster import Cluster
from simulation.ray.delays import UNNOTICED_S
from simulation.ray.groups import placement_group, placement_group_table, remove_placement_group
from simulation.ray.messages import Boundary
from simulation.world import kernel, system, threads
from simulation.world.kernel import World

SEEDS = range(30)
sleep, now_s = system.time.sleep, system.time.monotonic
get, wait = objects.get, objects.wait


class Probe:
    """An actor that tells what has happened to it."""

    def __init__(self, first: object = None) -> None:
        if first == "fails":
            raise ValueError("no room for weights")
        self.seen: list[Any] = [] if first is None else [first]
        self.child: Any = None

    def pid(self) -> int:
        return system.os.getpid()

    @actors.method(concurrency_group="io")
    def add(self, value: object) -> list[Any]:
        threads.world().systems["added"] = value
        self.seen.append(value)
        return self.seen

    @actors.method(concurrency_group="io", num_returns=0)
    def tell(self, value: object) -> None:
        self.seen.append(value)

    @actors.method(concurrency_group="io")
    def look(self) -> list[Any]:
        return self.seen

    @actors.method(concurrency_group="run")
    def run(self, seconds: float = 1e4) -> str:
        sleep(seconds)
        return "over"

    @actors.method(concurrency_group="run")
    def fail(self) -> None:
        raise KeyError("lost")

    @actors.method(concurrency_group="outputs")
    def outputs(self, count: int) -> Any:
        for number in range(count):
            yield number
            sleep(0.01)

    @actors.method(concurrency_group="run")
    def start_child(self) -> int:
        self.child = PROBE.remote()
        return get(self.child.pid.remote())


PROBE = actors.remote(max_restarts=0, concurrency_groups={"io": 1, "run": 1, "outputs": 2})(Probe)
RESTARTED = actors.remote(max_restarts=-1)(Probe)


def on(seed: int, main: Callable[[Cluster], Any], nodes: int = 1) -> Any:
    world = World(seed, last_s=1e4)
    cluster = Cluster(world)
    for _ in range(nodes):
        cluster.add_node(CPU=4)

    def driver() -> Any:
        api.init()
        return main(cluster)

    result = world.run(driver)
    assert not world.failures, world.failures
    return result


def outcomes(main: Callable[[Cluster], Any], nodes: int = 1, seeds: range = SEEDS) -> set[str]:
    return {repr(on(seed, main, nodes)) for seed in seeds}


def error_of(ref: Any, timeout: float | None = 200.0) -> BaseException:
    with pytest.raises(RayError) as caught:
        get(ref, timeout=timeout)
    return caught.value


def process_of(cluster: Cluster, pid: int) -> kernel.Process:
    return next(process for process in cluster.world.processes if process.pid == pid)


# ---- calls


def calls_in_order(cluster: Cluster) -> object:
    probe = PROBE.remote()
    for number in range(10):
        probe.tell.remote(number)
        probe.add.remote(number + 100)
    return get(probe.look.remote())


def test_calls_of_a_group_run_in_the_order_in_which_they_were_made():
    assert outcomes(calls_in_order) == {repr([value for number in range(10) for value in (number, number + 100)])}


def waits_for_an_argument(cluster: Cluster) -> object:
    probe, other = PROBE.remote(), PROBE.remote()
    slow = other.run.remote(0.5)
    probe.tell.remote(slow)
    probe.tell.remote("later")
    return get(probe.look.remote())


def test_a_call_waits_for_its_arguments_and_holds_back_later_ones():
    assert outcomes(waits_for_an_argument) == {"['over', 'later']"}


def groups_side_by_side(cluster: Cluster) -> object:
    probe = PROBE.remote()
    running = probe.run.remote(5.0)
    early = get(probe.add.remote(1))
    done, left = wait([running], timeout=0.5)
    return early, len(done), len(left), get(running)


def test_a_long_call_holds_up_no_other_group():
    assert outcomes(groups_side_by_side) == {"([1], 0, 1, 'over')"}


def copies_values(cluster: Cluster) -> object:
    probe, sent = PROBE.remote(), [1]
    probe.tell.remote(sent)
    sent.append(2)
    first = get(probe.look.remote())
    first.append("mine")
    return get(probe.look.remote())


def test_processes_share_no_value():
    assert outcomes(copies_values) == {"[[1]]"}


def raises(cluster: Cluster) -> object:
    probe = PROBE.remote()
    error = error_of(probe.fail.remote())
    dependent = error_of(probe.add.remote(probe.fail.remote()))
    assert isinstance(error, RayTaskError)
    assert isinstance(error, KeyError)
    assert isinstance(dependent, RayTaskError)
    with pytest.raises(GetTimeoutError):
        get(probe.run.remote(), timeout=0.1)
    return repr(error.cause), str(error).splitlines()[-1]


def test_an_exception_comes_back_as_rays_task_error():
    assert outcomes(raises) == {repr(("KeyError('lost')", "KeyError: 'lost'"))}


def futures_hear(cluster: Cluster) -> object:
    probe = PROBE.remote()
    heard: list[object] = []
    future = probe.add.remote(1).future()
    future.add_done_callback(lambda _: heard.append(system.module().threading.current_thread()))
    value = future.result(100)
    failed = probe.fail.remote().future().exception(100)
    sleep(0.01)
    return value, len(heard), isinstance(failed, KeyError)


def test_a_future_hears_of_the_result():
    assert outcomes(futures_hear) == {"([1], 1, True)"}


def refuses_bad_waits(cluster: Cluster) -> object:
    ref = PROBE.remote().look.remote()
    for refs, options in [([ref, ref], {}), ([ref], {"num_returns": 2}), ([ref], {"timeout": -1})]:
        with pytest.raises(ValueError):
            wait(refs, **options)
    return wait([])


def test_a_wait_that_cant_be_is_refused():
    assert outcomes(refuses_bad_waits, seeds=range(2)) == {"([], [])"}


# ---- streams


def streams(cluster: Cluster) -> object:
    probe = PROBE.remote()
    stream = probe.outputs.options(num_returns="streaming").remote(20)
    return [get(ref) for ref in stream]


def test_a_stream_has_all_items_in_order():
    assert outcomes(streams) == {repr(list(range(20)))}


def breaks_a_stream(cluster: Cluster) -> tuple[int, bool]:
    probe = PROBE.remote()
    pid = get(probe.pid.remote())
    cluster.share_of_late_values = 0.5
    stream = probe.outputs.options(num_returns="streaming").remote(10_000)
    cluster.world.call_later(0.5, lambda: cluster.world.kill(process_of(cluster, pid)))
    values, num_errors, failed_early = 0, 0, False
    for ref in stream:
        try:
            get(ref, timeout=100)
            failed_early = failed_early or num_errors > 0
            values += 1
        except RayActorError:
            num_errors += 1
    assert 1 <= num_errors <= 20
    return num_errors, failed_early


def test_a_stream_of_an_actor_that_dies_ends_with_an_error_and_items_may_be_lost():
    found = {on(seed, breaks_a_stream) for seed in SEEDS}
    assert {num > 1 for num, _ in found} == {False, True}, "in some seeds, the value of a known item is lost"


# ---- deaths


def kills(cluster: Cluster) -> object:
    probe = PROBE.options(name="victim").remote()
    pid = get(probe.pid.remote())
    running = probe.run.remote()
    api.kill(probe)
    error, later = error_of(running), error_of(probe.look.remote())
    sleep(100)
    assert process_of(cluster, pid).has_ended
    with pytest.raises(ValueError):
        api.get_actor("victim")
    return type(error).__name__, str(error).splitlines()[-1], type(later).__name__


def test_a_killed_actors_calls_fail_and_its_process_ends():
    assert outcomes(kills) == {
        "('ActorDiedError', 'The actor is dead because it was killed by `ray.kill`.', 'ActorDiedError')"
    }


def kills_a_stopped_one(cluster: Cluster) -> object:
    probe = PROBE.remote()
    process = process_of(cluster, get(probe.pid.remote()))
    cluster.world.stop(process)
    api.kill(probe)
    assert isinstance(error_of(probe.look.remote()), ActorDiedError)
    sleep(5)
    was_running = not process.has_ended
    cluster.world.go_on(process)
    sleep(5)
    return was_running, process.has_ended


def test_a_stopped_process_ends_when_it_goes_on():
    assert outcomes(kills_a_stopped_one) == {"(True, True)"}


def dies(cluster: Cluster) -> str:
    probe = PROBE.remote()
    pid = get(probe.pid.remote())
    running = probe.run.remote()
    system.os.kill(pid, 9)
    error = error_of(running)
    assert isinstance(error, ActorUnavailableError) or f"\tpid: {pid}" in str(error)
    assert isinstance(error_of(probe.look.remote()), RayActorError)
    return type(error).__name__


def test_a_death_has_a_reason_unless_it_comes_too_late():
    assert "ActorDiedError" in {on(seed, dies) for seed in SEEDS}


def test_without_the_control_store_a_death_has_no_reason():
    def main(cluster: Cluster) -> object:
        probe = PROBE.remote()
        pid = get(probe.pid.remote())
        cluster.gcs.stall(20.0)
        running = probe.run.remote()
        system.os.kill(pid, 9)
        before = type(error_of(running)).__name__
        sleep(40)
        return before, type(error_of(probe.look.remote())).__name__

    assert outcomes(main) == {"('ActorUnavailableError', 'ActorDiedError')"}


def test_an_actor_that_fails_in_its_constructor():
    def main(cluster: Cluster) -> object:
        error = error_of(PROBE.remote("fails").look.remote())
        assert isinstance(error, ActorDiedError)
        return error.actor_init_failed, str(error).splitlines()[-1]

    assert outcomes(main) == {"(True, 'ValueError: no room for weights')"}


def test_a_process_without_memory_isnt_an_actor_error():
    def main(cluster: Cluster) -> object:
        probe = PROBE.remote()
        process, running = process_of(cluster, get(probe.pid.remote())), probe.run.remote()
        cluster.kill_for_memory(process)
        return isinstance(error_of(running), (OutOfMemoryError, ActorUnavailableError))

    assert outcomes(main) == {"True"}


def test_the_end_of_an_owner_ends_its_actors():
    def main(cluster: Cluster) -> object:
        owner = PROBE.remote()
        child = process_of(cluster, get(owner.start_child.remote()))
        pid = get(owner.pid.remote())
        system.os.kill(pid, 9)
        sleep(30)
        texts = [str(actor.death()) for actor in cluster.gcs.actors.values() if actor.death is not None]
        return child.has_ended, any("its owner has died" in text for text in texts)

    assert outcomes(main) == {"(True, True)"}


def test_an_actor_without_handles_ends():
    def main(cluster: Cluster) -> object:
        probe = PROBE.remote()
        process = process_of(cluster, get(probe.pid.remote()))
        last = probe.add.remote("last")
        del probe
        value = get(last)
        sleep(30)
        return value, process.has_ended

    assert outcomes(main) == {"(['last'], True)"}


def test_a_call_that_comes_to_a_process_that_leaves_is_cancelled():
    def main(cluster: Cluster) -> object:
        probe = PROBE.options(name="leaves").remote()
        get(probe.pid.remote())
        weak = api.get_actor("leaves")
        probe.run.remote(3.0)
        queued = weak.run.remote(1.0)
        cluster.gcs.actors[probe._actor.id].incarnation.leave()  # pyright: ignore[reportOptionalMemberAccess]
        return type(error_of(queued)).__name__

    found = outcomes(main)
    assert repr(TaskCancelledError.__name__) in found
    assert found <= {repr(each.__name__) for each in (TaskCancelledError, ActorDiedError, ActorUnavailableError)}


def test_a_restarted_actor_begins_anew_and_a_detached_one_outlives_its_driver():
    def main(cluster: Cluster) -> object:
        pids: list[int] = []

        def program() -> None:
            api.init(namespace="shared")
            probe = RESTARTED.options(name="detached", lifetime="detached").remote("first")
            pids.append(get(probe.pid.remote()))

        process = cluster.drive("program", program)
        while not process.has_ended:
            sleep(1.0)
        sleep(30)
        assert not process_of(cluster, pids[0]).has_ended
        system.os.kill(pids[0], 9)
        sleep(40)
        found = api.get_actor("detached", "shared")
        again = get(found.pid.remote())
        return again != pids[0], process_of(cluster, again).has_ended

    assert outcomes(main) == {"(True, False)"}


def test_names_are_taken_once():
    def main(cluster: Cluster) -> object:
        first = PROBE.options(name="one", namespace="n").remote()
        with pytest.raises(ActorAlreadyExistsError):
            PROBE.options(name="one", namespace="n").remote()
        get(first.pid.remote())
        assert api.get_actor("one", "n") == first
        api.kill(first)
        sleep(30)
        PROBE.options(name="one", namespace="n").remote()
        return api.list_named_actors()

    assert outcomes(main) == {"[]"}


# ---- nodes and groups


def in_bundle(group: groups.PlacementGroup, index: int) -> dict[str, Any]:
    return {"scheduling_strategy": api.PlacementGroupSchedulingStrategy(group, index), "num_cpus": 1}


def test_a_group_holds_resources_until_it_is_removed():
    def main(cluster: Cluster) -> object:
        free = api.State.available_resources_per_node
        (node,) = free()
        group = placement_group([{"CPU": 2}, {"CPU": 1}], "STRICT_PACK", name="mine")
        assert group.wait(100)
        probe = PROBE.options(**in_bundle(group, 1)).remote()
        process = process_of(cluster, get(probe.pid.remote()))
        sleep(10)
        held = free()[node]
        assert held["CPU"] == 1.0
        assert f"CPU_group_1_{group.id.hex()}" not in held, "a bundle that is used up isn't shown"
        assert held[f"CPU_group_0_{group.id.hex()}"] == 2.0
        remove_placement_group(group)
        assert placement_group_table(group)["state"] == "REMOVED"
        assert isinstance(error_of(probe.run.remote()), RayActorError)
        sleep(10)
        return free()[node]["CPU"], process.has_ended

    assert outcomes(main) == {"(4.0, True)"}


def test_a_group_waits_for_a_node_with_room():
    def main(cluster: Cluster) -> object:
        group = placement_group([{"CPU": 8}])
        early = group.wait(3)
        cluster.add_node(CPU=8)
        late = group.wait(100)
        return early, late, list(placement_group_table(group)["bundles_to_node_id"].values()) == [cluster.nodes[1].id]

    assert outcomes(main) == {"(False, True, True)"}


def test_a_lost_node_is_noticed_late_and_its_group_moves():
    def main(cluster: Cluster) -> object:
        group = placement_group([{"CPU": 2}], bundle_label_selector=[{"ray.io/node-id": f"!in({cluster.head.id})"}])
        assert group.wait(100)
        there, other = cluster.nodes[1:]
        if placement_group_table(group)["bundles_to_node_id"][0] == other.id:
            there, other = other, there
        probe = PROBE.options(**in_bundle(group, 0)).remote()
        get(probe.pid.remote())
        running = probe.run.remote()
        there.crash()
        crashed_s = now_s()
        done, _ = wait([running], timeout=UNNOTICED_S[0] - 0.5)
        assert not done
        assert all(node["Alive"] for node in api.nodes())
        error = error_of(running)
        assert now_s() - crashed_s < UNNOTICED_S[1] + 5
        assert "The actor died because its node has died" in str(error)
        assert group.wait(200)
        where = placement_group_table(group)["bundles_to_node_id"][0]
        gone = PROBE.options(scheduling_strategy=api.NodeAffinitySchedulingStrategy(there.id)).remote()
        assert isinstance(error_of(gone.look.remote()), ActorUnschedulableError)
        return where == other.id

    assert outcomes(main, nodes=3) == {"True"}


def test_a_drained_node_says_so_before_it_ends():
    def main(cluster: Cluster) -> object:
        there = cluster.nodes[1]
        on_it = api.NodeAffinitySchedulingStrategy(there.id)
        probe = PROBE.options(scheduling_strategy=on_it).remote()
        get(probe.pid.remote())
        running = probe.run.remote()
        there.drain(30.0)
        sleep(10)
        said = list(api.State.get_draining_nodes()) == [there.id]
        error = error_of(running)
        assert isinstance(error, ActorDiedError)
        return said, error.preempted, api.nodes()[1]["Alive"]

    assert outcomes(main, nodes=2) == {"(True, True, False)"}


def test_the_end_of_a_raylet_is_the_end_of_its_node():
    def main(cluster: Cluster) -> object:
        there = cluster.nodes[1]
        probe = PROBE.options(scheduling_strategy=api.NodeAffinitySchedulingStrategy(there.id)).remote()
        process, running = process_of(cluster, get(probe.pid.remote())), probe.run.remote()
        cluster.world.kill(there.raylet)
        lost_s = now_s()
        error = error_of(running)
        is_late = now_s() - lost_s >= UNNOTICED_S[0]
        sleep(200)
        return type(error).__name__, is_late, process.has_ended

    # most processes end before Ray takes the node for dead
    assert outcomes(main, nodes=2) >= {"('ActorUnavailableError', False, True)", "('ActorDiedError', True, True)"}


def test_requests_wait_for_the_control_store_and_calls_dont():
    def main(cluster: Cluster) -> object:
        probe = PROBE.remote()
        get(probe.pid.remote())
        cluster.gcs.restart(20.0)
        begun_s = now_s()
        get(probe.look.remote(), timeout=10)
        PROBE.options(name="late").remote()
        return now_s() - begun_s >= 20.0

    assert outcomes(main) == {"True"}


def test_ray_ends_programs_whose_control_store_is_away_for_too_long():
    def main(cluster: Cluster) -> object:
        def program() -> None:
            api.init()
            sleep(1000)

        process = cluster.drive("program", program)
        sleep(1)
        api.shutdown()
        sleep(30)
        cluster.gcs.stall(61.0)
        sleep(100)
        return process.has_ended, process.exit_code

    assert outcomes(main, seeds=range(3)) == {"(True, 1)"}


# ---- faults at a message's boundaries


@pytest.mark.parametrize(
    ("boundary", "executed"),
    [
        (Boundary.BEFORE, {False}),
        (Boundary.SENT, {True, False}),
        (Boundary.RECEIVED, {False}),
        (Boundary.ANSWERED, {True}),
        (Boundary.HEARD, {True}),
    ],
)
def test_a_fault_can_strike_at_each_boundary(boundary: Boundary, executed: set[bool]):
    """The process whose turn it is ends: the caller, or the actor."""
    of_caller = boundary in (Boundary.BEFORE, Boundary.SENT, Boundary.HEARD)

    def main(cluster: Cluster) -> tuple[bool, str]:
        probe = PROBE.options(name="probe").remote()
        get(probe.pid.remote())
        namespace, got = api.here().job.namespace, ["nothing"]

        def strike(at: Boundary, message: Any) -> None:
            if at is boundary and message.what == "add":
                cluster.world.kill(message.sender if of_caller else message.receiver)

        def program() -> None:
            api.init(namespace=namespace)
            try:
                got[0] = type(get(api.get_actor("probe").add.remote(1))).__name__
            except RayActorError:
                got[0] = "an error"

        cluster.on_boundary = strike
        process = cluster.drive("caller", program)
        while not process.has_ended:
            sleep(1)
        sleep(5)
        return "added" in cluster.world.systems, got[0]

    found = {on(seed, main) for seed in SEEDS}
    assert {was_executed for was_executed, _ in found} <= executed
    told = {answer for _, answer in found}
    assert told == {"nothing"} if of_caller else "nothing" not in told and "an error" in told


# ---- the same story


def stories() -> list[str]:
    """The digests of some programs' stories."""
    found: list[str] = []
    for main in (calls_in_order, streams, kills, dies, breaks_a_stream):
        for seed in range(5):
            world = World(seed)
            cluster = Cluster(world)
            cluster.add_node(CPU=4)

            def driver(main: Callable[[Cluster], Any] = main, cluster: Cluster = cluster) -> None:
                api.init()
                main(cluster)

            world.run(driver)
            found.append(world.digest)
    return found


def test_a_seed_has_one_story_in_all_processes():
    tests = Path(__file__).parents[1]
    program = "from simulation.test_simulated_ray import stories; print('\\n'.join(stories()))"
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(told) == 1
    assert len(set(told.pop().split())) == 25
