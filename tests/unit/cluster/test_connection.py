"""Which Ray raycore joins or starts, and which it stops. Ray itself is replaced."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import AuthenticationError

from raycore.cluster import connection
from raycore.cluster.joining import Obstacle
from raycore.errors import InitializationError


class FakeRay:
    """Records what `ray.init` and `ray.shutdown` are asked for."""

    def __init__(self) -> None:
        self.connected = False
        self.calls: list[dict[str, Any]] = []
        self.environment: dict[str, str] = {}
        self.num_shutdowns = 0
        self.init_error: Exception | None = None

    def init(self, **options: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        self.calls.append(options)
        self.environment = dict(os.environ)
        if self.init_error is not None:
            raise self.init_error
        self.connected = True

    def shutdown(self, wait_for_processes: bool = False) -> None:
        self.connected = False
        self.num_shutdowns += 1


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay()
    monkeypatch.setattr(ray, "init", fake.init)
    monkeypatch.setattr(ray, "shutdown", fake.shutdown)
    monkeypatch.setattr(ray, "is_initialized", lambda: fake.connected)
    monkeypatch.setattr(connection, "_num_users", 0)
    monkeypatch.setattr(connection, "_is_ours", False)
    monkeypatch.setattr(connection, "address_of_last_start", lambda: None)
    monkeypatch.setattr(connection, "find_obstacle", lambda address: None)
    monkeypatch.setattr(connection, "use_token_of_machine", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_worker_niceness", raising=False)  # set by the tests that start a cluster
    handler = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, handler)


def test_without_a_cluster_a_local_ray_declares_the_cpus_that_are_needed(fake_ray: FakeRay):
    assert connection.acquire_ray(1000.5)
    (options,) = fake_ray.calls
    assert options["address"] == "local"
    assert options["num_cpus"] >= 1001
    assert options["include_dashboard"] is False


def test_a_local_ray_runs_its_workers_at_normal_priority(fake_ray: FakeRay):
    connection.acquire_ray(1)
    assert fake_ray.environment["RAY_worker_niceness"] == "0"
    assert "RAY_worker_niceness" not in os.environ


def test_variables_of_ray_that_the_user_has_set_are_kept(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_worker_niceness", "5")
    connection.acquire_ray(1)
    assert fake_ray.environment["RAY_worker_niceness"] == "5"


def test_a_named_cluster_is_joined_and_never_stopped(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not connection.acquire_ray(8)
    (options,) = fake_ray.calls
    assert options["address"] == "10.0.0.1:6379"
    assert "num_cpus" not in options
    connection.release_ray()
    assert fake_ray.num_shutdowns == 0


def test_a_named_cluster_that_cannot_be_joined_is_an_error_before_ray_tries(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(connection, "find_obstacle", lambda address: Obstacle(f"nothing at {address}", is_gone=True))
    with pytest.raises(InitializationError) as raised:
        connection.acquire_ray(8)
    assert str(raised.value) == (
        "RAY_ADDRESS=10.0.0.1:6379 can't be joined: nothing at 10.0.0.1:6379. Check that the cluster runs, or set "
        "RAY_ADDRESS=local to run on this machine alone"
    )
    assert fake_ray.calls == []


@pytest.mark.parametrize(
    ("address", "prefix"),
    [("10.0.0.1:6379", "RAY_ADDRESS=10.0.0.1:6379 can't be joined"), ("local", "a local Ray can't start")],
)
@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, OSError, Exception])
def test_any_error_of_ray_becomes_one_line(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, address: str, prefix: str, kind: type[Exception]
):
    monkeypatch.setenv("RAY_ADDRESS", address)
    fake_ray.init_error = kind("no\n  way.")
    with pytest.raises(InitializationError, match=f"^{prefix}: no way") as raised:
        connection.acquire_ray(8)
    assert "\n" not in str(raised.value)


def test_a_local_ray_without_the_token_that_is_named(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/gone")
    fake_ray.init_error = AuthenticationError("a page of Ray's")
    with pytest.raises(InitializationError, match=r"^a local Ray can't start: .* RAY_AUTH_TOKEN_PATH=/gone$"):
        connection.acquire_ray(8)


def test_ray_address_local_starts_a_local_ray_whatever_runs_already(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(connection, "address_of_last_start", lambda: "10.0.0.1:6379")
    assert connection.acquire_ray(1)
    assert fake_ray.calls[0]["address"] == "local"


@pytest.mark.parametrize("obstacle", [None, Obstacle("it hangs")])
def test_the_cluster_that_ray_start_left_running_is_joined_or_an_error(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, obstacle: Obstacle | None
):
    monkeypatch.setattr(connection, "address_of_last_start", lambda: "10.0.0.1:6379")
    monkeypatch.setattr(connection, "find_obstacle", lambda address: obstacle)
    if obstacle is not None:
        with pytest.raises(
            InitializationError, match=r"`ray start` left at 10\.0\.0\.1:6379 can't be joined: it hangs"
        ):
            connection.acquire_ray(8)
        return
    assert not connection.acquire_ray(8)
    assert fake_ray.calls[0]["address"] == "auto", "Ray looks for tokens only where it finds the cluster itself"


def test_a_stale_address_is_named_and_a_local_ray_started(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(connection, "address_of_last_start", lambda: "10.0.0.1:6379")
    monkeypatch.setattr(connection, "find_obstacle", lambda address: Obstacle("nothing there", is_gone=True))
    with caplog.at_level(logging.WARNING, "raycore"):
        assert connection.acquire_ray(8)
    assert "10.0.0.1:6379" in caplog.text
    assert fake_ray.calls[0]["address"] == "local"


@pytest.mark.parametrize("address", ["head", "head:65536", "head:x"])
def test_an_address_without_a_usable_port_is_refused(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, address: str):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InitializationError, match=f"^RAY_ADDRESS='{address}' isn't HOST:PORT with a port from 1 to"):
        connection.acquire_ray(1)
    assert fake_ray.calls == []


def test_a_ray_client_address_is_refused_naming_ray_job_submit(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(InitializationError, match=r"RAY_ADDRESS=ray://head:10001.*ray job submit"):
        connection.acquire_ray(1)
    assert fake_ray.calls == []


def test_a_ray_that_the_caller_initialized_is_used_and_not_stopped(fake_ray: FakeRay):
    fake_ray.connected = True
    assert not connection.acquire_ray(8)
    connection.release_ray()
    assert fake_ray.calls == []
    assert fake_ray.connected


def test_a_local_ray_is_stopped_by_its_last_user(fake_ray: FakeRay):
    assert connection.acquire_ray(1)
    assert connection.acquire_ray(1)
    connection.release_ray()
    assert fake_ray.connected
    connection.release_ray()
    assert not fake_ray.connected
    assert fake_ray.num_shutdowns == 1


def test_a_local_ray_that_the_caller_stopped_is_started_again(fake_ray: FakeRay):
    connection.acquire_ray(1)
    fake_ray.shutdown()
    assert connection.acquire_ray(1)
    assert len(fake_ray.calls) == 2


def test_the_callers_sigterm_handler_is_kept_when_ray_starts(fake_ray: FakeRay):
    def handler(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, handler)
    connection.acquire_ray(1)
    assert signal.getsignal(signal.SIGTERM) is handler
