"""Plugins: what installed packages add to raycore, by the entry points that they declare.

A package declares, for example, `[project.entry-points."raycore.general_plugins"]` with `name = "module:function"`. The
variable RAYCORE_PLUGINS, names separated by commas, chooses which plugins are loaded; without it, all are.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from raycore.errors import InvalidConfig

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GENERAL = "raycore.general_plugins"
"""Functions without arguments. Each process of an engine calls them once, before it does anything else."""
MODELS = "raycore.model_plugins"
"""By the name of an architecture in config.json: a `raycore.models.family.Family`."""
WORKERS = "raycore.worker_plugins"
"""By a name for `worker_cls`: a class with the methods of `WorkerProtocol`."""
SCHEDULERS = "raycore.scheduler_plugins"
"""By a name for `scheduler_cls`: a class with the methods of `SchedulerProtocol`."""
KV_CONNECTORS = "raycore.kv_connector_plugins"
"""By a name for `kv_connector`: a `raycore.parts.transfers.connectors.connector.KVConnector`."""
EC_CONNECTORS = "raycore.ec_connector_plugins"
"""By a name for `ec_connector`: a `raycore.parts.transfers.connectors.embeddings.EmbeddingStore`."""
LOGITS_PROCESSORS = "raycore.logits_processor_plugins"
"""`raycore.sampling.logits_processors.LogitsProcessor` classes, all of which are used, in the order of their names."""
TOOL_PARSERS = "raycore.tool_parser_plugins"
"""By a name for `tool_call_parser`: a `ToolParser`."""
REASONING_PARSERS = "raycore.reasoning_parser_plugins"
"""By a name for `reasoning_parser`: a `ReasoningParser`."""

VARIABLE = "RAYCORE_PLUGINS"


class Plugins(msgspec.Struct, frozen=True):
    """The plugins of an engine, as its driver has found them. All processes of the engine load the same."""

    chosen: list[str] | None = None
    """The names in RAYCORE_PLUGINS. None: it isn't set."""
    general: list[str] = []
    """The names of the general plugins."""
    logits_processors: list[str] = []
    """The names of the logits processors."""


class _Process(NamedTuple):
    """What this process has loaded."""

    plugins: list[Plugins]
    """The plugins of the engine that was started last in this process; empty before that."""
    called: set[str]
    """The general plugins that have been called."""
    registered: dict[tuple[str, str], Any]
    """By group and name: plugins that files have registered."""
    files: set[str]
    """The files that have been imported."""


_process = _Process([], set(), {}, set())


def find_plugins() -> Plugins:
    """The plugins that are installed here and chosen by RAYCORE_PLUGINS."""
    names = os.environ.get(VARIABLE)
    chosen = None if names is None else [name for name in map(str.strip, names.split(",")) if name]
    general, processors = (
        [name for name in _entry_points(group) if chosen is None or name in chosen]
        for group in (GENERAL, LOGITS_PROCESSORS)
    )
    return Plugins(chosen, general, sorted(processors))


def plugin_failure(group: str, name: str, error: Exception) -> InvalidConfig:
    """The error to raise if a plugin's code has raised `error`."""
    return InvalidConfig(
        f"the plugin {name!r} of {group} failed: {type(error).__name__}: {error}. Repair or uninstall its package, or "
        f"set {VARIABLE} to the names of other plugins"
    )


def load_general_plugins(plugins: Plugins) -> None:
    """Call the general plugins that this process hasn't called yet.

    Raises:
        InvalidConfig: a plugin isn't installed here, or failed. The message names it.
    """
    _process.plugins[:] = [plugins]
    for name in plugins.general:
        if name in _process.called:
            continue
        function = _load(GENERAL, name, _entry_points(GENERAL).get(name))
        try:
            function()
        except Exception as error:  # other people's code may raise anything
            raise plugin_failure(GENERAL, name, error) from error
        _process.called.add(name)


def register_plugin(group: str, name: str, value: Any) -> None:
    """Add a plugin to a group in this process, as a file of `--tool-parser-plugin` does."""
    _process.registered[group, name] = value


def import_plugin_file(option: str, path: str) -> None:
    """Import a Python file, or a module by its name, that registers plugins. The second time, do nothing.

    Raises:
        InvalidConfig: it can't be imported. The message names `option`.
    """
    if path in _process.files:
        return
    try:
        if os.path.isfile(path):
            runpy.run_path(path, run_name=os.path.splitext(os.path.basename(path))[0])
        else:
            import_module(path)
    except Exception as error:  # other people's code may raise anything
        raise InvalidConfig(f"{option}={path!r} can't be imported: {type(error).__name__}: {error}") from error
    _process.files.add(path)


def find_plugin(group: str, name: str) -> Any:
    """Import and return the plugin of a group with this name. None if there is none, or if it isn't chosen.

    Raises:
        InvalidConfig: the plugin can't be imported.
    """
    if (group, name) in _process.registered:
        return _process.registered[group, name]
    if name not in plugin_names(group):
        return None
    return _load(group, name, _entry_points(group)[name])


def load_plugin(group: str, name: str) -> Any:
    """Import and return the plugin of a group that the program that starts the engine has found.

    Raises:
        InvalidConfig: it isn't installed here, or can't be imported.
    """
    return _load(group, name, _entry_points(group).get(name))


def plugin_names(group: str) -> list[str]:
    """The names of the chosen plugins of a group, without importing them."""
    chosen = (_process.plugins[0] if _process.plugins else find_plugins()).chosen
    registered = [name for of, name in _process.registered if of == group]
    return [*registered, *(name for name in _entry_points(group) if chosen is None or name in chosen)]


def _entry_points(group: str) -> Mapping[str, EntryPoint]:
    return _entry_points_on(group, tuple(sys.path))


@cache
def _entry_points_on(group: str, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """The entry points of packages on `path`, which is `sys.path`. Looking them up takes tens of milliseconds."""
    from importlib.metadata import entry_points  # imported lazily to keep `raycore --help` fast

    return {each.name: each for each in entry_points(group=group)}


def _load(group: str, name: str, found: EntryPoint | None) -> Any:
    if found is None:
        raise InvalidConfig(
            f"the plugin {name!r} of {group} isn't installed in this process, but in that of the program that starts "
            f"the engine: install its package on all nodes, or leave it out of {VARIABLE}"
        )
    try:
        return found.load()
    except Exception as error:  # other people's code may raise anything
        raise plugin_failure(group, name, error) from error
