"""`EngineArgs` and `AsyncEngineArgs`: the arguments of an engine as an object, with vLLM's names.

The fields are the engine's options (`ENGINE_OPTIONS`) and vLLM's options that have no effect (`VLLM_OPTIONS`). Nothing
is declared here a second time.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from raycore.config import ENGINE_OPTIONS, EngineConfig, resolve
from raycore.config.vllm_table import ONLY_OF_SERVERS, VLLM_OPTIONS
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig
from raycore.options.declared import suggestion
from raycore.short_tracebacks import ends_traceback

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from raycore.options.types import EngineOptions

_ArgsT = TypeVar("_ArgsT", bound="_Arguments")
_ParserT = TypeVar("_ParserT", bound=argparse.ArgumentParser)


class _Arguments:
    """The arguments of an engine, of which each is an attribute. `LLM(**vars(arguments))` starts the engine.

    Values are checked when they are used. The default model is the bundled one.

    Raises:
        InvalidConfig: from the constructor, if an argument is unknown.
    """

    @ends_traceback
    def __init__(self, model: str | os.PathLike[str] | None = None, *args: object, **given: Any) -> None:
        if args:
            raise InvalidConfig(f"{type(self).__name__}: only the model is given by position: name {args[0]!r}")
        if model is not None:
            given["model"] = model
        names = [each.name for each in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        for name in given:
            if name not in names:
                raise InvalidConfig(f"{type(self).__name__}: unknown option {name!r}{suggestion(name, names)}")
        for each in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            setattr(self, each.name, given[each.name] if each.name in given else _default(each))

    @classmethod
    def from_cli_args(cls: type[_ArgsT], args: argparse.Namespace) -> _ArgsT:
        """Take the arguments from those that a parser returned. The parser may have others, too."""
        names = [each.name for each in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    @classmethod
    def add_cli_args(cls, parser: _ParserT) -> _ParserT:
        """Add a flag for each argument to a parser, and return the parser."""
        from raycore.cli.engine_options import add_plain_options  # imported lazily: only programs with flags need it

        defaults = {each.name: _default(each) for each in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
        add_plain_options(parser, defaults)
        return parser

    @ends_traceback
    def create_engine_config(self, usage_context: object = None, headless: bool = False) -> EngineConfig:
        """Check the arguments and compute what was not given. `usage_context` and `headless` have no effect.

        Raises:
            InvalidConfig: an argument is invalid, or two arguments contradict each other. The message names them.
            InvalidCheckpoint: `model` isn't a checkpoint that raycore supports.
        """
        return resolve(**self._options())

    def __repr__(self) -> str:
        declared = {each.name: _default(each) for each in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]
        chosen = [f"{name}={value!r}" for name, value in vars(self).items() if value != declared.get(name)]
        return f"{type(self).__name__}({', '.join(chosen)})"

    def _options(self) -> Any:
        return {name: value for name, value in vars(self).items() if name not in _NOT_OF_THE_ENGINE}


_NOT_OF_THE_ENGINE = ("use_tqdm_on_load", "enable_log_requests")


def _default(declared: dataclasses.Field[Any]) -> Any:
    if declared.default_factory is not dataclasses.MISSING:
        return declared.default_factory()
    return declared.default


def _declared(name: str, annotation: Any, default: Any) -> tuple[str, Any, Any]:
    if isinstance(default, dict | list):
        return name, annotation, dataclasses.field(default_factory=partial(copy, cast("Any", default)))
    return name, annotation, dataclasses.field(default=default)


def _demo_model() -> str:
    return str(demo_model_path())


def _fields() -> Iterator[tuple[str, Any, Any]]:
    yield "model", str, dataclasses.field(default_factory=_demo_model)
    for option in ENGINE_OPTIONS.values():
        if option.name != "model":
            yield _declared(option.name, option.annotation, option.default)
    for option in VLLM_OPTIONS.values():
        if option.name not in ENGINE_OPTIONS:
            yield _declared(option.name, Any, option.neutral)
    for name in ONLY_OF_SERVERS:
        if name not in ENGINE_OPTIONS:
            yield _declared(name, Any, None)
    yield "use_tqdm_on_load", bool, dataclasses.field(default=True)


def _make(name: str, fields: list[tuple[str, Any, Any]], base: type) -> Any:
    """A dataclass with these fields, whose constructor is that of `_Arguments`."""
    made = dataclasses.make_dataclass(name, fields, bases=(base,), init=False, repr=False, namespace={"__doc__": ""})
    made.__module__, made.__doc__ = __name__, _Arguments.__doc__
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(each.name, kinds[each.name != "model"], default=_default(each), annotation=each.type)
        for each in dataclasses.fields(made)
    ]
    setattr(made, "__signature__", inspect.Signature(parameters))  # noqa: B010  # for help() and editors
    return made


if TYPE_CHECKING:

    class EngineArgs(_Arguments):
        """The arguments of an engine."""

        def __init__(self, model: str | os.PathLike[str] | None = None, **given: Unpack[EngineOptions]) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    class AsyncEngineArgs(EngineArgs):
        """The arguments of an engine for asyncio."""

else:
    EngineArgs = _make("EngineArgs", list(_fields()), _Arguments)
    AsyncEngineArgs = _make("AsyncEngineArgs", [_declared("enable_log_requests", bool, False)], EngineArgs)
