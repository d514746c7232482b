"""The end of a local Ray. Ray itself is replaced."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import ray
from ray._private import worker

from raycore.cluster.lean_ray import end_lean_ray


def test_a_ray_that_can_wait_for_its_processes_is_told_to(monkeypatch):
    told = []
    monkeypatch.setattr(ray, "shutdown", lambda *, wait_for_processes=False: told.append(wait_for_processes))
    end_lean_ray()
    assert told == [True]


def test_processes_have_ended_even_if_ray_does_not_wait_for_them(monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    node = SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=process)]})

    def shutdown() -> None:  # as in Ray 2.55
        process.kill()
        node.all_processes.clear()

    monkeypatch.setattr(worker, "_global_node", node)
    monkeypatch.setattr(ray, "shutdown", shutdown)
    with process:
        end_lean_ray()
        assert process.returncode is not None, "nobody has waited for its end"


def test_a_ray_that_has_ended_already_may_be_ended(monkeypatch):
    told = []
    monkeypatch.setattr(worker, "_global_node", None)
    monkeypatch.setattr(ray, "shutdown", lambda: told.append(True))
    end_lean_ray()
    assert told == [True]
