"""Placement groups and resources, on one node."""

from __future__ import annotations

from typing import Any

from ray_probe import start
from rays import LONG_S, Row, error_of, eventually, kind, outcome, row_in
from rows_of_actors import has_ended
from rows_of_calls import raised

GROUPS: list[Row] = []
row = row_in(GROUPS)


def state_of(ray: Any, group: Any) -> str:
    return ray.placement_group_table(group)["state"]


def becomes(ray: Any, group: Any, state: str) -> str:
    return eventually(lambda: (now := state_of(ray, group)) == state and now, f"the group doesn't become {state}")


@row((True, "CREATED", "small", [{"CPU": 0.5}, {"CPU": 0.25}], True, "STRICT_PACK"))
def a_group_is_created_and_listed(ray: Any) -> object:
    group = ray.placement_group([{"CPU": 0.5}, {"CPU": 0.25}], strategy="STRICT_PACK", name="small")
    created = group.wait(60)
    table = ray.placement_group_table(group)
    assert ray.placement_group_table()[group.id.hex()]["state"] == "CREATED"
    nodes = list(table["bundles_to_node_id"].values())
    ray.remove_placement_group(group)
    bundles = [table["bundles"][index] for index in range(2)]
    return created, table["state"], table["name"], bundles, nodes == [ray.own_node_id()] * 2, table["strategy"]


@row((False, False, "PENDING", {0: ""}, "REMOVED"))
def a_group_without_room_waits(ray: Any) -> object:
    group = ray.placement_group([{"CPU": 1000}])
    waited = group.wait(0), group.wait(1)
    table = ray.placement_group_table(group)
    ray.remove_placement_group(group)
    return *waited, table["state"], dict(table["bundles_to_node_id"]), becomes(ray, group, "REMOVED")


@row(("PENDING", "CREATED"))
def a_group_is_created_when_another_gives_its_room_back(ray: Any) -> object:
    first = ray.placement_group([{"GPU": 4}])
    assert first.wait(60)
    second = ray.placement_group([{"GPU": 1}])
    ray.sleep(0.2)
    before = state_of(ray, second)
    ray.remove_placement_group(first)
    after = becomes(ray, second, "CREATED")
    ray.remove_placement_group(second)
    return before, after


@row((4.0, 3.0, 1.0, 0.5, None, 4.0))
def a_group_takes_its_resources_and_gives_them_back(ray: Any) -> object:
    node = ray.own_node_id()

    def shown(name: str = "GPU") -> float | None:
        return ray.free_resources()[node].get(name)

    before = eventually(lambda: shown() == 4.0 and shown(), "GPUs aren't free")
    group = ray.placement_group([{"GPU": 1}])
    assert group.wait(60)
    bundle = f"GPU_group_0_{group.id.hex()}"
    taken = eventually(lambda: shown() == 3.0 and shown(bundle) == 1.0 and shown(), "the group isn't shown")
    whole = shown(bundle)
    probe = start(ray, num_gpus=0.5, scheduling_strategy=ray.in_bundle(group))
    ray.get(probe.pid.remote())
    half = eventually(lambda: shown(bundle) == 0.5 and shown(bundle), "the actor isn't shown")
    other = start(ray, num_gpus=0.5, scheduling_strategy=ray.in_bundle(group))
    ray.get(other.pid.remote())
    eventually(lambda: shown(bundle) is None, "nothing is shown as 0")
    none = shown(bundle)
    ray.remove_placement_group(group)
    eventually(lambda: shown() == 4.0, "the GPUs aren't given back")
    return before, taken, whole, half, none, shown()


