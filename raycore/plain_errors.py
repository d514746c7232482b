"""Says in plain words what is wrong with values from users."""

from __future__ import annotations

__all__ = ["decode_problem", "either", "unsupported_value"]

import re
from collections.abc import Iterable

from raycore.json_fields import shortened

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_TYPES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_TYPE = re.compile(r"`(\w+(?: \| \w+)*)`")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+)`")
_OTHER_TYPE = re.compile(r"Expected (?P<wanted>.+), got `\w+`")


def decode_problem(error: Exception) -> str:
    """Return what msgspec says is wrong with a value, with the path in it, without the notation of its types."""
    text = str(error)
    found = _PATH.search(text)
    where = f"{found['path']}: " if found and found["path"] else ""
    text = _PATH.sub("", text)
    if missing := _MISSING.fullmatch(text):
        return f"{where}{missing[1]} is missing"
    if unknown := _UNKNOWN.fullmatch(text):
        return f"{where}{shortened(unknown[1])} is unknown"
    if not text.startswith("Expected"):
        return f"{where}{text}"
    text = _OTHER_TYPE.sub(lambda found: f"Expected {found['wanted']}", text)
    text = _TYPE.sub(lambda found: either(_TYPES.get(name, name) for name in found[1].split(" | ")), text)
    return f"{where}e{text[1:]}"


def unsupported_value(name: str, value: object, usable: Iterable[object]) -> str:
    """Return the message for a value that isn't one of those that there are."""
    return f"{name}={shortened(value)} is not supported: use {either(map(repr, usable))}"


def either(words: Iterable[str]) -> str:
    """Return `a, b or c`, with a comma before `or` if `b` contains one."""
    *first, last = words
    if not first:
        return last
    return f"{', '.join(first)}{',' if ',' in first[-1] else ''} or {last}"
