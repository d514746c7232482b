"""How a local Ray starts and ends. Ray itself is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import worker

from raycore.cluster.local_ray.replacements import CLUSTER_PROCESSES, SHIELD, TOKEN
from raycore.cluster.local_ray.start import PLAIN_VARIABLE, end_local_ray, start_local_ray
from raycore.node.resources import usable_cores

REPLACED = CLUSTER_PROCESSES | SHIELD | TOKEN


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("raycore.cluster.local_ray.room._LONGEST_PATH", 1000)


class Start:
    """What a start hands to Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_cpus: int) -> None:
        self.options: dict[str, Any] = {}
        self.changed_functions: set[str] = set()
        self.changed_environment: dict[str, str] = {}
        functions, environment = {name: resolve_name(name) for name in REPLACED}, dict(os.environ)

        def init(**options: Any) -> None:
            self.options = options
            self.changed_functions = {name for name in REPLACED if resolve_name(name) is not functions[name]}
            self.changed_environment = dict(os.environ.items() - environment.items())

        monkeypatch.setattr(ray, "init", init)
        start_local_ray(num_cpus, log_to_driver=False)
        assert {name: resolve_name(name) for name in REPLACED} == functions
        assert dict(os.environ) == environment


@pytest.mark.parametrize("value", [None, "", "0"])
def test_functions_of_ray_are_replaced_while_it_starts(monkeypatch, value):
    monkeypatch.delenv(PLAIN_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(PLAIN_VARIABLE, value)
    start = Start(monkeypatch, 1000)
    assert start.changed_functions == set(REPLACED)
    assert start.changed_environment
    assert start.options["num_cpus"] > 1000


def test_a_plain_local_ray_gets_what_ray_init_would_give_it(monkeypatch):
    monkeypatch.setenv(PLAIN_VARIABLE, "1")
    start = Start(monkeypatch, 1)
    assert start.changed_functions == set(TOKEN)
    assert start.changed_environment == {}
    assert start.options == {"address": "local", "num_cpus": None, "log_to_driver": False}


def test_a_plain_local_ray_has_the_cpus_that_the_ranks_need(monkeypatch):
    monkeypatch.setenv(PLAIN_VARIABLE, "1")
    num_cpus = usable_cores() + 1
    assert Start(monkeypatch, num_cpus).options["num_cpus"] == num_cpus


def test_a_ray_with_wait_for_processes_is_shut_down_with_it(monkeypatch):
    told = []
    monkeypatch.setattr(ray, "shutdown", lambda *, wait_for_processes=False: told.append(wait_for_processes))
    end_local_ray()
    assert told == [True]


def test_end_local_ray_waits_for_rays_processes_even_if_ray_does_not(monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    node = SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=process)]})

    def shutdown() -> None:  # as in Ray 2.55
        process.kill()
        node.all_processes.clear()

    monkeypatch.setattr(worker, "_global_node", node)
    monkeypatch.setattr(ray, "shutdown", shutdown)
    with process:
        end_local_ray()
        assert process.returncode is not None, "nobody has waited for its end"


def test_end_local_ray_takes_a_ray_that_has_ended_already(monkeypatch):
    told = []
    monkeypatch.setattr(worker, "_global_node", None)
    monkeypatch.setattr(ray, "shutdown", lambda: told.append(True))
    end_local_ray()
    assert told == [True]
