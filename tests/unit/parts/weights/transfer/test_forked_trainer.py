"""A trainer that forks, as data loaders do: its child's end touches nothing of the trainer's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from forks import in_child

from raycore.parts.weights.transfer.trainer import SharedBuckets, SharedWeights

WEIGHTS = [("a", torch.ones(3))]


def segments_of(sent: list[dict[str, Any]]) -> list[Path]:
    return [Path("/dev/shm", segment["name"]) for info in sent for segment in info["segments"]]


def test_a_child_removes_no_segment() -> None:
    sent: list[dict[str, Any]] = []
    with SharedBuckets(64) as buckets, SharedWeights(WEIGHTS) as weights:
        buckets.send(sent.append, WEIGHTS)
        weights.send(sent.append)
        in_child(lambda: (buckets.__exit__(), weights.__exit__()))
        assert [path.exists() for path in segments_of(sent)] == [True, True]
    assert [path.exists() for path in segments_of(sent)] == [False, False]


def test_a_child_of_a_member_of_a_group_ends_with_its_own_status() -> None:
    script = """
import os, sys, threading
import torch
from raycore.errors import ControlError
from raycore.node.listeners import listen
from raycore.parts.weights.transfer.group import WeightGroup

listener = listen("127.0.0.1")
port, joined = listener.getsockname()[1], []
joining = threading.Thread(target=lambda: joined.append(WeightGroup("127.0.0.1", port, 1, 2, 60)))
joining.start()
group = WeightGroup("127.0.0.1", listener, 0, 2, 60)
joining.join()
child = os.fork()
if child == 0:
    group.close()
    try:
        group.broadcast(torch.ones(1))
    except ControlError:
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
receiving = threading.Thread(target=joined[0].broadcast, args=(torch.zeros(1),))
receiving.start()
group.broadcast(torch.ones(1))
receiving.join()
print("done")
"""
    assert (
        subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=100).stdout
        == "done\n"
    )
