"""Judges vLLM's Python names: what raycore has under the same names, with the same parameters and defaults."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from compatibility.entries import Entry, is_equal, shown
from raycore.compat.modules import lookup
from raycore.compat.names import NAMES, REASONS, reason
from raycore.config import ENGINE_OPTIONS
from raycore.config.vllm_table import VLLM_OPTIONS
from raycore.options.vllm_options import VllmOption

SETTINGS = {
    "KVTransferConfig": (
        "raycore.parts.transfers.config.kv_transfer:KVTransferConfig",
        "raycore.parts.transfers.config.kv_transfer:_WITHOUT_EFFECT",
    ),
    "KVEventsConfig": ("raycore.parts.transfers.config.kv_transfer:KVEventsConfig", None),
    "ECTransferConfig": (
        "raycore.parts.transfers.config.ec_transfer:ECTransferConfig",
        "raycore.parts.transfers.config.ec_transfer:_WITHOUT_EFFECT",
    ),
    "ProfilerConfig": ("raycore.config.profiler:ProfilerConfig", "raycore.config.profiler:_WITHOUT_EFFECT"),
    "SpeculativeConfig": (
        "raycore.parts.drafts.config.speculative:SpeculativeConfig",
        "raycore.parts.drafts.config.speculative:_WITHOUT_EFFECT",
    ),
    "StructuredOutputsConfig": (
        "raycore.parts.constraints.config.structured_outputs:StructuredOutputsConfig",
        "raycore.parts.constraints.config.structured_outputs:_WITHOUT_EFFECT",
    ),
    "PoolerConfig": ("raycore.parts.pooling.config:PoolerConfig", "raycore.parts.pooling.config:_WITHOUT_EFFECT"),
}
"""The options that take objects: raycore's struct of settings, and its table of those without effect."""
ENGINE_ARGS = ("EngineArgs", "AsyncEngineArgs")


class _Value(NamedTuple):
    """A field or a parameter of raycore's."""

    is_optional: bool
    default: Any
    index: int | None = None
    """The place among positional parameters; None for keywords."""


def names(inventory: dict[str, Any]) -> Iterator[Entry]:
    """The names that `vllm` exports."""
    for name in inventory["names"]:
        if name in NAMES[""] or name.startswith("__"):
            yield Entry(f"name/{name}", "same")
        else:
            yield Entry(f"name/{name}", "refused", REASONS.get(name, ""))


def classes(inventory: dict[str, Any]) -> Iterator[Entry]:
    """The classes that scripts use, with their fields, methods and properties."""
    for name, described in inventory["classes"].items():
        module, _, attribute = described["place"].removeprefix("vllm.").rpartition(".")
        if attribute not in NAMES.get(module, {}):
            inner = f"{module}.{attribute}".lstrip(".")
            known = reason(inner)
            yield Entry(f"python/{name}", "refused", "" if known in (REASONS[""], REASONS["v1"]) else known)
            continue
        ours = lookup(module, attribute)
        yield from _fields(name, described["fields"], ours)
        yield from _methods(name, described, ours)


def engine_options(name: str, default: Any, key: str) -> Entry:
    """An option of an engine, as a parameter or as a flag."""
    if name in ENGINE_OPTIONS:
        option = ENGINE_OPTIONS[name]
        if is_equal(default, option.default) or (option.is_open and default is None):
            return Entry(key, "same")
        return Entry(key, "different", f"default: {option.default_text or shown(option.default)}")
    return _judged(VLLM_OPTIONS.get(name), key)


def _judged(option: VllmOption | None, key: str) -> Entry:
    if option is None:
        return Entry(key, "refused")
    if option.is_without_effect:
        return Entry(key, "different", f"taken, without effect: {option.reason}")
    values = [shown(each) for each in option.values if each is not None]
    return Entry(key, "refused", option.reason + (f" (taken: {', '.join(values)})" if values else ""))


def _fields(name: str, fields: dict[str, Any], ours: Any) -> Iterator[Entry]:
    if name in SETTINGS:
        yield from _settings(name, fields)
        return
    known = _fields_of(ours)
    for field, default in fields.items():
        key = f"python/{name}.{field}"
        if name in ENGINE_ARGS and (field in ENGINE_OPTIONS or field in VLLM_OPTIONS):
            yield engine_options(field, default[1], key)
        elif name in ENGINE_ARGS and field == "served_model_name":
            yield Entry(key, "different")
        elif field in known:
            yield _compared(key, default, known[field])
        elif hasattr(ours, field):
            yield Entry(key, "same")
        else:
            yield Entry(key, "refused")


