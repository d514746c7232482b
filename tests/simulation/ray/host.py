"""Stands in for what raycore asks of its machine in other ways than through `raycore.system`."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulation.ray import logs
from simulation.world import kernel, system, threads
from simulation.world.threads import Thread, world


def is_running(pid: int) -> bool:
    """Real: reads /proc, in which other processes have these pids."""
    threads.pause()
    return system.find_process(pid) is not None


def end_with_parent() -> None:
    """Real: asks the kernel for a signal."""
    here = world()
    assert here.current is not None
    process = here.current.process
    node: Any = process.machine
    if node.raylet.has_ended:
        return
    node.ends_with_raylet.append(process)


def lock() -> None:
    """Real: a mutex in shared memory."""
    here = world()
    assert here.current is not None
    _lifelines()[here.current.process.pid] = here.current.process


def _lifelines() -> dict[int, kernel.Process]:
    return world().systems.setdefault("lifelines", {})


class Watch:
    """Real: waits for a mutex in shared memory."""

    def __init__(self, process: kernel.Process, on_end: Callable[[], None]) -> None:
        self._process = process
        self._on_end = on_end
        self._is_closed = False
        Thread(target=self._wait, name="raycore-lifeline-watch", daemon=True).start()

    @staticmethod
    def start(pid: int, on_end: Callable[[], None]) -> Watch | None:
        process = _lifelines().get(pid)
        return Watch(process, on_end) if process is not None and system.find_process(pid) is process else None

    def close(self) -> None:
        self._is_closed = True

    def _wait(self) -> None:
        here = world()
        thread = here.current
        assert thread is not None
        draws = here.systems.setdefault("lifelines' delays", here.generator("lifelines' delays"))
        self._process.on_end.append(lambda _: here.call_later(draws.uniform(1e-4, 5e-3), lambda: here.unpark(thread)))
        while not self._is_closed:
            if self._process.has_ended:
                if not self._is_closed:
                    self._on_end()
                return
            here.park("a lifeline", 1.0)


MISSING, REFUSED = "missing", "refused"
"""In an adapter's path: it isn't there. In a constraint: it can't be compiled."""


class Files:
    """Real: reads an adapter's files."""

    @staticmethod
    def read(path: Path, *_: object) -> None:
        world().park("a file", _draws("files").uniform(1e-4, 5e-3))
        if MISSING in str(path):
            from raycore.errors import InvalidAdapter  # imported lazily: see `install`

            raise InvalidAdapter(f"{path} has no adapter_config.json")


class Compiler:
    """Real: a process that compiles constraints. Now and then, one dies."""

    def __init__(self, _: object) -> None:
        self._has_ended = False

    def ask(self, asked: bytes, timeout_s: float) -> bytes:
        draws = _draws("compilers")
        world().park("a compiler", draws.uniform(1e-3, 0.1))
        if draws.random() < 0.05 and not world().systems.get("a compiler has died"):
            world().systems["a compiler has died"] = self._has_ended = True
        if self._has_ended:
            raise OSError("the process has ended")
        return b"R" + REFUSED.encode() if REFUSED.encode() in asked else b"A"

    def end(self) -> None:
        self._has_ended = True


def _draws(name: str) -> random.Random:
    here = world()
    if name not in here.systems:
        here.systems[name] = here.generator(name)
    return here.systems[name]


def machine_id() -> str:
    """Real: what names the machine since its start, which is the same for all simulated ones."""
    return repr(_machine())


def skip_exit_handlers() -> None:
    """Real: asks the C library not to call what it calls at the end of a process."""


def cuda_of_torch() -> str:
    """Real: asks how the installed torch was built."""
    return "12.8"


def own_host() -> str:
    """Real: asks the kernel for the route to other machines."""
    return _machine().ip


def _machine() -> Any:
    thread = world().current
    assert thread is not None
    return thread.process.machine


REPLACED: dict[str, dict[str, Any]] = {
    "raycore.node.processes": {"is_running": is_running, "end_with_parent": end_with_parent},
    "raycore.node.lifeline": {"lock": lock, "LifelineWatch": Watch},
    "raycore.cluster.logs": {"read_log": logs.read_log},
    "raycore.node.exit_handlers": {"skip_exit_handlers": skip_exit_handlers},
    "raycore.node.versions": {"cuda_of_torch": cuda_of_torch},
    "raycore.parts.adapters.checkpoint.spec": {"LoraSpec": Files},
    "raycore.parts.constraints.grammar.gate": {"_Process": Compiler},
    "raycore.parts.transfers.connectors.peers.server": {"machine_id": machine_id, "own_host": own_host},
}
"""What takes the place of functions and classes of the product's modules. Each says why."""


def install() -> None:
    """To be called before anything of raycore is imported that imports these by their names."""
    for name, values in REPLACED.items():
        module = importlib.import_module(name)
        for attribute, value in values.items():
            setattr(module, attribute, value)
