"""Checks the values of a JSON schema's keywords. Pure.

Each check raises InvalidRequest, with the keyword's JSON pointer, if llguidance can't hold the value exactly.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

from raycore.errors import InvalidRequest

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
MAX_NUMBER = 1 << 53
"""Numbers are doubles in llguidance. Beyond this, not every integer is one."""
MAX_DIGITS = 15
"""llguidance may read a number with more digits, or decimal places, as the double beside the right one."""
MAX_MULTIPLE = (1 << 16) - 1
"""Maximum of the least common multiple of all `multipleOf`: an automaton for it has this many states."""
MAX_BOUNDED_MULTIPLE = (1 << 12) - 1
"""The same if there are bounds of numbers, too: states are multiplied by those of an automaton for the bounds. With
twice as much, llguidance 1.9 still follows the longest bounds."""
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
MAX_LENGTH = (1 << 31) - 1
"""Maximum of `minLength`, `maxItems` and the like."""
_DROPPED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that llguidance 1.9 leaves out of the strings of `const` and `enum`. Names of properties keep them."""
_SHOWN = 60


def shown(value: Any) -> str:
    """A value of the schema for error messages, as JSON, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def exact_float(text: str) -> float:
    """The number that JSON text means. Raises InvalidRequest if no double has the value."""
    value = float(text)
    if not math.isfinite(value) or Decimal(text) != Decimal(repr(value)):
        raise InvalidRequest(f"the number {text[:_SHOWN]} has more digits than a double: round it")
    return value


def no_constant(text: str) -> float:
    """Refuse `NaN` and `Infinity`, which Python takes for JSON."""
    raise InvalidRequest(f"{text} isn't JSON")


DECODER = json.JSONDecoder(parse_float=exact_float, parse_constant=no_constant)
"""Reads JSON, and refuses numbers that no double has."""


def checked(keyword: str, value: Any, kind: type, path: str, *, may_be_empty: bool = True) -> Any:
    """The value, which must be of this type."""
    if not isinstance(value, kind) or (not may_be_empty and not value):
        names = {list: "an array", dict: "an object", str: "a string"}
        what = f"{names[kind]}{'' if may_be_empty else ' with at least one element'}"
        raise InvalidRequest(f"#{path}: {keyword} must be {what}, not {shown(value)}")
    return value


def may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a schema's `type` allows strings."""
    types: Any = schema.get("type", "string")
    return types == "string" or (isinstance(types, list) and "string" in types)


def check_multiples(multiples: Sequence[tuple[str, int | float]], *, has_bounds: bool) -> None:
    """Check the values of all `multipleOf` of a schema, with their paths: llguidance multiplies those that meet.

    `has_bounds`: whether any part of the schema has one of `BOUNDS`.
    """
    most, beside = (MAX_BOUNDED_MULTIPLE, " beside bounds of numbers") if has_bounds else (MAX_MULTIPLE, "")
    exact = [Decimal(repr(value)) for _, value in multiples]
    scale = 10 ** max((_num_decimals(value) for value in exact), default=0)
    if math.lcm(*(int(value * scale) for value in exact)) > most:
        path, value = max(multiples, key=lambda each: each[1])
        raise InvalidRequest(
            f"#{path}: multipleOf={value} is too large: the least common multiple of all multipleOf, without decimal "
            f"point, may be at most {most}{beside}"
        )


def _num_decimals(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    assert isinstance(exponent, int), "the value is finite"
    return max(0, -exponent)


def _number(keyword: str, value: Any, path: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"#{path}: {keyword} must be a number, not {shown(value)}")
    if abs(value) > MAX_NUMBER:
        raise InvalidRequest(
            f"#{path}: {keyword}={shown(value)} can't be held exactly: numbers go from -2^53 to 2^53 "
            f"({MAX_NUMBER}); leave the keyword out, or use a string with a pattern"
        )
    if value == int(value):
        return int(value)
    exact = Decimal(repr(value))
    num_digits, num_decimals = len(exact.as_tuple().digits), _num_decimals(exact)
    if max(num_digits, num_decimals) > MAX_DIGITS:
        raise InvalidRequest(
            f"#{path}: {keyword}={value!r}: at most {MAX_DIGITS} significant digits and decimal places are compiled, "
            f"and it has {num_digits} and {num_decimals}"
        )
    return value


def _bound(keyword: str, value: Any, path: str) -> int | float | bool:
    # draft 4 has true and false for whether the bound itself is excluded
    return value if isinstance(value, bool) and keyword.startswith("exclusive") else _number(keyword, value, path)


def _multiple(keyword: str, value: Any, path: str) -> int | float:
    number = _number(keyword, value, path)
    if number <= 0:
        raise InvalidRequest(f"#{path}: multipleOf must be greater than 0, not {shown(value)}")
    return number


def _length(keyword: str, value: Any, path: str) -> int:
    number = _number(keyword, value, path)
    if number < 0 or not isinstance(number, int):
        raise InvalidRequest(f"#{path}: {keyword} must be a whole number from 0 on, not {shown(value)}")
    if number > MAX_LENGTH:
        raise InvalidRequest(f"#{path}: {keyword}={number} is too large: at most {MAX_LENGTH} is compiled")
    return number


def _types(keyword: str, value: Any, path: str) -> Any:
    given = cast("list[Any]", value) if isinstance(value, list) else [value]
    unknown = [each for each in given if not isinstance(each, str) or each not in TYPES]
    if unknown or not given:
        raise InvalidRequest(
            f"#{path}: Invalid type: {shown(unknown[0] if unknown else value)} isn't one of {', '.join(TYPES)}"
        )
    if not isinstance(value, list):
        return value
    # an integer is a number, too
    return [each for each in dict.fromkeys(given) if each != "integer" or "number" not in given]


def _names(keyword: str, value: Any, path: str) -> list[str]:
    names = checked(keyword, value, list, path)
    if not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"#{path}: required must be an array of strings, not {shown(value)}")
    return list(dict.fromkeys(names))


def _text(keyword: str, value: Any, path: str) -> str:
    return checked(keyword, value, str, path)


def _data(keyword: str, value: Any, path: str) -> Any:
    """A value that the output may have. Its numbers and strings must be exact."""
    if isinstance(value, dict):
        return {key: _data(keyword, each, path) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_data(keyword, each, path) for each in cast("list[Any]", value)]
    if isinstance(value, str) and (dropped := _DROPPED.search(value)):
        raise InvalidRequest(
            f"#{path}: {keyword}={shown(value)}: the character {shown(dropped.group())} can't be compiled"
        )
    return _number(keyword, value, path) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _enum(keyword: str, value: Any, path: str) -> list[Any]:
    return [_data(keyword, each, path) for each in checked(keyword, value, list, path, may_be_empty=False)]


CHECKS: Mapping[str, Callable[[str, Any, str], Any]] = {
    "type": _types,
    "const": _data,
    "enum": _enum,
    "minimum": _bound,
    "maximum": _bound,
    "exclusiveMinimum": _bound,
    "exclusiveMaximum": _bound,
    "multipleOf": _multiple,
    "minLength": _length,
    "maxLength": _length,
    "minItems": _length,
    "maxItems": _length,
    "minProperties": _length,
    "maxProperties": _length,
    "pattern": _text,
    "required": _names,
}
"""For each keyword whose value isn't made of schemas: the function that checks its value, and returns it as compiled.
Its arguments: keyword, value, pointer."""
