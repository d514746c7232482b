"""Actors: how they begin and end, what their callers get, names, owners and handles."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayActorError, RayError
from ray_probe import start
from rays import LONG_S, Row, error_of, eventually, kind, outcome, row_in
from rows_of_calls import raised

ACTORS: list[Row] = []
row = row_in(ACTORS)


def is_dead(ray: Any, actor: Any) -> None:
    eventually(lambda: ray.state_of(actor) == "DEAD", "Ray doesn't see that it has died")


def has_ended(ray: Any, pid: int) -> bool:
    return eventually(lambda: not ray.is_running(pid), "its process runs")


def last_line(error: BaseException) -> str:
    return str(error).splitlines()[-1]


# ---- creation


@row((["first", "queued"], "ALIVE"))
def calls_wait_until_an_actor_is_created(ray: Any) -> object:
    probe = start(ray, "first", "is slow")
    queued = probe.add.remote("queued")
    return ray.get(queued), ray.state_of(probe)


@row(("GetTimeoutError", "PENDING_CREATION", "ActorDiedError", True))
def an_actor_without_room_waits_and_can_be_killed(ray: Any) -> object:
    probe = start(ray, num_cpus=1000)
    pending = probe.pid.remote()
    first, state = outcome(pending, 0.2), ray.state_of(probe)
    ray.kill(probe)
    error = error_of(pending)
    return first, state, kind(error), "The actor never ran" in str(error)


@row(("ActorDiedError", True, True, "ValueError: no room for weights", "ActorDiedError"))
def an_actor_whose_constructor_raises_is_dead(ray: Any) -> object:
    probe = start(ray, None, "raises")
    error: Any = error_of(probe.pid.remote())
    begins = str(error).startswith("The actor died because of an error raised in its creation task, ")
    return kind(error), error.actor_init_failed, begins, last_line(error), outcome(probe.pid.remote())


@row(("GetTimeoutError", "ActorDiedError", True, "DEAD"))
def an_actor_whose_constructor_raises_goes_on_as_long_as_a_call_that_it_has_made(ray: Any) -> object:
    probe = start(ray, None, "raises in a call")
    pending = probe.pid.remote()
    eventually(lambda: ray.state_of(probe) == "ALIVE", "Ray doesn't take it for alive")
    first = outcome(pending, 6.0)
    ray.get(ray.get_actor("its child").open.remote())
    error: Any = error_of(pending)
    return first, kind(error), error.actor_init_failed, ray.state_of(probe)


@row(("ActorDiedError", False, True, True))
def an_actor_whose_process_ends_in_its_constructor_is_dead(ray: Any) -> object:
    error: Any = error_of(start(ray, None, "exits").pid.remote())
    killed: Any = error_of(start(ray, None, "is killed").pid.remote())
    text = "The actor is dead because its worker process has died. Worker exit type: "
    assert kind(killed) == kind(error)
    return kind(error), error.actor_init_failed, text in str(error) and text in str(killed), "\tpid: " in str(error)


@row("ActorUnschedulableError")
def an_actor_for_a_node_that_there_isnt_cant_be_scheduled(ray: Any) -> object:
    nowhere = ray.own_node_id()[::-1]
    return outcome(start(ray, scheduling_strategy=ray.on_node(nowhere)).pid.remote())


@row(True)
def an_actor_that_would_like_a_node_that_there_isnt_goes_elsewhere(ray: Any) -> object:
    nowhere = ray.own_node_id()[::-1]
    probe = start(ray, scheduling_strategy=ray.on_node(nowhere, soft=True))
    return ray.get(probe.own_node.remote()) == ray.own_node_id()


# ---- the end of a process


@row(
    ("ActorDiedError", True, True, "ActorDiedError"), seldom=(("ActorUnavailableError", True, True, "ActorDiedError"),)
)
def a_call_in_whose_middle_the_process_is_killed_fails_with_its_pid(ray: Any) -> object:
    probe = start(ray)
    pid = ray.get(probe.pid.remote())
    held = probe.hold.remote()
    ray.get(probe.wait_for_held.remote(1))
    ray.end(pid)
    error = error_of(held)
    is_dead(ray, probe)
    later = error_of(probe.pid.remote())
    text = "The actor is dead because its worker process has died. Worker exit type: "
    return kind(error), f"\tpid: {pid}\n" in str(later), text in str(later), kind(later)


@row(("ActorDiedError", "ActorDiedError"), seldom=(("ActorUnavailableError", "ActorDiedError"),))
def a_call_that_ends_its_process_after_its_work_fails(ray: Any) -> object:
    probe = start(ray)
    exits = outcome(probe.exit.remote("worked"))
    is_dead(ray, probe)
    return exits, outcome(probe.look.remote())


@row(("done", "ActorDiedError"))
def a_result_outlives_the_process_that_made_it(ray: Any) -> object:
    probe = start(ray)
    pid, done = ray.get(probe.pid.remote()), probe.echo.remote("done")
    ray.wait([done], timeout=LONG_S)
    ray.end(pid)
    is_dead(ray, probe)
    return ray.get(done), outcome(probe.pid.remote())


@row((100_000, 2_000_000))
def a_large_result_outlives_the_process_that_made_it_too(ray: Any) -> object:
    probe = start(ray)
    pid = ray.get(probe.pid.remote())
    done = [probe.echo.remote(bytes(100_000)), probe.echo.remote(bytes(2_000_000))]
    ray.wait(done, num_returns=2, timeout=LONG_S)
    ray.end(pid)
    is_dead(ray, probe)
    return tuple(len(ray.get(ref)) for ref in done)


@row(("ActorDiedError", "ActorDiedError", True, "ValueError"))
def a_killed_actor_is_dead_and_its_name_is_free(ray: Any) -> object:
    probe = start(ray, name="killed")
    pid, held = ray.get(probe.pid.remote()), probe.hold.remote()
    ray.kill(probe)
    error = error_of(held)
    assert "killed by `ray.kill`" in str(error), str(error)
    later = outcome(probe.pid.remote())
    ended = has_ended(ray, pid)
    ray.kill(probe)
    eventually(lambda: raised(lambda: ray.get_actor("killed")) == "ValueError", "it has its name")
    again = start(ray, name="killed")
    ray.get(again.pid.remote())
    ray.kill(again)
    eventually(lambda: raised(lambda: ray.get_actor("killed")) != "nothing", "it has its name")
    return kind(error), later, ended, raised(lambda: ray.get_actor("killed"))


@row(("ActorDiedError", True, True))
def a_stopped_process_of_a_killed_actor_lives_until_it_goes_on(ray: Any) -> object:
    probe = start(ray)
    pid = ray.get(probe.pid.remote())
    ray.stop(pid)
    ray.kill(probe)
    later = outcome(probe.pid.remote())
    ray.sleep(0.5)
    was_running = ray.is_running(pid)
    ray.go_on(pid)
    return later, was_running, has_ended(ray, pid)


@row(("ActorUnavailableError", True, ["first", "after"]))
def a_restarted_actor_begins_anew(ray: Any) -> object:
    probe = start(ray, "first", max_restarts=-1)
    pid = ray.get(probe.pid.remote())
    held = probe.hold.remote()
    ray.get(probe.wait_for_held.remote(1))
    ray.end(pid)
    lost, again = outcome(held), restarted(probe, pid)
    seen = ray.get(probe.add.remote("after"))
    ray.kill(probe)
    return lost, again != pid, seen


def restarted(probe: Any, pid: int) -> int:
    """The new process of an actor that is restarted."""
    return eventually(lambda: isinstance(new := outcome(probe.pid.remote()), int) and new != pid and new, "no restart")


@row("ActorUnavailableError", seldom=("it has waited",))
def a_call_fails_while_its_actor_is_restarted_or_waits_if_that_is_news(ray: Any) -> object:
    probe = start(ray, None, "is slow", max_restarts=-1)
    pid = ray.get(probe.pid.remote())
    ray.end(pid)

    def look() -> Any:
        try:
            return "it has waited" if ray.get(probe.pid.remote()) != pid else None
        except RayActorError as error:
            return kind(error) if "The actor is restarting" in str(error) else None

    found = eventually(look, "no call fails, and none waits")
    ray.kill(probe)
    return found


@row(("RayActorError", True, "ActorDiedError"), seldom=(("RayActorError", True, "ActorUnavailableError"),))
def a_kill_with_restart_restarts_and_one_without_doesnt(ray: Any) -> object:
    probe = start(ray, max_restarts=-1)
    pid, held = ray.get(probe.pid.remote()), probe.hold.remote()
    ray.get(probe.wait_for_held.remote(1))
    ray.kill(probe, no_restart=False)
    lost = isinstance(error_of(held), RayActorError) and "RayActorError"
    again = restarted(probe, pid) != pid
    held = probe.hold.remote()
    ray.kill(probe)
    return lost, again, outcome(held)


@row((True, "ActorDiedError"))
def an_actor_is_restarted_as_often_as_it_may_be(ray: Any) -> object:
    probe = start(ray, max_restarts=1)
    pid = ray.get(probe.pid.remote())
    ray.end(pid)
    again = restarted(probe, pid)
    ray.end(again)
    is_dead(ray, probe)
    return again != pid, outcome(probe.pid.remote())


# ---- names and handles


@row(("ActorAlreadyExistsError", True, True, True, "ValueError"))
def a_name_is_taken_once_in_a_namespace(ray: Any) -> object:
    first = start(ray, name="once")
    try:
        start(ray, name="once")
    except ValueError as error:
        second, is_rays = kind(error), isinstance(error, RayError)
    other = start(ray, name="once", namespace="elsewhere")
    found = ray.get_actor("once") == first, ray.get_actor("once", "elsewhere") == other
    ray.kill(first)
    ray.kill(other)
    return second, is_rays, *found, raised(lambda: ray.get_actor("never"))


@row(True)
def a_named_actor_can_be_got_if_it_exists(ray: Any) -> object:
    first = start(ray, name="shared", get_if_exists=True)
    second = start(ray, name="shared", get_if_exists=True)
    same = ray.get(first.pid.remote()) == ray.get(second.pid.remote())
    ray.kill(first)
    return same


@row((True, False))
def the_names_of_a_namespace_are_listed_while_their_actors_live(ray: Any) -> object:
    probe = start(ray, name="listed")
    ray.get(probe.pid.remote())
    before = "listed" in ray.list_named_actors()
    ray.kill(probe)
    eventually(lambda: "listed" not in ray.list_named_actors(), "it is listed")
    return before, "listed" in ray.list_named_actors()


@row(("last", True))
def an_actor_without_handles_ends_after_its_calls(ray: Any) -> object:
    probe = start(ray)
    pid = ray.get(probe.pid.remote())
    last = probe.echo.remote("last")
    del probe
    return ray.get(last), has_ended(ray, pid)


@row(True)
def a_handle_of_a_named_actor_that_was_looked_up_doesnt_keep_it(ray: Any) -> object:
    probe = start(ray, name="weak")
    pid = ray.get(probe.pid.remote())
    weak = ray.get_actor("weak")
    del probe
    ended = has_ended(ray, pid)
    assert weak is not None
    return ended


@row((True, True))
def a_handle_in_another_process_keeps_an_actor(ray: Any) -> object:
    keeper, probe = start(ray), start(ray)
    pid = ray.get(probe.pid.remote())
    ray.get(keeper.keep.remote([probe]))
    del probe
    ray.sleep(0.5)
    kept = ray.get(keeper.call_kept.remote()) == pid
    ray.get(keeper.forget.remote())
    return kept, has_ended(ray, pid)


# ---- owners


@row(("ActorDiedError", True, True))
def the_actors_of_a_process_end_with_it(ray: Any) -> object:
    owner = start(ray)
    child = ray.get(owner.start_child.remote())
    child_pid, held = ray.get(child.pid.remote()), child.hold.remote()
    ray.end(ray.get(owner.pid.remote()))
    error = error_of(held)
    is_dead(ray, child)
    later = str(error_of(child.pid.remote()))
    return kind(error), "The actor is dead because its owner has died. Owner Id: " in later, has_ended(ray, child_pid)


@row(("ActorDiedError", True))
def the_actors_of_a_killed_actor_end_with_it(ray: Any) -> object:
    owner = start(ray)
    child = ray.get(owner.start_child.remote())
    child_pid = ray.get(child.pid.remote())
    ray.kill(owner)
    ended = has_ended(ray, child_pid)
    return outcome(child.pid.remote()), ended


@row((True, "ALIVE"))
def a_detached_actor_outlives_the_process_that_started_it(ray: Any) -> object:
    owner = start(ray)
    child = ray.get(owner.start_child.remote("detached", "detached"))
    pid = ray.get(child.pid.remote())
    ray.end(ray.get(owner.pid.remote()))
    is_dead(ray, owner)
    ray.sleep(0.5)
    same = ray.get(ray.get_actor("detached").pid.remote()) == pid
    state = ray.state_of(child)
    ray.kill(child)
    return same, state


@row("OwnerDiedError")
def a_result_whose_owner_dies_before_it_is_there_is_lost(ray: Any) -> object:
    owner, reader = start(ray), start(ray)
    child = ray.get(owner.start_child.remote(None, "detached"))
    refs = ray.get(owner.call_of_child.remote())
    read = reader.get_first.remote(refs)
    ray.get(child.wait_for_held.remote(1))
    ray.end(ray.get(owner.pid.remote()))
    found = ray.get(read)
    ray.kill(child)
    return found


@row(("held", "held"))
def a_result_that_has_come_outlives_its_owner(ray: Any) -> object:
    owner, reader = start(ray), start(ray)
    child = ray.get(owner.start_child.remote(None, "detached"))
    refs = ray.get(owner.call_of_child.remote())
    ray.get(child.wait_for_held.remote(1))
    ray.get(child.open.remote())
    ray.sleep(0.2)
    ray.end(ray.get(owner.pid.remote()))
    is_dead(ray, owner)
    found = outcome(refs[0]), ray.get(reader.get_first.remote(refs))
    ray.kill(child)
    return found


# ---- what no real Ray can be made to show


@row(
    "OutOfMemoryError",
    seldom=("ActorUnavailableError",),
    source=("_private/serialization.py", "return OutOfMemoryError(error_info.error_message)"),
)
def a_process_that_is_killed_for_its_memory_fails_with_no_actor_error(ray: Any) -> object:
    probe = start(ray)
    pid, held = ray.get(probe.pid.remote()), probe.hold.remote()
    ray.get(probe.wait_for_held.remote(1))
    ray.kill_for_memory(pid)
    return outcome(held)


@row(
    "TaskCancelledError",
    seldom=("ActorDiedError", "ActorUnavailableError"),
    source=("_raylet.so", "is canceled from an actor"),
)
def a_call_that_waits_in_a_process_that_leaves_is_cancelled(ray: Any) -> object:
    probe = start(ray)
    ray.get(probe.pid.remote())
    held, queued = probe.hold.remote(), probe.echo.remote()
    ray.get(probe.wait_for_held.remote(1))
    ray.leave(probe)
    released = probe.open.remote()
    found = outcome(queued)
    del held, released
    return found
