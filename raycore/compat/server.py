"""vLLM's server for programs that parse its flags themselves: that of `raycore serve`, in the program's process."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cache
from typing import Any, NamedTuple, TypeVar

from raycore.cli.main import build_parser, run
from raycore.cli.serve_checks import check_headless, check_server
from raycore.config import ENGINE_OPTIONS
from raycore.config.vllm_table import VLLM_OPTIONS, VLLM_SERVER_FLAGS
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig
from raycore.options.declared import Option
from raycore.options.vllm_options import VllmOption
from raycore.server.listen_options import LISTEN_OPTIONS
from raycore.server.options import SERVER_OPTIONS

_OPTIONS: Mapping[str, Mapping[str, Option | VllmOption]] = {
    "engine": ENGINE_OPTIONS,
    "server": SERVER_OPTIONS,
    "listen": LISTEN_OPTIONS,
    "vllm": {**VLLM_SERVER_FLAGS, **VLLM_OPTIONS},
}
"""By the prefix that arguments of `raycore serve` have: what they set."""
_LEFT_OUT = (argparse.SUPPRESS, "config")
"""Actions of a parser of raycore's own class."""
_POSITIONAL = "model_tag"
"""vLLM's name of the model that is given without a flag."""

_ParserT = TypeVar("_ParserT", bound=argparse.ArgumentParser)


class _Flag(NamedTuple):
    """An argument of `raycore serve`."""

    action: argparse.Action
    name: str
    """The attribute of vLLM's parsed arguments."""
    default: Any


def make_arg_parser(parser: _ParserT) -> _ParserT:
    """Add the flags of `raycore serve`, except for `--config`, to a parser, and return it.

    Parsed arguments have the options' names and, where no flag is given, their defaults.
    """
    taken = parser._option_string_actions  # pyright: ignore[reportPrivateUsage]  # argparse has no other way
    for flag in _flags():
        added = copy(flag.action)
        added.option_strings = [each for each in added.option_strings if each not in taken]
        added.dest, added.default = flag.name, flag.default
        if added.option_strings or flag.name == _POSITIONAL:
            parser._add_action(added)  # pyright: ignore[reportPrivateUsage]
    return parser


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Raise InvalidConfig if the server could never start with these arguments."""
    found = _arguments(args)
    if found.headless:
        check_headless(found)
    else:
        check_server(found)


def cli_env_setup() -> None:
    """Nothing: raycore's workers don't depend on variables of the environment."""


async def run_server(args: argparse.Namespace, **uvicorn_kwargs: Any) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Nothing else of the event loop runs meanwhile.

    Args:
        args: of a parser with the flags of `make_arg_parser()`. Attributes may have been changed or left out.
        uvicorn_kwargs: none.

    Raises:
        InvalidConfig: this isn't the main thread, or `uvicorn_kwargs` has any.
        SystemExit: the server couldn't start, or the engine failed. A line of the standard error says why.
    """
    if uvicorn_kwargs:
        raise InvalidConfig(f"run_server() takes no {', '.join(uvicorn_kwargs)}: the flags of `raycore serve` set it")
    if threading.current_thread() is not threading.main_thread():
        raise InvalidConfig("run_server(): call it on the main thread, which gets the signals that end a server")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's waits for the event loop
    try:
        status = run(_arguments(args))
    finally:
        signal.signal(signal.SIGINT, before)
    if status:
        raise SystemExit(status)


def _arguments(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments as the parser of `raycore serve` returns them, which has those that aren't the default."""
    found = build_parser().parse_args(["serve"])
    for flag in _flags():
        value = _listed(getattr(args, flag.name, flag.default))
        if value != flag.default:
            setattr(found, flag.action.dest, value)
    return found


@cache
def _flags() -> tuple[_Flag, ...]:
    """The flags of `raycore serve`. The positional model comes last, and so takes precedence."""
    commands = next(each for each in build_parser().actions if each.nargs == argparse.PARSER)
    actions: Iterator[argparse.Action] = iter(commands.choices["serve"].actions)  # pyright: ignore
    flags = [_flag(each) for each in actions if each.dest not in _LEFT_OUT]
    return tuple(sorted(flags, key=lambda flag: flag.name == _POSITIONAL))


def _flag(action: argparse.Action) -> _Flag:
    prefix, _, name = action.dest.rpartition(".")
    if not action.option_strings:
        return _Flag(action, _POSITIONAL, None)
    if not prefix:
        return _Flag(action, name, None if action.default == argparse.SUPPRESS else action.default)
    option = _OPTIONS[prefix][name]
    if isinstance(option, VllmOption):
        default = option.neutral
        default = option.parse(default) if isinstance(default, str) else default  # as argparse does
    else:
        default = str(demo_model_path()) if name == "model" else option.default
    return _Flag(action, name, _listed(default))


def _listed(value: Any) -> Any:
    """A tuple as a list, to which argparse can add."""
    return list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
