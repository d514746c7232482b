"""`raycore completion`: a script with which a shell completes raycore's commands and flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from raycore.cli.parser import Parser

_SHELLS = ("bash", "zsh", "fish")
_PATHS = ("DIR", "FILE", "FILE_OR_TEXT")
"""What stands for values that are completed as paths."""

_DESCRIPTION = """\
Print a script with which the shell completes raycore's commands and flags.

bash:  source <(raycore completion bash)
zsh:   source <(raycore completion zsh)
fish:  raycore completion fish | source
"""


def add_completion_command(commands: Any, parser: Parser) -> None:
    """Add `completion` to the command line that this parser, which will have all commands, reads."""
    command = commands.add_parser(
        "completion",
        help="print a script for the shell's completion",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=partial(_completion, parser, commands.choices))
    command.add_argument("shell", choices=_SHELLS, help="Which shell.")


def _completion(parser: Parser, commands: Mapping[str, Parser], args: argparse.Namespace) -> int:
    # imported late so that `raycore --help` answers at once
    import shtab

    for command in commands.values():
        for action in command.actions:
            if action.metavar in _PATHS:
                setattr(action, "complete", shtab.FILE)  # noqa: B010  # argparse does not know it
    print(shtab.complete(parser, args.shell))
    return 0
