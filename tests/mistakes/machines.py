"""Machines on which something is wrong: directories that are full or can't be written, ports, clusters, packages."""

from __future__ import annotations

import functools
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """A machine, and what somebody runs there."""

    what: str
    command: str
    """`PORT` stands for a port that another program uses."""
    says: str
    mounts: tuple[str, ...] = ()
    """Commands that make directories of this machine's, in a namespace of their own."""
    environment: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    """Modules that can't be imported."""
    num_cpus: int | None = None
    """How many a cluster has that the command joins. None: the command starts a local Ray."""
    redirection: str = ""

    @contextmanager
    def prepared(self) -> Iterator[dict[str, str]]:
        """Make the machine. Yields the environment."""
        environment = {"RAY_ADDRESS": "local", **dict(self.environment)}
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as taken:
            environment["PORT"] = str(taken.getsockname()[1])
            if self.missing:
                hidden = f"import sys\nsys.modules.update(dict.fromkeys({list(self.missing)!r}))\n"
                Path(folder, "sitecustomize.py").write_text(hidden)
                environment["PYTHONPATH"] = folder
            if self.num_cpus is None:
                yield environment
                return
            with _cluster(num_cpus=self.num_cpus, num_gpus=0) as address:
                yield environment | {"RAY_ADDRESS": address}

    def argv(self) -> list[str]:
        """The command line."""
        raycore = f"exec {shlex.quote(sys.executable)} -m raycore {self.command} {self.redirection}"
        lines = [*self.mounts, raycore.replace("PORT", '"$PORT"')]
        return [*(["unshare", "-rm"] if self.mounts else []), "sh", "-ec", "\n".join(lines)]


@functools.cache
def can_unshare() -> bool:
    """Whether this user may mount directories in a namespace of its own."""
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=10, check=False).returncode == 0
    except OSError:
        return False


@contextmanager
def _cluster(**resources: int) -> Iterator[str]:
    """A cluster of one node. Yields its address."""
    from ray.cluster_utils import Cluster  # imported lazily: few machines need it

    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **resources})
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


_TMPFS = "mount -t tmpfs -o size={size} tmpfs {path}"
_FULL = "head -c 1M /dev/zero > {path}/filler 2>/dev/null || true"

MACHINES = [
    Machine("a port in use", "serve --port PORT", "another program uses this port: give another --port"),
    Machine("a cluster that isn't there", "generate a", "RAY_ADDRESS", environment=(("RAY_ADDRESS", "127.0.0.1:1"),)),
    Machine(
        "a cluster that isn't there", "serve --port 0", "RAY_ADDRESS", environment=(("RAY_ADDRESS", "127.0.0.1:1"),)
    ),
    Machine("a cluster that isn't there", "status", "no Ray cluster at", environment=(("RAY_ADDRESS", "127.0.0.1:1"),)),
    Machine(
        "an address of Ray Client", "generate a", "ray://", environment=(("RAY_ADDRESS", "ray://127.0.0.1:10001"),)
    ),
    Machine("no CPU free in the cluster", "generate -tp 2 a", "CPU", num_cpus=1),
    Machine("no GPU in the cluster", "generate --device cuda a", "GPU", num_cpus=1),
    Machine("no engine in the cluster", "status", "no engine", num_cpus=1),
    Machine("no engine in the cluster", "scale -dp 2", "no engine", num_cpus=1),
    Machine(
        "a home that can't be written",
        "generate a",
        "",
        mounts=("mkdir -p /mnt/home", "mount -t tmpfs -o ro tmpfs /mnt", "export HOME=/mnt"),
    ),
    Machine("a full /tmp", "generate a", "/tmp", mounts=(_TMPFS.format(size="64k", path="/tmp"),)),
    Machine(
        # without room there, a local Ray has its object store in /tmp
        "a full /dev/shm",
        "generate -tp 2 a",
        "/dev/shm|a1",
        mounts=(_TMPFS.format(size="64k", path="/dev/shm"),),
    ),
    Machine(
        "a full disk for the output",
        "run-batch -i requests.jsonl -o /mnt/out.jsonl",
        "No space left",
        mounts=(_TMPFS.format(size="16k", path="/mnt"), _FULL.format(path="/mnt")),
    ),
    Machine("a full disk for the output", "generate a", "No space left", redirection="> /dev/full"),
    Machine("no fastapi", "serve --port 0", 'pip install "raycore.serve."', missing=("fastapi",)),
    Machine("no pydantic", "run-batch -i requests.jsonl -o o", 'pip install "raycore.serve."', missing=("pydantic",)),
    Machine(
        "no OTLP exporter",
        "serve --port 0 --otlp-traces-endpoint http://localhost:4317",
        'package opentelemetry-exporter-otlp, .*pip install "raycore.otel."',
        missing=("opentelemetry.exporter",),
    ),
    Machine(
        "no llguidance",
        "generate --prepare-structured-outputs a",
        'package llguidance, .*pip install "raycore.structured."',
        missing=("llguidance",),
    ),
    Machine(
        "no pyzmq",
        "generate --kv-events-config.enable_kv_cache_events true a",
        'package pyzmq, .*pip install "raycore.kv-events."',
        missing=("zmq",),
    ),
    Machine(
        "no transformers",
        "generate --model text-encoder a",
        'package transformers, .*pip install "raycore.transformers."',
        missing=("transformers",),
    ),
    Machine("a key of no characters", "serve --port 0", "RAYCORE_API_KEY", environment=(("RAYCORE_API_KEY", " "),)),
    Machine("no network", "generate --model no/such-model a", "'no/such-model' isn't .*hf download"),
]
