"""Gives each simulated process its own values of the variables of modules, since all of them share the modules.

Whenever a thread of another process goes on, the values of the one before are put away, and its own are put in place.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from simulation.world.kernel import Process, World

OWN: dict[str, list[str]] = {
    "raycore.cluster.connection": ["_lock", "_num_users", "_is_ours", "_ends", "_starts", "_is_exiting", "_is_forked"],
    "raycore.metrics.engines": ["_engines"],
    "raycore.node.lifeline": ["_locker"],
    "raycore.node.listeners": ["_offered"],
    "raycore.node.signals": ["_first_s"],
    "raycore.node.own_process": ["_made"],
    "raycore.plugins": ["_process"],
    "raycore.rpc.client": ["_adding_callback"],
    "raycore.rpc.start_phases": ["_latest"],
    "raycore.running_engine": ["_kept", "_keeping"],
}
"""The variables of which each process has its own, by module."""

SHARED: dict[str, str] = {
    "raycore.same_copy:_own": "says which copy of raycore is imported, which is the same in all simulated processes",
    "raycore.cluster.local_ray.own_processes:_last_starter": "a local Ray isn't simulated",
    "raycore.cluster.local_ray.own_processes:_lock": "a local Ray isn't simulated",
    "raycore.cluster.local_ray.own_processes:_reapers": "a local Ray isn't simulated",
}
"""Variables that change, and that all processes share, with the reason why that makes no difference."""


class OwnState:
    """The variables of modules that each process of a world has for itself."""

    def __init__(self, world: World, own: Mapping[str, Sequence[str]] = OWN) -> None:
        """Every process begins with the values that the variables have now."""
        modules = {name: importlib.import_module(name) for name in own}
        self._places = [(vars(modules[name]), each) for name in own for each in own[name]]
        self._first = [variables[name] for variables, name in self._places]
        self._values: dict[int, list[Any]] = {}
        world.on_process_change = self._change
        world.systems["own state"] = self

    def copy(self, child: Process) -> None:
        """Give a process that hasn't begun the values of the one that runs.

        What they refer to isn't copied. So it knows of none of the objects that it would change: those in weak
        dictionaries.
        """
        self._values[child.pid] = [
            copy.copy(variables[name] if isinstance(first, (dict, list)) else first)
            if isinstance(first, (dict, list, WeakValueDictionary))
            else variables[name]
            for (variables, name), first in zip(self._places, self._first, strict=True)
        ]

    def _change(self, old: Process | None, new: Process) -> None:
        if old is not None:
            self._values[old.pid] = [variables[name] for variables, name in self._places]
        values = self._values.get(new.pid)
        if values is None:
            values = [copy.deepcopy(value) for value in self._first]
        for (variables, name), value in zip(self._places, values, strict=True):
            variables[name] = value
