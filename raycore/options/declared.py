"""Options are declared once, as annotated fields of the configuration's structs. Their uses are derived from that.

::

    class CacheConfig(msgspec.Struct, frozen=True):
        block_size: Annotated[int, msgspec.Meta(ge=1, le=1024), option("Tokens in a block of the KV cache.")] = 16

`LLM(block_size=...)`, `--block-size` with its help text, Ray Serve's `block_size`, the checks and error messages, the
types in `types.py` and the page `docs/options.md` all come from this field. This module itself declares no
options: see `raycore.config` and `raycore.server.options`.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from raycore.errors import InvalidConfig
from raycore.json_fields import shortened
from raycore.plain_errors import decode_problem, either, unsupported_value

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])
_StructT = TypeVar("_StructT", bound=msgspec.Struct)

_DECLARED = "option"

_MAX_INT = 2**63 - 1
"""What messages between processes can hold."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class _Declared:
    """The arguments of `option()`."""

    help: str
    name: str | None
    flags: tuple[str, ...]
    metavar: str | None
    default: str | None
    expected: str | None
    convert: Callable[[Any], Any] | None
    is_secret: bool
    is_http: bool
    repeats: bool
    is_common: bool


def option(
    text: str,
    *,
    name: str | None = None,
    flags: tuple[str, ...] = (),
    metavar: str | None = None,
    default: str | None = None,
    expected: str | None = None,
    convert: Callable[[Any], Any] | None = None,
    is_secret: bool = False,
    is_http: bool = False,
    repeats: bool = False,
    is_common: bool = False,
) -> msgspec.Meta:
    """Declare a field as an option. Put the result into the field's `Annotated`, next to a `msgspec.Meta` with the
    field's range.

    If the field has no default and the user doesn't set the option, its value is computed from other options.

    Args:
        text: the help text, in full sentences.
        name: the name as a keyword argument. None: the field's name.
        flags: the command-line flags. Empty: the name with hyphens.
        metavar: the placeholder for the value in the help text. None: derived from the type.
        default: a text that describes the default. None: the default value is shown.
        expected: a text that describes the valid values. None: derived from type and range.
        convert: applied to a value before the value is checked. The annotation of its parameter is the type that users
            may pass.
        is_secret: the value must not appear in manifests and messages.
        is_http: the option concerns only servers that speak HTTP, so `raycore run-batch` doesn't have it.
        repeats: a flag that is given again adds to a list. Otherwise the last one counts.
        is_common: most users need it sooner or later, so that the short form of `--help` shows it.
    """
    declared = _Declared(
        *(text, name, flags, metavar, default, expected, convert, is_secret, is_http, repeats, is_common)
    )
    return msgspec.Meta(description=text, extra={_DECLARED: declared})


def json_option(
    text: str, *, convert: Callable[[Any], Any], flags: tuple[str, ...] = (), default: str | None = None
) -> msgspec.Meta:
    """Declare a field as an option whose value is given as a dict, or as the text of a JSON object: see `option`."""
    expected = "a dict or a JSON object"
    return option(text, flags=flags, metavar="JSON", default=default, expected=expected, convert=convert)


