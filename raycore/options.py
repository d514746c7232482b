"""Options are declared once, as annotated fields of the configuration's structs; the rest is derived from that.

::

    class CacheConfig(msgspec.Struct, frozen=True):
        block_size: Annotated[int, msgspec.Meta(ge=1, le=1024), option("Tokens in a block of the KV cache.")] = 16

`LLM(block_size=...)`, `--block-size` with its help, Ray Serve's `block_size`, their checks and error messages, the
types in `option_types.py` and the page `docs/options.md` all come from this field. This file knows no option itself.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from raycore.errors import InvalidConfig

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])

_DECLARED = "option"

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class _Declared:
    """What `option()` adds to a field."""

    help: str
    name: str | None
    flags: tuple[str, ...]
    metavar: str | None
    default: str | None
    expected: str | None
    convert: Callable[[Any], Any] | None
    is_secret: bool
    is_http: bool


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
) -> msgspec.Meta:
    """Make a field an option: for use in its `Annotated`, beside a `msgspec.Meta` that gives its range.

    A field without a default is an option that may be left open (None): something else decides it then.

    Args:
        text: the help, in whole sentences.
        name: the keyword; None is the field's name.
        flags: as the command line spells it; none: the name with hyphens.
        metavar: stands for the value in the help; None: from the type.
        default: in words, where the default's value doesn't say it.
        expected: what is allowed, in words, where type and range don't say it.
        convert: what is given, to what is checked. The annotation of its parameter is what users may give.
        is_secret: the value is not for manifests and messages.
        is_http: it only concerns a server that speaks HTTP.
    """
    declared = _Declared(text, name, flags, metavar, default, expected, convert, is_secret, is_http)
    return msgspec.Meta(description=text, extra={_DECLARED: declared})


class Option:
    """One option, whichever way it is given."""

    def __init__(self, field: msgspec.structs.FieldInfo, declared: _Declared, group: str) -> None:
        self.field = field.name
        """Its name in the struct."""
        self.name = declared.name or field.name
        """Its name as a keyword argument."""
        self.group = group
        """The part of the configuration that it belongs to, as a title."""
        self.help = declared.help
        self.flags = declared.flags or (f"--{self.name.replace('_', '-')}",)
        self.is_secret = declared.is_secret
        self.is_http = declared.is_http
        self.is_open = field.required
        """Whether something else decides it where it isn't given."""
        self.default: Any = None if field.required else field.default
        self._type = field.type
        self._kinds = list(_kinds(field.type))
        self._declared = declared

    @property
    def default_text(self) -> str | None:
        """The default in words, None where there is nothing to say."""
        if self._declared.default is not None:
            return self._declared.default
        if self.default is None or self.default == ():
            return None
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def takes_none(self) -> bool:
        """Whether None is a value of its own."""
        return self.is_open or self._has(NoneType)

    @property
    def is_bool(self) -> bool:
        """Whether it is on or off."""
        return self._has(bool)

    @property
    def is_list(self) -> bool:
        """Whether it takes any number of values."""
        return self._has(tuple)

    @property
    def choices(self) -> tuple[str, ...]:
        """All values that there are, where they have names."""
        return tuple(name for kind in self._kinds for name in kind.names)

    @property
    def metavar(self) -> str | None:
        """What stands for the value in a help text; None where the choices do."""
        if self._declared.metavar is not None or self.choices:
            return self._declared.metavar
        if self._has(int) or self._has(float):
            return "S" if self.name.endswith("_s") else "N"
        return "NAME"

    @property
    def expected(self) -> str:
        """What is allowed, as the end of a sentence: `a positive integer or None`."""
        unit = " of seconds" if self.name.endswith("_s") else ""
        if self._declared.expected is not None:
            words = [self._declared.expected]
        else:
            words = [word for kind in self._kinds for word in kind.expected(unit)]
        if self.takes_none and not self.is_open:
            words.append("None")
        *first, last = words
        return f"{', '.join(first)}{',' if ',' in first[-1] else ''} or {last}" if first else last

    @property
    def annotation(self) -> Any:
        """The type that users may give, without ranges."""
        kinds: list[Any] = [Literal[self.choices] if kind.names else kind.plain for kind in self._kinds]
        if self._declared.convert is not None:
            hints = get_type_hints(self._declared.convert)
            kinds = [hint for name, hint in hints.items() if name != "return"]
        return Union[(*kinds, None) if self.is_open else tuple(kinds)]  # noqa: UP007  # not known before

    def check(self, value: object) -> Any:
        """The value as the struct holds it. None is the default, where it isn't a value of its own.

        Raises:
            InvalidConfig: it has the wrong type, or is out of range.
        """
        if value is None and (self.is_open or not self.takes_none):
            return self.default
        if isinstance(value, float):
            value = float(value)  # numpy's are floats, too
        try:
            if self._declared.convert is not None and value is not None:
                value = self._declared.convert(value)
            checked = msgspec.convert(value, self._type)
        except (msgspec.ValidationError, TypeError):
            raise self._refusal(value) from None
        if isinstance(checked, float) and not math.isfinite(checked):
            raise self._refusal(value)
        return checked

    def parse(self, text: str) -> Any:
        """The value that a flag's text stands for, checked. Raises InvalidConfig."""
        return self.check(self._value_of(text))

    def _value_of(self, text: str) -> Any:
        lowered = text.lower()
        if lowered == "none" and self.takes_none and (self.choices or not self._has(str)):
            return None
        if self._has(bool) and lowered in _TRUE + _FALSE:
            return lowered in _TRUE
        try:
            return int(text) if self._has(int) else float(text) if self._has(float) else text
        except ValueError:
            raise self._refusal(text) from None

    def _has(self, plain: type) -> bool:
        return any(kind.plain is plain for kind in self._kinds)

    def _refusal(self, value: object) -> InvalidConfig:
        found = "the value given" if self.is_secret else f"{self.name}={value!r}"
        return InvalidConfig(f"{found} is not {self.expected}")


