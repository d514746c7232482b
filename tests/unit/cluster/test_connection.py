"""Which Ray raycore joins or starts, and which it stops. Ray itself is replaced."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from raycore.cluster import connection
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


def test_a_named_cluster_that_does_not_run_is_an_error(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    fake_ray.init_error = ConnectionError("nobody answers")
    with pytest.raises(InitializationError, match=r"nobody answers\nRAY_ADDRESS=10\.0\.0\.1:6379 can't be joined"):
        connection.acquire_ray(8)


def test_ray_address_local_starts_a_local_ray_whatever_runs_already(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(connection, "address_of_last_start", lambda: "10.0.0.1:6379")
    assert connection.acquire_ray(1)
    assert fake_ray.calls[0]["address"] == "local"


def test_the_cluster_that_ray_start_left_running_is_joined(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(connection, "address_of_last_start", lambda: address)
        assert not connection.acquire_ray(8)
    assert fake_ray.calls[0]["address"] == "auto", "Ray looks for tokens only where it finds the cluster itself"


def test_a_stale_address_is_named_and_a_local_ray_started(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(connection, "address_of_last_start", lambda: address)
    with caplog.at_level(logging.WARNING, "raycore"):
        assert connection.acquire_ray(8)
    assert address in caplog.text
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
