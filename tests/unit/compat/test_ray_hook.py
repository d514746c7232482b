"""Workers of a running cluster find raycore's `vllm`; those of a Ray that starts here get the environment anyway."""

from __future__ import annotations

import os

import pytest

from raycore.cluster import connection
from raycore.compat.ray_hook import HOOK, with_vllm
from raycore.compat.run import IMPORT_PATH


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connection, "address_of_last_start", lambda: None)


@pytest.mark.parametrize("address", [None, "local"])
def test_a_ray_of_its_own_is_left_alone(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert with_vllm(None) is None
    assert with_vllm({"pip": ["x"]}) == {"pip": ["x"]}


def test_workers_of_a_cluster_get_the_directory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    given = {"pip": ["x"], "env_vars": {"PYTHONPATH": "/own", "A": "1"}}
    path = os.pathsep.join([IMPORT_PATH, "/own"])
    assert with_vllm(given) == {"pip": ["x"], "env_vars": {"PYTHONPATH": path, "A": "1"}}
    assert given["env_vars"] == {"PYTHONPATH": "/own", "A": "1"}
    assert with_vllm(None) == {"env_vars": {"PYTHONPATH": os.pathsep.join([IMPORT_PATH, "${PYTHONPATH}"])}}


def test_the_cluster_that_ray_start_left_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "address_of_last_start", lambda: "127.0.0.1:6379")
    assert with_vllm({}) != {}


def test_ray_finds_the_function() -> None:
    module, _, name = HOOK.rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is with_vllm
