"""Typed access to a checkpoint's JSON files. Every error names the file, the key, and the value found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from raycore.errors import InvalidCheckpoint


class JsonFields:
    """One JSON object. `source` names it in errors: the file's path, or the path and the object's key."""

    def __init__(self, source: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._source = source
        self.values = values
        self._defaults = defaults or {}

    @classmethod
    def read(cls, path: Path) -> JsonFields:
        """Read a file that must exist and hold one JSON object. Raises InvalidCheckpoint otherwise."""
        try:
            values: object = msgspec.json.decode(path.read_bytes())
        except OSError as error:
            raise InvalidCheckpoint(f"{path} can't be read: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise InvalidCheckpoint(f"{path} isn't valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidCheckpoint(f"{path} holds a {type(values).__name__}, not a JSON object")
        return cls(str(path), cast("dict[str, Any]", values))

    def with_defaults(self, defaults: Mapping[str, Any]) -> JsonFields:
        """The same object with `defaults` for the keys that it lacks."""
        return JsonFields(self._source, self.values, defaults)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> Any:
        """The value of `key`, its default, or None if it has neither."""
        return self.values[key] if key in self.values else self._defaults.get(key)

    def child(self, key: str) -> JsonFields:
        """The object at `key`; empty if it is absent or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "an object")
        return JsonFields(f"{self._source}, {key}", cast("dict[str, Any]", value or {}))

    def int_(self, key: str, low: int = 1) -> int:
        """A required integer, at least `low`."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(key, f"an integer, at least {low}")
        return value

    def optional_int(self, key: str, low: int = 1) -> int | None:
        """An integer of at least `low`; None if it is absent or null."""
        return None if self.get(key) is None else self.int_(key, low)

    def float_(self, key: str) -> float:
        """A required positive number."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, "a positive number")
        return float(value)

    def optional_float(self, key: str) -> float | None:
        """A positive number; None if it is absent or null."""
        return None if self.get(key) is None else self.float_(key)

    def bool_(self, key: str, default: bool = False) -> bool:
        """A boolean; `default` if it is absent or null."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def list_(self, key: str) -> list[Any] | None:
        """A list; None if it is absent or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.error(key, "a list")
        return cast("list[Any] | None", value)

    def error(self, key: str, expected: str) -> InvalidCheckpoint:
        """The error for a value of `key` that isn't as expected."""
        if self.get(key) is None:
            return InvalidCheckpoint(f"{self._source}: {key} is missing: expected {expected}")
        return InvalidCheckpoint(f"{self._source}: {key}={self.get(key)!r}: expected {expected}")