def options_of(struct: type[msgspec.Struct], group: str) -> list[Option]:
    """The options that a struct declares, in its order."""
    return [
        Option(field, meta.extra[_DECLARED], group)
        for field in msgspec.structs.fields(struct)
        for meta in getattr(field.type, "__metadata__", ())
        if isinstance(meta, msgspec.Meta) and meta.extra and _DECLARED in meta.extra
    ]


def check_options(options: Mapping[str, Option], given: Mapping[str, object]) -> dict[str, Any]:
    """The values given, checked, by keyword.

    Raises:
        InvalidConfig: an option isn't known, has the wrong type, or is out of range.
    """
    for name in given:
        if name not in options:
            raise InvalidConfig(f"unknown option {name!r}{suggestion(name, options)}")
    return {name: options[name].check(value) for name, value in given.items()}


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that isn't known: the nearest one, or where all are listed."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else "; docs/options.md lists all options"


def with_options(options: Mapping[str, Option]) -> Callable[[_FunctionT], _FunctionT]:
    """Have a function that takes `**options` show them in its signature: `help()` and editors read that."""

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
    """One of the types that a value may have, with its range."""

    plain: Any
    names: tuple[str, ...] = ()
    """The values, where all of them are named."""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def expected(self, unit: str) -> list[str]:
        """What is allowed, in words."""
        if self.names:
            return [repr(name) for name in self.names]
        if self.plain is int:
            return ["a positive integer" if self.at_least == 1 and self.at_most is None else f"an integer{self._range}"]
        if self.plain is float:
            is_positive = self.above == 0 and self.at_most is None
            return [f"a positive number{unit}" if is_positive else f"a number{unit}{self._range}"]
        return {bool: ["True or False"], str: ["text"], tuple: ["a list of texts"]}.get(self.plain, [])

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
