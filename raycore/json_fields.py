"""Typed access to a checkpoint's JSON files. Errors name the file, the key, and the value found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from raycore.errors import InvalidCheckpoint

_LFS_POINTER = b"version https://git-lfs"
_MAX_SHOWN = 300
"""Characters of a value in an error message."""


class JsonFields:
    """The fields of one JSON object. The methods raise InvalidCheckpoint if a value isn't as the method requires.

    `source` names the object in errors: the file's path, or the path and the object's key.
    """

    def __init__(self, source: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self.values = values
        self._defaults = defaults or {}

    @classmethod
    def read(cls, path: Path) -> JsonFields:
        """Read the JSON object in a file. Raises InvalidCheckpoint if it can't be read or isn't one JSON object."""
        try:
            content = path.read_bytes()
            refuse_lfs_pointer(path, content)
            values = _decoded(content)
        except OSError as error:
            raise InvalidCheckpoint(f"{path} can't be read: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise InvalidCheckpoint(f"{path} isn't valid JSON: {error}. Correct it, or download it again") from error
        except RecursionError as error:
            raise InvalidCheckpoint(f"{path} is nested too deeply") from error
        if not isinstance(values, dict):
            raise InvalidCheckpoint(f"{path} holds a {type(values).__name__}, not a JSON object")
        return cls(str(path), cast("dict[str, Any]", values))

    def with_defaults(self, defaults: Mapping[str, Any]) -> JsonFields:
        """Return this object with default values for keys that are absent."""
        return JsonFields(self.source, self.values, defaults)

    def converted(self, convert: Callable[[dict[str, Any]], dict[str, Any]]) -> JsonFields:
        """Return the object that `convert` makes of a copy of the values, with the same name and defaults."""
        return JsonFields(self.source, convert(dict(self.values)), self._defaults)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> Any:
        """Return the value of `key`. If `key` is absent, return its default, or None if it has no default."""
        return self.values[key] if key in self.values else self._defaults.get(key)

    def child(self, key: str) -> JsonFields:
        """Return the object at `key`, or an empty object if `key` is absent or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "an object")
        return JsonFields(f"{self.source}, {key}", cast("dict[str, Any]", value or {}))

    def int_(self, key: str, low: int = 1) -> int:
        """Return the integer at `key`, which is required and must be at least `low`."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(key, f"an integer, at least {low}")
        return value

    def optional_int(self, key: str, low: int = 1) -> int | None:
        """Return the integer at `key`, which must be at least `low`. None if `key` is absent or null."""
        return None if self.get(key) is None else self.int_(key, low)

    def float_(self, key: str) -> float:
        """Return the number at `key`, which is required and must be positive."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, "a positive number")
        return float(value)

    def optional_float(self, key: str) -> float | None:
        """Return the number at `key`, which must be positive. None if `key` is absent or null."""
        return None if self.get(key) is None else self.float_(key)

    def strength(self, key: str) -> float:
        """Return the number at `key`, which must be at least 0. 0, which means off, if `key` is absent or null."""
        value = self.get(key)
        return 0.0 if value is None or (type(value) in (int, float) and value == 0) else self.float_(key)

    def bool_(self, key: str, default: bool = False) -> bool:
        """Return the boolean at `key`, or `default` if `key` is absent or null."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def list_(self, key: str) -> list[Any] | None:
        """Return the list at `key`. None if `key` is absent or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.error(key, "a list")
        return cast("list[Any] | None", value)

    def error(self, key: str, expected: str) -> InvalidCheckpoint:
        """Return an error that names the value at `key`, and `expected` as what was expected instead."""
        found = self.get(key)
        shown = " is missing" if found is None else f"={shortened(found)}"
        return InvalidCheckpoint(f"{self.source}: {_cut(key)}{shown}: expected {expected}")


def refuse_lfs_pointer(path: Path, content: bytes) -> None:
    """Raise InvalidCheckpoint if a file, which begins with `content`, only says where Git LFS has the real one."""
    if content.startswith(_LFS_POINTER):
        raise InvalidCheckpoint(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` there")


def shortened(value: object) -> str:
    """Return a value as Python writes it, cut to what an error message can hold."""
    try:
        return _cut(repr(value))
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}… ({len(text)} characters)"


def _decoded(content: bytes) -> object:
    """Return what is in a JSON file. Raises DecodeError if it isn't JSON.

    Python's own module writes infinity as `Infinity`, as in config.json of models whose times have no limit.
    """
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        if b"Infinity" not in content:
            raise
        try:
            return json.loads(content, parse_constant=_infinity)
        except ValueError as error:
            raise msgspec.DecodeError(str(error)) from error


def _infinity(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN isn't a number")
    return float(name)
