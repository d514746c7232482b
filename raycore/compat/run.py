"""`python -m raycore.compat.vllm`: runs Python programs in which `vllm` means raycore, and vLLM's commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from raycore.cli.main import main as raycore_command
from raycore.compat.names import VERSION

IMPORT_PATH = str(Path(__file__).parent / "import_path")
"""The directory whose package `vllm` is raycore's. The environment variable PYTHONPATH passes it on to subprocesses and
to the workers of a local Ray."""
COMMANDS = ("serve", "chat", "complete", "bench", "run-batch", "collect-env")
"""The commands of vLLM that raycore has, too."""
_USAGE = f"""\
usage: python -m raycore.compat.vllm SCRIPT [ARGUMENT]...
       python -m raycore.compat.vllm -m MODULE [ARGUMENT]...
       python -m raycore.compat.vllm -c CODE [ARGUMENT]...
       python -m raycore.compat.vllm {{{",".join(COMMANDS)}}} [FLAG]...
       python -m raycore.compat.vllm --path

Run a Python program in which `vllm` means raycore, with the names of vLLM {VERSION}. The arguments are those of
`python`. Programs that it starts, and workers of a local Ray, get raycore, too: through PYTHONPATH, to which --path
prints what to add. The commands are `raycore`'s.
"""
_TAKE_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_IGNORE_PATH = ("I", "E")


def main(args: Sequence[str]) -> int:  # noqa: RET503  # execve doesn't return
    """Run what `args` say. Returns the exit status of a command; a program takes this process's place."""
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if args else 2
    if args[0] == "--path":
        print(IMPORT_PATH)
        return 0
    if args[0] in COMMANDS and not Path(args[0]).exists():
        return raycore_command()
    problem = _problem(args)
    if problem is not None:
        print(f"raycore: {problem}", file=sys.stderr)
        return 2
    _tell_of_vllm()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_python_path())}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *args], environment)


def run_command(command: str) -> int:
    """Run one of raycore's commands with the arguments of this process, which are those of one of vLLM's modules."""
    if command:
        sys.argv[1:1] = [command]
    return raycore_command()


def _python_path() -> Iterator[str]:
    yield IMPORT_PATH
    yield from (each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != IMPORT_PATH)


def _problem(args: Sequence[str]) -> str | None:
    """Why Python would import another `vllm` than raycore's, or None."""
    options, program = _divided(args)
    ignoring = [each for each in options if not each.startswith("--") and set(each[1:]) & set(_IGNORE_PATH)]
    if ignoring:
        return f"{ignoring[0]} has Python ignore PYTHONPATH, which says where `vllm` is: omit it"
    directory = Path() if not program or program[0].startswith("-") else Path(program[0]).resolve().parent
    if "-P" not in options and any((directory / each).exists() for each in ("vllm/__init__.py", "vllm.py")):
        return f"{directory.resolve()} has a vllm of its own, which Python would import: run this from elsewhere"
    return None


def _divided(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Python's own options, and what follows: a script, or `-m` or `-c`, with arguments."""
    index = 0
    while index < len(args) and args[index].startswith("-") and args[index][:2] not in ("-m", "-c", "-"):
        index += 2 if args[index] in _TAKE_A_VALUE else 1
    return list(args[:index]), list(args[index:])


def _tell_of_vllm() -> None:
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return
    if IMPORT_PATH not in sys.path:
        print(f"raycore: vLLM {version} is installed; this program uses raycore's vllm instead", file=sys.stderr)
