"""Ray's functions with types. What needs a cluster is tested with the actors that use it."""

from __future__ import annotations

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, OutOfMemoryError, RayTaskError, UnserializableException

from raycore.ray_api import actor_class, cause_of, endpoint, find_actor, has_ended


class Counter:
    def __init__(self) -> None:
        self.total = 0

    @endpoint("io")
    def add(self, amount: int) -> int:
        self.total += amount
        return self.total

    @endpoint()
    def read(self) -> int:
        return self.total


def test_an_endpoint_is_a_plain_method_in_its_own_process():
    counter = Counter()
    assert counter.add(2) == 2
    assert counter.read() == 2


@pytest.mark.parametrize(("options", "max_restarts"), [({}, 0), ({"max_restarts": -1}, -1)])
def test_ray_shows_an_actors_own_name_and_restarts_it_only_if_told_to(options, max_restarts):
    started = actor_class(Counter, num_cpus=0, concurrency_groups={"io": 1}, **options)
    metadata = started.__ray_metadata__
    assert metadata.class_name == "Counter"
    assert metadata.method_meta.concurrency_group_for_methods == {"add": "io"}
    assert started._default_options["max_restarts"] == max_restarts


def test_an_actor_whose_job_has_ended_is_not_found(monkeypatch):
    """Ray forgets the actor's class before its name, and then reads the class as None."""

    def get_actor(name: str, namespace: str) -> None:
        ray._private.utils.ensure_str(None)

    monkeypatch.setattr(ray, "get_actor", get_actor)
    with pytest.raises(ValueError, match="the job of actor 'engine-chat' has ended"):
        find_actor("engine-chat", "raycore")


def test_the_cause_of_a_failed_call_is_what_it_raised():
    raised = ValueError("7 is odd")
    assert cause_of(RayTaskError("add", "", raised)) is raised


def test_a_failed_call_without_a_cause_is_its_own_cause():
    error = RayTaskError("add", "", "it can't be pickled")
    assert cause_of(error) is error


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (ActorDiedError(), True),
        (OutOfMemoryError("no room"), True),
        (RayTaskError("add", "", ActorDiedError()).as_instanceof_cause(), True),  # an argument's actor has died
        (RayTaskError("add", "", ValueError("7 is odd")), False),
        (UnserializableException("ValueError: 7 is odd"), False),
        (GetTimeoutError("late"), False),
        (ValueError("7 is odd"), False),
    ],
)
def test_errors_tell_whether_an_actor_has_ended(error: Exception, ended: bool):
    assert has_ended(error) is ended


def test_the_cause_that_cant_be_unpickled_is_told_by_its_text():
    error = UnserializableException("ValueError: 7 is odd")
    assert cause_of(error) is error
    assert "ValueError: 7 is odd" in str(error)