class Option:
    """An option of an engine or a server: its names, type, range and default."""

    def __init__(self, field: msgspec.structs.FieldInfo, declared: _Declared, group: str) -> None:
        self.field = field.name
        """The option's name in the struct."""
        self.name = declared.name or field.name
        """The option's name as a keyword argument."""
        self.group = group
        """The heading under which help texts and docs list the option."""
        self.help = declared.help
        self.flags = declared.flags or (f"--{self.name.replace('_', '-')}",)
        self.is_secret = declared.is_secret
        self.is_http = declared.is_http
        self.repeats = declared.repeats
        self.is_common = declared.is_common
        self.is_open = field.required
        """Whether the value is computed from other options if the user doesn't set the option."""
        self.default: Any = None if field.required else field.default
        self._type = field.type
        self._kinds = list(_kinds(field.type))
        self._declared = declared

    @property
    def default_text(self) -> str | None:
        """The default as text; None if help texts show no default."""
        if self._declared.default is not None:
            return self._declared.default
        if self.default is None or self.default == ():
            return None
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def takes_none(self) -> bool:
        """Whether None is kept as the option's value. Otherwise None is replaced by the default."""
        return self.is_open or self._has(NoneType)

    @property
    def is_bool(self) -> bool:
        """Whether the option's value is a bool."""
        return self._has(bool)

    @property
    def is_list(self) -> bool:
        """Whether the option's value is a list."""
        return self._has(tuple)

    @property
    def choices(self) -> tuple[str, ...]:
        """The valid values if they are a fixed set of names, else empty."""
        return tuple(name for kind in self._kinds for name in kind.names)

    @property
    def metavar(self) -> str | None:
        """The placeholder for the value in a help text; None if the choices are shown instead."""
        if self._declared.metavar is not None or self.choices:
            return self._declared.metavar
        if self._has(int) or self._has(float):
            return "S" if self.name.endswith("_s") else "N"
        return "NAME"

    @property
    def expected(self) -> str:
        """The valid values as text, for the end of a sentence: `a positive integer or None`."""
        unit = " of seconds" if self.name.endswith("_s") else ""
        if self._declared.expected is not None:
            words = [self._declared.expected]
        else:
            words = [word for kind in self._kinds for word in kind.expected(unit)]
        if self.takes_none and not self.is_open:
            words.append("None")
        return either(words)

    @property
    def annotation(self) -> Any:
        """The type of the values that users may pass, without the range."""
        kinds: list[Any] = [Literal[self.choices] if kind.names else kind.plain for kind in self._kinds]
        if self._declared.convert is not None:
            hints = get_type_hints(self._declared.convert)
            kinds = [hint for name, hint in hints.items() if name != "return"]
        return Union[(*kinds, None) if self.is_open else tuple(kinds)]  # noqa: UP007  # not known before

    def check(self, value: object) -> Any:
        """Check a value, and return it in the field's type. None becomes the default, unless None is a valid value.

        Raises:
            InvalidConfig: the value has the wrong type, or is out of range.
        """
        if value is None and (self.is_open or not self.takes_none):
            return self.default
        if isinstance(value, float):
            value = float(value)  # may be a numpy scalar
        try:
            # a flag's value has been converted already
            if self._declared.convert is not None and value is not None and not isinstance(value, msgspec.Struct):
                value = self._declared.convert(value)
                if value is None and self.is_open:
                    return self.default
            checked = msgspec.convert(value, self._type)
        except (msgspec.ValidationError, TypeError):
            raise self._refusal(value) from None
        if isinstance(checked, float) and not math.isfinite(checked):
            raise self._refusal(value)
        if isinstance(checked, int) and abs(checked) > _MAX_INT:
            raise InvalidConfig(f"{self.name}={value!r} is too large: the largest number is {_MAX_INT}")
        return checked

    def parse(self, text: str) -> Any:
        """Convert a flag's text to a value, and check it. Raises InvalidConfig."""
        return self.check(self._value_of(text))

    def _value_of(self, text: str) -> Any:
        lowered = text.lower()
        if lowered == "none" and self.takes_none and (self.choices or not self._has(str)):
            return None
        if self._has(bool) and lowered in _TRUE + _FALSE:
            return lowered in _TRUE
        try:
            if self._has(int) and self._declared.convert is not None:
                return text if re.fullmatch(r"\s*[+-]?\d+\s*", text) is None else int(text)
            return int(text) if self._has(int) else float(text) if self._has(float) else text
        except ValueError:
            raise self._refusal(text) from None

    def _has(self, plain: type) -> bool:
        return any(kind.plain is plain for kind in self._kinds)

    def _refusal(self, value: object) -> InvalidConfig:
        if self._declared.expected is None and all(kind.names or kind.plain is NoneType for kind in self._kinds):
            usable = [*self.choices, None] if self.takes_none and not self.is_open else self.choices
            return InvalidConfig(unsupported_value(self.name, value, usable))
        found = f"the value of {self.name}" if self.is_secret else f"{self.name}={value!r}"
        return InvalidConfig(f"{found} isn't {self.expected}")


@cache
def options_of(struct: type[msgspec.Struct], group: str) -> tuple[Option, ...]:
    """The options that a struct declares, in the order of its fields."""
    return tuple(
        Option(field, meta.extra[_DECLARED], group)
        for field in msgspec.structs.fields(struct)
        for meta in getattr(field.type, "__metadata__", ())
        if isinstance(meta, msgspec.Meta) and meta.extra and _DECLARED in meta.extra
    )


