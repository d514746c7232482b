"""Nodes that join, drain and end, and the control store: a real cluster of several nodes is a program of its own."""

from __future__ import annotations

from typing import Any

from ray_probe import start
from rays import LONG_S, Row, error_of, eventually, kind, outcome, row_in
from rows_of_groups import state_of

NODES: list[Row] = []
row = row_in(NODES)


def alive(ray: Any, node: str) -> bool | None:
    """None: there is no such node."""
    return next((each["Alive"] for each in ray.nodes() if each["NodeID"] == node), None)


def dies(ray: Any, node: str) -> None:
    eventually(lambda: alive(ray, node) is False, "the node isn't declared dead")


def on(ray: Any, node: str, **options: Any) -> Any:
    """A probe on a node, which runs."""
    probe = start(ray, scheduling_strategy=ray.on_node(node), **options)
    ray.get(probe.pid.remote())
    return probe


@row((True, 2.0, True))
def a_node_that_joins_takes_actors_and_groups(ray: Any) -> object:
    group = ray.placement_group([{"CPU": 20}])
    first = group.wait(0)
    node = ray.add_node(22)
    assert group.wait(60)
    placed = ray.placement_group_table(group)["bundles_to_node_id"][0] == node
    left = eventually(lambda: (free := ray.free_resources()[node].get("CPU")) == 2.0 and free, "the group isn't shown")
    there = ray.get(on(ray, node).own_node.remote()) == node
    ray.remove_placement_group(group)
    ray.end_node(node)
    assert not first
    return placed, left, there


@row((True, True, "held", "PENDING"))
def a_node_that_is_drained_says_so_and_goes_on(ray: Any) -> object:
    node = ray.add_node(22)
    probe = on(ray, node, num_cpus=1)
    held = probe.hold.remote()
    ray.drain(node, 300)
    deadline_ms = eventually(lambda: ray.draining_nodes().get(node), "it isn't shown as draining")
    group = ray.placement_group([{"CPU": 20}])
    ray.sleep(0.5)
    state = state_of(ray, group)
    ray.remove_placement_group(group)
    ray.get(probe.open.remote())
    found = deadline_ms > 0, alive(ray, node), ray.get(held), state
    ray.end_node(node)
    return found


@row(("ActorDiedError", True), is_slow=True)
def a_drained_nodes_actors_die_with_it(ray: Any) -> object:
    node = ray.add_node(2)
    probe = on(ray, node, num_cpus=1)
    pid, held = ray.get(probe.pid.remote()), probe.hold.remote()
    ray.drain(node, 3)
    eventually(lambda: ray.draining_nodes().get(node), "it isn't shown as draining")
    ray.silence_node(node, [pid])
    error: Any = error_of(held)
    return kind(error), error.preempted


@row((True, None))
def a_drained_node_ends_as_soon_as_nothing_runs_there(ray: Any) -> object:
    node = ray.add_node(2)
    probe = on(ray, node, num_cpus=1)
    ray.drain(node, 300)
    eventually(lambda: ray.draining_nodes().get(node), "it isn't shown as draining")
    ray.sleep(1.0)
    was_alive = alive(ray, node)
    ray.kill(probe)
    return was_alive, dies(ray, node)


@row("ActorUnschedulableError", is_slow=True)
def an_actor_cant_be_on_a_drained_node(ray: Any) -> object:
    node = ray.add_node(2)
    probe = on(ray, node, num_cpus=1)
    ray.drain(node, 300)
    eventually(lambda: ray.draining_nodes().get(node), "it isn't shown as draining")
    found = outcome(start(ray, scheduling_strategy=ray.on_node(node)).pid.remote())
    ray.kill(probe)
    ray.end_node(node)
    return found


@row((True, "ActorDiedError", True, False, "ActorUnschedulableError", "ActorDiedError", "RESCHEDULING"), is_slow=True)
def a_node_that_falls_silent_is_dead_after_a_while(ray: Any) -> object:
    node = ray.add_node(22)
    group = ray.placement_group([{"CPU": 20}])
    assert group.wait(60)
    probe = on(ray, node)
    pid, held = ray.get(probe.pid.remote()), probe.hold.remote()
    ray.get(probe.wait_for_held.remote(1))
    ray.silence_node(node, [pid])
    listed = alive(ray, node)
    error = error_of(held)
    dies(ray, node)
    late = outcome(start(ray, scheduling_strategy=ray.on_node(node)).pid.remote())
    moves = eventually(lambda: state_of(ray, group) == "RESCHEDULING" and "RESCHEDULING", "the group stays")
    found = listed, kind(error), "its node has died" in str(error), alive(ray, node), late, outcome(probe.pid.remote())
    ray.remove_placement_group(group)
    ray.end_node(node)
    return *found, moves


