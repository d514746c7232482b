"""Classes that users name in options. The processes of ranks and workers import them."""

from __future__ import annotations

import importlib
from typing import Any

from raycore.errors import InvalidConfig
from raycore.plugins import find_plugin, plugin_names


def as_class_path(option: str, value: str | type[Any] | None) -> str | None:
    """Return the `package.module.Class` of a class, or a string unchanged.

    Raises:
        InvalidConfig: other processes can't import the class. The message names the option.
    """
    path = f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value
    if isinstance(path, str) and (path.startswith("__main__.") or "<locals>" in path):
        raise InvalidConfig(
            f"{option}={path!r} can't be imported in other processes: define the class at the top level of a module "
            "that isn't the main script"
        )
    return path


def import_class(option: str, path: str, group: str) -> Any:
    """Import the class that the option names: a path, or the name of a plugin of the group.

    Raises:
        InvalidConfig: the class can't be imported. The message names the option.
    """
    if "." not in path:
        plugin = find_plugin(group, path)
        if plugin is None:
            raise InvalidConfig(
                f"{option}={path!r} is neither package.module.Class nor a plugin of {group}, of which there are "
                f"{', '.join(plugin_names(group)) or 'none'}"
            )
        return plugin
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidConfig(
            f"{option}={path!r} can't be imported in the processes of the ranks ({error}): name it as "
            "package.module.Name, in a module that every node of the cluster can import"
        ) from error


def import_path(path: str) -> Any:
    """Import one of raycore's own classes, `package.module.Class`, which only some processes need."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
