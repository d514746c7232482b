"""Adds flags for the options of engines and servers, and reads them from parsed arguments.

The flags are derived from the declarations of the options: see `raycore.options.declared`.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from typing import Any

from raycore.cli.help_text import mark_common
from raycore.cli.parser import Parser
from raycore.config import ENGINE_OPTIONS
from raycore.config.vllm_table import VLLM_OPTIONS, VLLM_SERVER_FLAGS
from raycore.demo import demo_model_path
from raycore.errors import InvalidInput
from raycore.options.declared import Option, check_options
from raycore.options.vllm_options import VllmOption
from raycore.parts.constraints.config.structured_outputs import parsers_of
from raycore.server.listen_options import LISTEN_OPTIONS, ListenOptions
from raycore.server.options import SERVER_OPTIONS, ServerOptions, server_options

_OF_EVERY_COMMAND = ("--log-level",)
"""Flags that are added to each command after its own."""
_ENGINE, _SERVER, _LISTEN, _VLLM = "engine.", "server.", "listen.", "vllm."
"""Prefixes of options' names in parsed arguments. They avoid collisions with flags that a command itself defines."""


def add_engine_options(command: Parser, without: Collection[str] = ()) -> None:
    """Add a flag for each option of an engine.

    Args:
        without: flags to leave out, such as `--seed`, because the command defines them itself.
    """
    command.add_config_flag()
    _add_groups(command, ENGINE_OPTIONS.values(), _ENGINE, without)
    _add_vllm_flags(command, VLLM_OPTIONS.values(), without)


def add_plain_options(command: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Add a flag for each option of an engine to any parser. Parsed arguments have the options' own names.

    Args:
        defaults: the arguments that aren't given, by name.
    """
    _add_groups(command, ENGINE_OPTIONS.values(), "", _taken(command))
    _add_vllm_flags(command, VLLM_OPTIONS.values(), (), "")
    if "enable_log_requests" in defaults:
        command.add_argument("--enable-log-requests", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    command.set_defaults(**defaults)


def add_model_argument(command: Parser) -> None:
    """Accept the model as a positional argument as well as by `--model`."""
    model = ENGINE_OPTIONS["model"]
    command.add_argument(
        f"{_ENGINE}model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        type=FlagType(model),
        help=f"The same as --model. {_help(model)}",
    )


def add_server_options(command: Parser, has_http: bool) -> None:
    """Add a flag for each option of a server. Without `has_http`, options that only concern HTTP are left out."""
    shown = [each for each in SERVER_OPTIONS.values() if has_http or not each.is_http]
    _add_groups(command, shown, _SERVER, ())
    _add_vllm_flags(command, VLLM_SERVER_FLAGS.values(), ())


def add_listen_options(command: Parser) -> None:
    """Add the flags for where a server listens."""
    _add_groups(command, LISTEN_OPTIONS.values(), _LISTEN, ())


def chosen_listen_options(args: argparse.Namespace) -> ListenOptions:
    """Where and how the server is to listen. Raises InvalidConfig if options contradict each other."""
    return ListenOptions(**check_options(LISTEN_OPTIONS, _chosen(args, _LISTEN)))


def chosen_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options given on the command line, as keyword arguments of `LLM`. Default model: the bundled one.

    Raises:
        InvalidConfig: a vLLM flag has a value that raycore does not support.
    """
    for name, value in _chosen(args, _VLLM).items():
        (VLLM_OPTIONS.get(name) or VLLM_SERVER_FLAGS[name]).check(value)
    return {"model": str(demo_model_path()), **_chosen(args, _ENGINE)}


def chosen_server_options(args: argparse.Namespace, model: str, **defaults: Any) -> ServerOptions:
    """The server options for `model`. Those given on the command line take precedence over `defaults`.

    Raises:
        InvalidConfig: an option is invalid.
    """
    parsers = parsers_of(_chosen(args, _ENGINE).get("structured_outputs_config"))
    return server_options(model, {**defaults, **parsers, **_chosen(args, _SERVER)})


class FlagType:
    """Converts a flag's text to an option's value."""

    def __init__(self, option: Option) -> None:
        self.takes_none = option.takes_none and not option.is_open
        self._option = option

    def __call__(self, text: str) -> Any:
        """Convert `text` to the option's value, and check it. Raises ArgumentTypeError, which argparse shows."""
        try:
            return self._option.parse(text)
        except InvalidInput as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def _chosen(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


def _taken(command: argparse.ArgumentParser) -> set[str]:
    """The flags that a parser has already."""
    actions = command._actions  # pyright: ignore[reportPrivateUsage]  # argparse has no other way
    return {flag for action in actions for flag in action.option_strings}


def _add_groups(
    command: argparse.ArgumentParser, options: Iterable[Option], prefix: str, without: Collection[str]
) -> None:
    for title, members in groupby(options, key=lambda each: each.group):
        group = command.add_argument_group(title)
        for each in members:
            flags = [flag for flag in each.flags if flag not in without]
            if flags:
                _add_option(group, each, prefix, flags)


def _add_option(group: Any, option: Option, prefix: str, flags: Iterable[str]) -> None:
    kind: dict[str, Any]
    if option.is_bool:
        kind = {"action": argparse.BooleanOptionalAction}
    elif option.is_list:
        kind = {"nargs": "+", "metavar": option.metavar, "action": "extend" if option.repeats else "store"}
    else:
        kind = {"type": FlagType(option), "metavar": option.metavar, "choices": option.choices or None}
    action = group.add_argument(*flags, dest=f"{prefix}{option.name}", help=_help(option), **kind)
    if option.is_common:
        mark_common(action)
    action.default = argparse.SUPPRESS  # set after creation, because Python 3.10 would show it in the help


def _add_vllm_flags(
    command: argparse.ArgumentParser, options: Iterable[VllmOption], without: Collection[str], prefix: str = _VLLM
) -> None:
    taken = {*without, *_OF_EVERY_COMMAND, *_taken(command)}
    for each in options:
        flags = [flag for flag in each.flags or [f"--{each.name.replace('_', '-')}"] if flag not in taken]
        kind: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction} if each.is_bool else {"type": VllmOption.parse}
        )
        if [] in each.values:
            kind["nargs"] = "+"
        if flags:
            action = command.add_argument(*flags, dest=f"{prefix}{each.name}", help=argparse.SUPPRESS, **kind)
            action.default = argparse.SUPPRESS


def _help(option: Option) -> str:
    default = "" if option.default_text is None else f" Default: {option.default_text}."
    return f"{option.help}{default}".replace("%", "%%")