def _settings(name: str, fields: dict[str, Any]) -> Iterator[Entry]:
    struct, table = SETTINGS[name]
    known = _fields_of(_found(struct))
    without_effect: dict[str, VllmOption] = {each.name: each for each in (_found(table) if table else ())}
    for field, default in fields.items():
        key = f"python/{name}.{field}"
        if field in known:
            yield _compared(key, default, known[field])
        else:
            yield _judged(without_effect.get(field), key)


def _methods(name: str, described: dict[str, Any], ours: Any) -> Iterator[Entry]:
    for prop in described["properties"]:
        yield Entry(f"python/{name}.{prop}", "same" if _has(ours, prop) else "refused")
    for method, parameters in described["methods"].items():
        key = f"python/{name}.{method}()"
        if method == "__init__":
            key = f"python/{name}()"
        if not _has(ours, method):
            yield Entry(key, "refused")
            continue
        yield Entry(key, "same")
        known = _parameters_of(getattr(ours, method, None), ours)
        if known is None:
            continue  # it takes any keywords
        for index, (parameter, is_keyword, *default) in enumerate(parameters):
            inner = f"python/{name}{'' if method == '__init__' else f'.{method}'}({parameter})"
            if method == "__init__" and name in ("LLM", "AsyncLLM") and parameter not in known:
                yield engine_options(parameter, default[1], inner)
            elif parameter not in known:
                yield Entry(inner, "refused")
            else:
                yield _compared(inner, default, known[parameter], None if is_keyword else index)


def _has(ours: Any, name: str) -> bool:
    return hasattr(ours, name) or name in _fields_of(ours)


def _compared(key: str, theirs: list[Any], ours: _Value, index: int | None = None) -> Entry:
    is_optional, default = theirs
    if is_optional and not ours.is_optional:
        return Entry(key, "different", "has to be given")
    if index is not None and ours.index != index:
        place = "is for keywords only" if ours.index is None else f"is parameter {ours.index + 1}, not {index + 1}"
        return Entry(key, "different", place)
    if is_optional and not is_equal(default, ours.default):
        return Entry(key, "different", f"default: {shown(ours.default)}, not {shown(default)}")
    return Entry(key, "same")


def _fields_of(ours: Any) -> dict[str, _Value]:
    if not isinstance(ours, type):
        return {}
    if issubclass(ours, msgspec.Struct):
        return {
            field.name: _Value(
                not field.required,
                field.default if field.default is not msgspec.NODEFAULT else _made(field.default_factory),
            )
            for field in msgspec.structs.fields(ours)
        }
    if dataclasses.is_dataclass(ours):
        return {
            field.name: _Value(
                field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING,
                field.default if field.default is not dataclasses.MISSING else _made(field.default_factory),
            )
            for field in dataclasses.fields(ours)
        }
    required = getattr(ours, "__required_keys__", None)
    if required is not None:
        return {name: _Value(name not in required, None) for name in ours.__annotations__}
    named = getattr(ours, "_field_defaults", None)
    if named is not None:
        return {name: _Value(name in named, named.get(name)) for name in getattr(ours, "_fields", ())}
    return {}


def _made(factory: Any) -> Any:
    return None if factory in (dataclasses.MISSING, msgspec.NODEFAULT) else factory()


def _parameters_of(function: Any, owner: Any) -> dict[str, _Value] | None:
    """A function's parameters; None if it takes any keywords. `__init__` has those of its class."""
    empty = inspect.Parameter.empty
    try:
        signature = inspect.signature(owner if function is getattr(owner, "__init__", None) else function)
    except (TypeError, ValueError):
        return {}
    given = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in given):
        return None
    positions = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [each.name for each in given if each.kind in positions]
    return {
        each.name: _Value(
            each.default is not empty,
            None if each.default is empty else each.default,
            positional.index(each.name) if each.name in positional else None,
        )
        for each in given
    }


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