@row(("CREATED", True, True, "ActorDiedError"), is_slow=True)
def a_group_whose_node_is_lost_moves(ray: Any) -> object:
    node = ray.add_node(22)
    group = ray.placement_group([{"CPU": 20}])
    assert group.wait(60)
    probe = start(ray, num_cpus=1, scheduling_strategy=ray.in_bundle(group))
    pid = ray.get(probe.pid.remote())
    ray.silence_node(node, [pid])
    dies(ray, node)
    late = start(ray, num_cpus=1, scheduling_strategy=ray.in_bundle(group))
    waits = late.own_node.remote()
    assert outcome(waits, 0.5) == "GetTimeoutError"
    other = ray.add_node(22)
    state = eventually(lambda: state_of(ray, group) == "CREATED" and "CREATED", "the group isn't moved")
    moved = ray.placement_group_table(group)["bundles_to_node_id"][0] == other
    found = state, moved, ray.get(waits) == other, outcome(probe.pid.remote())
    ray.remove_placement_group(group)
    ray.end_node(node)
    ray.end_node(other)
    return found


@row(
    (True, "ActorUnavailableError", "ActorDiedError"),
    (True, "ActorDiedError", "ActorDiedError"),
    is_slow=True,
)
def the_end_of_a_raylet_is_the_end_of_its_node_later(ray: Any) -> object:
    node = ray.add_node(2)
    probe = on(ray, node)
    held = probe.hold.remote()
    ray.get(probe.wait_for_held.remote(1))
    ray.end_raylet(node)
    is_alive, found = alive(ray, node), outcome(held)
    dies(ray, node)
    later = eventually(lambda: (new := outcome(probe.pid.remote())) == "ActorDiedError" and new, "it isn't dead")
    ray.end_node(node)
    return is_alive, found, later


@row(("ObjectReconstructionFailedError", 10, 2_000_000), is_slow=True)
def a_large_result_that_hasnt_been_fetched_is_lost_with_its_node(ray: Any) -> object:
    node = ray.add_node(2)
    probe = on(ray, node)
    pid = ray.get(probe.pid.remote())
    large, small, fetched = (probe.echo.remote(bytes(size)) for size in (2_000_000, 10, 2_000_000))
    ray.wait([large, small], num_returns=2, timeout=LONG_S, fetch_local=False)
    ray.get(fetched)
    ray.silence_node(node, [pid])
    dies(ray, node)
    found = outcome(large), len(ray.get(small)), len(ray.get(fetched))
    ray.end_node(node)
    return found


@row(
    ("ActorDiedError", "ActorDiedError"),
    seldom=(("ObjectReconstructionFailedError", "ActorDiedError"),),
    is_slow=True,
)
def a_large_item_of_a_stream_is_lost_with_its_node(ray: Any) -> object:
    node = ray.add_node(2)
    probe = on(ray, node)
    pid = ray.get(probe.pid.remote())
    stream = probe.outputs.options(num_returns="streaming").remote(2, held_at=1, size=2_000_000)
    item = next(stream)
    ray.silence_node(node, [pid])
    dies(ray, node)
    found = outcome(item), outcome(next(stream))
    ray.end_node(node)
    return found


# ---- the control store


@row((1, True, True, "ActorUnavailableError", True, "ActorDiedError", True))
def while_the_control_store_stalls_calls_go_on_and_requests_wait(ray: Any) -> object:
    probe, other = start(ray), start(ray)
    pid, held = ray.get(other.pid.remote()), other.hold.remote()
    ray.get(other.wait_for_held.remote(1))
    ray.get(probe.pid.remote())
    ray.stall_gcs()
    echoed = ray.get(probe.echo.remote(1))
    answers: list[Any] = []
    thread = ray.Thread(target=lambda: answers.append(ray.nodes()))
    thread.start()
    creates = ray.Thread(target=lambda: answers.append(start(ray, name="waits")))
    creates.start()
    begun_s = ray.now_s()
    ray.end(pid)
    error = error_of(held)
    took_s = ray.now_s() - begun_s
    late = start(ray).pid.remote()
    waits = outcome(late, 0.5) == "GetTimeoutError"
    nothing = not answers
    ray.resume_gcs()
    thread.join(LONG_S)
    creates.join(LONG_S)
    ray.get(late)
    eventually(lambda: ray.state_of(other) == "DEAD", "its death isn't known")
    later = outcome(other.pid.remote())
    return echoed, nothing, waits, kind(error), 0.5 < took_s < 20, later, len(answers) == 2


@row((True, True, "CREATED", True, 1), is_slow=True, needs_state=True)
def a_control_store_that_restarts_knows_what_there_was(ray: Any) -> object:
    probe = start(ray, name="before")
    pid = ray.get(probe.pid.remote())
    group = ray.placement_group([{"CPU": 1}])
    assert group.wait(60)
    ray.restart_gcs()
    found = ray.get(ray.get_actor("before").pid.remote()) == pid
    state = state_of(ray, group)
    new = start(ray, num_cpus=1, scheduling_strategy=ray.in_bundle(group))
    placed = isinstance(ray.get(new.pid.remote(), timeout=LONG_S), int)
    ray.remove_placement_group(group)
    return found, ray.get(probe.pid.remote()) == pid, state, placed, ray.get(probe.echo.remote(1))
