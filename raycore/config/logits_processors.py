"""The classes in the option `logits_processors`, and those of plugins: how they reach all processes of an engine."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Sequence
from functools import reduce
from typing import Any, cast

import msgspec

from raycore.errors import InvalidConfig
from raycore.plugins import LOGITS_PROCESSORS, Plugins, load_plugin

_METHODS = ("apply", "update_state", "is_argmax_invariant")


class ProcessorClass(msgspec.Struct, frozen=True):
    """A class in the option `logits_processors`."""

    path: str
    """`module:Class` or `module.Class`."""
    pickled: bytes = b""
    """The class itself, if other processes can't import it. Empty: they import `path`."""

    def __repr__(self) -> str:
        return self.path

    def load(self) -> Any:
        """Import the class. Raises InvalidConfig if it can't be imported, or isn't a logits processor."""
        try:
            found = pickle.loads(self.pickled) if self.pickled else _import(self.path)
        except Exception as error:  # users' modules may raise anything
            raise InvalidConfig(
                f"logits_processors: {self.path!r} can't be imported ({type(error).__name__}: {error}): name it as "
                "module:Class, in a module that every node of the cluster can import"
            ) from error
        return _checked(found, self.path)


def parse_logits_processors(logits_processors: str | type[Any] | list[str | type[Any]]) -> Sequence[ProcessorClass]:
    """Convert the option `logits_processors`: classes, or their paths.

    Raises:
        InvalidConfig: an entry is neither, or can't be imported, or isn't a logits processor.
    """
    given: Any = logits_processors  # users may pass anything
    entries: list[Any] = [*cast("Sequence[Any]", given)] if isinstance(given, (list, tuple)) else [given]
    return [_processor_class(entry) for entry in entries]


def processor_classes(plugins: Plugins, chosen: Sequence[ProcessorClass]) -> list[Any]:
    """The classes of an engine's logits processors: first those of plugins, then those of the option.

    Raises:
        InvalidConfig: a class can't be imported, or isn't a logits processor.
    """
    of_plugins = [
        _checked(load_plugin(LOGITS_PROCESSORS, name), f"plugin {name}") for name in plugins.logits_processors
    ]
    return of_plugins + [each.load() for each in chosen]


def _processor_class(entry: Any) -> ProcessorClass:
    if isinstance(entry, ProcessorClass):
        return entry
    if isinstance(entry, str):
        found = ProcessorClass(entry)
        found.load()
        return found
    path = f"{_checked(entry, repr(entry)).__module__}:{entry.__qualname__}"
    if not path.startswith("__main__:") and "<locals>" not in path:
        return ProcessorClass(path)
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]  # imported lazily: few engines need it

    try:
        return ProcessorClass(path, cast("Any", cloudpickle).dumps(entry))
    except Exception as error:  # what the class refers to may raise anything
        raise InvalidConfig(
            f"logits_processors: {path!r} can't be sent to other processes ({type(error).__name__}: {error}): define "
            "the class at the top level of a module that isn't the main script"
        ) from error


def _checked(found: Any, name: str) -> Any:
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        what = f"has no method {missing[0]}()" if isinstance(found, type) else "isn't a class"
        raise InvalidConfig(
            f"logits_processors: {name} {what}: give subclasses of raycore.sampling.logits_processors.LogitsProcessor, "
            "or their paths as module:Class"
        )
    return cast("type[Any]", found)


def _import(path: str) -> Any:
    module, colon, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not (module and colon and name):
        raise ValueError("it names no module and class")
    start: Any = importlib.import_module(module)
    return reduce(getattr, name.split("."), start)
