"""The end of this process's Ray node is noticed by the end of its raylet, and nothing else is taken for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from waiting import LONG_S

from raycore.cluster.own_node import OwnNode

RAYLET = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(int(sys.argv[2]))
print("listens", flush=True)
taken = [listener.accept() for _ in range(int(sys.argv[3]))]
sys.stdin.read()
"""
"""Takes some connections, and reads nothing from them."""


class FakeRaylet:
    def __init__(self, path: Path, backlog: int = 8, num_taken: int = 1) -> None:
        self.path = str(path)
        command = [sys.executable, "-S", "-c", RAYLET, self.path, str(backlog), str(num_taken)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"listens\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[FakeRaylet]:
    with closing(FakeRaylet(tmp_path / "raylet")) as raylet:
        yield raylet


def test_the_end_of_the_raylet_is_noticed(raylet):
    with closing(OwnNode(raylet.path)) as node:
        assert not node.wait(0.01)
        raylet.kill()
        assert node.wait(LONG_S)


def test_a_raylet_that_has_ended_before_is_noticed(raylet, tmp_path):
    raylet.kill()
    with closing(OwnNode(raylet.path)) as node:
        assert node.wait(LONG_S), "nobody listens"
    with closing(OwnNode(str(tmp_path / "removed"))) as node:
        assert node.wait(LONG_S)


def test_a_stopped_raylet_has_not_ended(raylet):
    with closing(OwnNode(raylet.path)) as node:
        assert not node.wait(0.01)
        os.kill(raylet.process.pid, signal.SIGSTOP)
        assert not node.wait(0.3)


def test_a_raylet_that_takes_no_connections_for_a_while_has_not_ended(tmp_path):
    with closing(FakeRaylet(tmp_path / "busy", backlog=0, num_taken=0)) as raylet, closing(OwnNode(raylet.path)) as a:
        assert not a.wait(0.01)  # fills the queue of connections
        with closing(OwnNode(raylet.path)) as b:
            assert not b.wait(0.1)
            raylet.kill()
            assert b.wait(LONG_S)
