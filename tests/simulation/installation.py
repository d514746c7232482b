"""Puts the simulated world in the place of the real one, before anything of raycore is imported."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

from simulation import front
from simulation.ray import host, modules
from simulation.world import guards, statements, system

_NAMES = "client cluster control engine executor kvcache llm metrics recurring rpc running_engine scheduler"
_SIDES = ("client", "cluster", "connectors", "control", "engine", "scheduler", "transfer")
"""Of each room in `raycore/parts`."""
PACKAGES = [
    "placement",
    *(f"raycore.{name}" for name in _NAMES.split()),
    *(
        f"raycore.parts.{path.parent.name}.{path.stem}"
        for path in sorted(Path(__file__).parents[2].glob("raycore/parts/*/*"))
        if path.stem in _SIDES and path.parts[-2:] != ("images", "client")  # it fetches and decodes images
    ),
]
"""The packages of the control plane between whose statements threads may change."""


_IMPORTED_LATER = (
    "multiprocessing.synchronize",
    "encodings.utf_32_le",
    "raycore.client.prompt_embeds",
    "raycore.parts.transfers.client.routes",
    "raycore.parts.transfers.engine",
    "raycore.executor.ray_executor",
    "raycore.parts.transfers.connectors.offload.scheduler",
    "raycore.parts.transfers.connectors.peers.scheduler_side",
    "raycore.parts.transfers.connectors.peers.worker_side",
    "raycore.kvcache.cache_log",
    "raycore.node.listeners",
    "raycore.node.niceness",
    "raycore.rpc.worker_methods",
    "raycore.parts.transfers.scheduler.cache_events",
    "raycore.parts.transfers.scheduler.transfers",
    "raycore.server.multi_process.api_servers",
    "raycore.worker.worker_actor",
    "simulation.cluster.play",
    "simulation.worker.line",
    "simulation.worker.masked",
    "simulation.worker.worker",
)
"""What an engine, its ranks and workers import when they start. Forked processes shall find it imported."""
_is_at_statements: bool | None = None
"""Whether threads change between any two statements. None: nothing is in its place yet."""


def put_in_place(*, at_statements: bool = False) -> None:
    """Put the simulated system, Ray and machine in their places. Does nothing if they are there."""
    global _is_at_statements
    if _is_at_statements is not None:
        assert at_statements == _is_at_statements, "the control plane was imported in another way"
        return
    _is_at_statements = at_statements
    system.install()
    modules.install()
    if at_statements:
        statements.everywhere(PACKAGES)
    guards.watch_variables(guards.table())
    front.install()
    host.install()  # imports some of the product
    from simulation.worker import grammar  # imported lazily: it imports some, too

    grammar.install()


def install(*, at_statements: bool = False) -> None:
    """Import the control plane, in this world, and watch what its locks guard."""
    put_in_place(at_statements=at_statements)
    logging.disable(logging.CRITICAL)  # the story says more, and logging costs most of a run's time
    for name in _IMPORTED_LATER:
        importlib.import_module(name)
    guards.install(guards.table())
