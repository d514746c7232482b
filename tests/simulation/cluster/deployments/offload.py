"""Caches in the host's memory and in files, which all ranks share. Files may be damaged at any time."""

from __future__ import annotations

import dataclasses
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from simulation.cluster.deployments.deployment import EVENTS, Deployment, Kind, naps
from simulation.ray.cluster import Cluster
from simulation.scenario import Fault, Moment, Scenario
from simulation.world.system import EPOCH_S

_BLOCK_BYTES, _FILE_BYTES = 128, 168
_SHARE_WITH_LEFT, _LEFT_S = 0.5, 100.0
"""Of the directories, those with a temporary file from before, and how many virtual seconds old it is."""
_MAX_BESIDES = 7
"""When hardly anything is left, so many other workers may each write a file at the same time."""
DIRECTORY = "a directory of its own"
"""What scenarios have in the place of the files' directory, which is another one in each run."""


def drawn(draw: random.Random) -> Deployment:
    settings: dict[str, Any] = {"always_load": draw.random() < 0.8}
    where = draw.choice(["memory", "files", "files", "both"])
    if where != "files":
        settings["cpu_bytes_to_use"] = _BLOCK_BYTES * draw.choice([4, 16, 64, 256])
    if where != "memory":
        settings |= {"path": DIRECTORY, "disk_bytes": _FILE_BYTES * draw.choice([20, 100, 10_000])}
        settings["load_timeout_s"] = draw.choice([0.01, 10.0, 10.0])
    transfer = {"kv_connector": "OffloadConnector", "kv_connector_extra_config": settings}
    num_ranks, num_stages, num_workers = draw.choice([(1, 1, 1), (2, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1), (3, 1, 1)])
    made = Deployment(
        {
            "kv_transfer_config": transfer,
            "enable_prefix_caching": True,
            # few blocks in the cache, so that most prefixes are only elsewhere
            "num_gpu_blocks_override": draw.choice([33, 36, 48]),
        },
        num_ranks,
        num_stages,
        num_workers,
        num_repeats=draw.choice([4, 8, 16]),
        faults=tuple(_fault(draw) for _ in range(draw.choice([0, 4, 12]) if where != "memory" else 0)),
    )
    if where == "both" and draw.random() < 0.5:  # less than a step saves
        settings["cpu_bytes_to_use"] = _BLOCK_BYTES * num_workers * num_stages * draw.choice([1, 2, 3])
    if draw.random() < 0.5:
        transfer["kv_load_failure_policy"] = "fail"
    if "path" in settings and draw.random() < 0.3:  # less than most of the cache
        settings["disk_bytes"] = _FILE_BYTES * draw.choice([4, 8, 12])
    if draw.random() < 0.4:
        made.options["kv_events_config"] = EVENTS
    if "path" in settings and draw.random() < 0.2:
        when = Moment(round(draw.uniform(0.0, 2.0), 4))
        made = dataclasses.replace(
            made, faults=(*made.faults, Fault(when=when, kind="fill disk", for_s=draw.choice([0.2, 5.0])))
        )
    if draw.random() < 0.2:
        made = dataclasses.replace(made, operations=naps(draw))
    return made


def _fault(draw: random.Random) -> Fault:
    when = Moment(round(draw.uniform(0.0, 4.0), 4))
    return Fault(when=when, kind=draw.choice(list(FAULTS)), target=draw.randrange(1000))


@contextmanager
def with_directory(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario with a new directory for its files, if it has any. The directory is removed at the end."""
    transfer: dict[str, Any] = scenario.options.get("kv_transfer_config") or {}
    settings = transfer.get("kv_connector_extra_config", {})
    if settings.get("path") != DIRECTORY:
        yield scenario
        return
    with tempfile.TemporaryDirectory(prefix="raycore-blocks-") as path:
        if random.Random(f"files left {scenario.seed}").random() < _SHARE_WITH_LEFT:
            _leave_file(Path(path))
        given = transfer | {"kv_connector_extra_config": settings | {"path": path}}
        yield replace(scenario, options=scenario.options | {"kv_transfer_config": given})


def _leave_file(directory: Path) -> None:
    """Leave what an engine that ended while it wrote a file has left."""
    left = directory / "another layout" / "1-0.tmp"
    left.parent.mkdir()
    left.write_bytes(bytes(_FILE_BYTES // 2))
    os.utime(left, (EPOCH_S - _LEFT_S, EPOCH_S - _LEFT_S))


def directory_of(scenario: Scenario) -> Path | None:
    """Where the files are of a scenario that has its directory."""
    transfer: dict[str, Any] = scenario.options.get("kv_transfer_config") or {}
    path = transfer.get("kv_connector_extra_config", {}).get("path")
    return None if path is None else Path(path)


def problems(scenario: Scenario) -> Iterator[str]:
    """What is wrong with the directory afterwards."""
    directory, transfer = directory_of(scenario), cast("Any", scenario.options.get("kv_transfer_config"))
    if directory is not None:
        most = transfer["kv_connector_extra_config"]["disk_bytes"]
        size = sum(each.stat().st_size for each in directory.rglob("*.kv"))
        if size > most + _MAX_BESIDES * _FILE_BYTES:
            yield f"files of blocks have {size} bytes, more than {most}"
        left = [each.name for each in directory.rglob("*.tmp") if each.stat().st_mtime < EPOCH_S]
        if left and size:  # whoever writes a first file looks at all
            yield f"temporary files of an earlier engine are left: {left}"


# ---- what breaks


def _files(cluster: Cluster, fault: Fault) -> list[Path]:
    """Half of the blocks' files, in an order that the run decides. One that is just being written may be empty."""
    directory: Path | None = cluster.world.systems.get("directory of blocks")
    found = [] if directory is None else sorted(directory.rglob("*.kv"), key=lambda each: each.name)
    return [each for index, each in enumerate(found) if (index + fault.target) % 2 and each.stat().st_size]


def _damage(cluster: Cluster, fault: Fault) -> None:
    for file in _files(cluster, fault):
        data = bytearray(file.read_bytes())
        data[-1 - fault.target % min(len(data), 100)] ^= 1
        file.write_bytes(data)


def _cut(cluster: Cluster, fault: Fault) -> None:
    for file in _files(cluster, fault):
        file.write_bytes(file.read_bytes()[: fault.target % _FILE_BYTES])


def _swap(cluster: Cluster, fault: Fault) -> None:
    """Give files the content of others, as a repair of a file system may do."""
    files = _files(cluster, fault)
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:], strict=False):
        file.write_bytes(content)


def _remove(cluster: Cluster, fault: Fault) -> None:
    for file in _files(cluster, fault):
        file.unlink()


def _fill(cluster: Cluster, fault: Fault) -> None:
    """Leave no space on the disk for a while."""
    cluster.world.systems["the disk is full until"] = cluster.world.now_s + fault.for_s


FAULTS: dict[str, Kind] = {
    "fill disk": _fill,
    "damage files": _damage,
    "cut files": _cut,
    "swap files": _swap,
    "remove files": _remove,
}