@row(
    ("ActorDiedError", True, "ActorUnschedulableError", True, True),
    seldom=(("ActorUnavailableError", False, "ActorUnschedulableError", True, True),),
)
def removing_a_group_ends_its_actors(ray: Any) -> object:
    group = ray.placement_group([{"CPU": 0.5}])
    probe = start(ray, num_cpus=0.5, scheduling_strategy=ray.in_bundle(group))
    pid, held = ray.get(probe.pid.remote()), probe.hold.remote()
    ray.get(probe.wait_for_held.remote(1))
    waits = start(ray, num_cpus=0.5, scheduling_strategy=ray.in_bundle(group))
    pending = waits.pid.remote()
    assert outcome(pending, 0.2) == "GetTimeoutError"
    ray.remove_placement_group(group)
    error, never = error_of(held), error_of(pending)
    ended = has_ended(ray, pid)
    was_removed = "its associated placement group was removed" in str(never)
    return kind(error), "its placement group was removed" in str(error), kind(never), was_removed, ended


@row(("REMOVED", None, "REMOVED"))
def a_removed_group_is_listed_and_removed_again_in_silence(ray: Any) -> object:
    group = ray.placement_group([{"CPU": 0.5}])
    assert group.wait(60)
    ray.remove_placement_group(group)
    return becomes(ray, group, "REMOVED"), ray.remove_placement_group(group), state_of(ray, group)


@row(("GetTimeoutError", "PENDING_CREATION", "ActorDiedError"))
def an_actor_for_a_group_that_was_removed_before_waits_for_ever(ray: Any) -> object:
    group = ray.placement_group([{"CPU": 0.5}])
    ray.remove_placement_group(group)
    becomes(ray, group, "REMOVED")
    probe = start(ray, num_cpus=0.5, scheduling_strategy=ray.in_bundle(group))
    pending = probe.pid.remote()
    found = outcome(pending, 1.0), ray.state_of(probe)
    ray.kill(probe)
    return *found, outcome(pending)


@row(("Exception", True, "Exception"))
def a_wait_for_a_removed_group_fails_with_no_error_of_rays(ray: Any) -> object:
    group = ray.placement_group([{"CPU": 1000}])
    fails: list[Any] = []

    def wait() -> None:
        try:
            group.wait(60)
        except Exception as error:
            fails.append(error)

    waits = ray.Thread(target=wait)
    waits.start()
    ray.sleep(0.1)
    ray.remove_placement_group(group)
    waits.join(LONG_S)
    return kind(fails[0]), f"{group.id.hex()}) does not exist" in str(fails[0]), raised(lambda: group.wait(1))


@row(("ALIVE", 1))
def an_actor_waits_for_its_group(ray: Any) -> object:
    first = ray.placement_group([{"GPU": 4}])
    assert first.wait(60)
    second = ray.placement_group([{"GPU": 1}])
    probe = start(ray, num_gpus=1, scheduling_strategy=ray.in_bundle(second))
    pid = probe.pid.remote()
    assert outcome(pid, 0.2) == "GetTimeoutError"
    ray.remove_placement_group(first)
    ray.get(pid, timeout=LONG_S)
    state = ray.state_of(probe)
    ray.remove_placement_group(second)
    return state, 1


@row(("CREATED", True))
def a_group_outlives_the_actor_that_made_it(ray: Any) -> object:
    owner = start(ray)
    group = ray.get(owner.make_group.remote("outlives"))
    assert group.wait(60)
    pid = ray.get(owner.pid.remote())
    ray.end(pid)
    eventually(lambda: ray.state_of(owner) == "DEAD", "it isn't dead")
    ray.sleep(0.5)
    state = state_of(ray, group)
    ray.remove_placement_group(group)
    return state, group == group


@row(({}, "ValueError"))
def of_a_group_that_there_never_was_nothing_is_known(ray: Any) -> object:
    group = ray.placement_group([{"CPU": 0.5}])
    unknown = ray.group_of_id(bytes(18))
    table = ray.placement_group_table(unknown)
    ray.remove_placement_group(group)
    return table, raised(lambda: ray.placement_group([{"CPU": 0.5}], strategy="NEAR"))