def check_options(options: Mapping[str, Option], given: Mapping[str, object]) -> dict[str, Any]:
    """Check the given values, and return them by keyword argument.

    Raises:
        InvalidConfig: an option is unknown, or its value has the wrong type or is out of range.
    """
    for name in given:
        if name not in options:
            raise InvalidConfig(f"unknown option {name!r}{suggestion(name, options)}")
    return {name: options[name].check(value) for name, value in given.items()}


def json_object(option: str, value: object) -> dict[str, Any]:
    """Return a copy of a dict, or of the object in a JSON text, that is the value of `option`.

    Raises:
        InvalidConfig: the value is neither.
    """
    found: Any = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError as error:
            raise InvalidConfig(f"{option}={value!r} isn't a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise InvalidConfig(f"{option}={value!r} isn't a dict or a JSON object")
    return dict(cast("dict[str, Any]", found))


def settings_of(option: str, given: Mapping[str, Any], struct: type[_StructT]) -> _StructT:
    """Return the settings of an option, an object in JSON, as a struct.

    Raises:
        InvalidConfig: a setting is unknown, missing or invalid.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    for name, value in given.items():
        if name not in fields:
            nearest = difflib.get_close_matches(name, fields, n=1)
            advice = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(fields)}"
            raise InvalidConfig(f"{option}: unknown setting {name!r}; {advice}")
        try:
            msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError as error:
            names = [each for kind in _kinds(fields[name].type) for each in kind.names]
            problem = f"{name}={shortened(value)}: {decode_problem(error)}"
            raise InvalidConfig(f"{option}: {unsupported_value(name, value, names) if names else problem}") from None
    missing = [name for name, field in fields.items() if field.required and name not in given]
    if missing:
        raise InvalidConfig(f"{option}: {missing[0]} is missing")
    return msgspec.convert(given, struct)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar known name, or where all names are listed."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else "; docs/options.md lists all options"


def with_options(options: Mapping[str, Option]) -> Callable[[_FunctionT], _FunctionT]:
    """Decorator for functions with `**options`. Adds the options to their signatures, for `help()` and editors."""

    def add(function: _FunctionT) -> _FunctionT:
        signature = inspect.signature(function)
        own = [
            each
            for each in signature.parameters.values()
            if each.kind is not inspect.Parameter.VAR_KEYWORD and not each.name.startswith("_")
        ]
        names = {parameter.name for parameter in own}
        added = [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.annotation
            )
            for each in options.values()
            if each.name not in names
        ]
        function.__signature__ = signature.replace(parameters=[*own, *added])  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return add


class _Kind(NamedTuple):
    """One of the types that an option's value may have, with the range of the values of this type."""

    plain: Any
    names: tuple[str, ...] = ()
    """The valid values if they are a fixed set of names, else empty."""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def expected(self, unit: str) -> list[str]:
        """Descriptions of the valid values of this type. `unit` follows the word "number"."""
        if self.names:
            return [repr(name) for name in self.names]
        if self.plain is int:
            return ["a positive integer" if self.at_least == 1 and self.at_most is None else f"an integer{self._range}"]
        if self.plain is float:
            is_positive = self.above == 0 and self.at_most is None
            return [f"a positive number{unit}" if is_positive else f"a number{unit}{self._range}"]
        return {bool: ["True or False"], str: ["a string"], tuple: ["a list of strings"]}.get(self.plain, [])

    @property
    def _range(self) -> str:
        if self.at_most is not None:
            start = f" above {self.above:g}, at most" if self.at_least is None else f" from {self.at_least} to"
            return f"{start} {self.at_most}"
        return "" if self.at_least is None else f", {self.at_least:g} or more"


def _kinds(hint: Any) -> Iterator[_Kind]:
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *metas = get_args(hint)
        for kind in _kinds(inner):
            yield reduce(_narrowed, metas, kind)
    elif origin in (Union, UnionType):
        for each in get_args(hint):
            yield from _kinds(each)
    elif origin is Literal:
        yield _Kind(str, get_args(hint))
    else:
        yield _Kind(origin or hint)


def _narrowed(kind: _Kind, meta: msgspec.Meta) -> _Kind:
    limits = {"at_least": meta.ge, "above": meta.gt, "at_most": meta.le}
    return kind._replace(**{name: limit for name, limit in limits.items() if limit is not None})
