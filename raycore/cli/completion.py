"""`raycore completion`: a script for shell completion of raycore's commands and flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from raycore.cli.parser import Parser

_SHELLS = ("bash", "zsh", "fish")
_PATHS = ("DIR", "FILE", "FILE_OR_TEXT")
"""Metavars of arguments whose values the shell completes as paths."""

_DESCRIPTION = """\
Print a script that enables shell completion of raycore's commands and flags.

bash:  source <(raycore completion bash)
zsh:   source <(raycore completion zsh)
fish:  raycore completion fish | source
"""


def add_completion_command(commands: Any, parser: Parser) -> None:
    """Add `completion` to the commands of `parser`. Commands that are added to `parser` later are completed, too."""
    command = commands.add_parser(
        "completion",
        help="print a shell completion script",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=partial(_completion, parser, commands.choices))
    command.add_argument("shell", choices=_SHELLS, help="The shell that the script is for.")


def _completion(parser: Parser, commands: Mapping[str, Parser], args: argparse.Namespace) -> int:
    # imported lazily to keep `raycore --help` fast
    import shtab

    for command in commands.values():
        for action in command.actions:
            if action.metavar in _PATHS:
                setattr(action, "complete", shtab.FILE)  # noqa: B010  # argparse does not declare the attribute
    print(shtab.complete(parser, args.shell))
    return 0
