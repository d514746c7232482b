"""`python -m raycore.compat.vllm`: runs Python programs in which `vllm` means raycore, and vLLM's commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from raycore.cli.main import main as raycore_command
from raycore.compat.names import SUBCOMMANDS, VERSION
from raycore.compat.ray_hook import HOOK
from raycore.compat.rewriting import rewritten
from raycore.errors import InvalidInput

IMPORT_PATH = str(Path(__file__).parent / "import_path")
"""The directory whose package `vllm` is raycore's. The environment variable PYTHONPATH passes it on to subprocesses and
to the workers of a local Ray."""
_COMMANDS_PATH = str(Path(IMPORT_PATH) / "bin")
"""The directory of the command `vllm`, for programs that start it."""
_USAGE = f"""\
usage: python -m raycore.compat.vllm SCRIPT [ARGUMENT]...
       python -m raycore.compat.vllm -m MODULE [ARGUMENT]...
       python -m raycore.compat.vllm -c CODE [ARGUMENT]...
       python -m raycore.compat.vllm {{{",".join(SUBCOMMANDS)}}} [FLAG]...
       python -m raycore.compat.vllm --path
       python -m raycore.compat.vllm --rewrite SCRIPT

Run a Python program in which `vllm` means raycore, with the names of vLLM {VERSION}. The arguments are those of
`python`. Programs that it starts, and workers of a local Ray, get raycore, too: through PYTHONPATH, to which --path
prints what to add. The command `vllm` that it starts, and the commands here, are `raycore`'s.
--rewrite prints a script with imports of raycore, which needs this command no more.
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
    if args[0] == "--rewrite" and len(args) == 2:
        return _rewrite(args[1])
    if args[0] in SUBCOMMANDS and not Path(args[0]).exists():
        return raycore_command()
    problem = _problem(args)
    if problem is not None:
        print(f"raycore: {problem}", file=sys.stderr)
        return 2
    _tell_of_vllm()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(_first(IMPORT_PATH, os.environ.get("PYTHONPATH", ""))),
        "PATH": os.pathsep.join(_first(_COMMANDS_PATH, os.environ.get("PATH", os.defpath))),
        "RAYCORE_COMPAT_PYTHON": sys.executable,
        "RAY_RUNTIME_ENV_HOOK": os.environ.get("RAY_RUNTIME_ENV_HOOK", HOOK),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *args], environment)


def _rewrite(script: str) -> int:
    try:
        print(rewritten(Path(script).read_text(encoding="utf-8")), end="")
    except (InvalidInput, SyntaxError, UnicodeDecodeError, OSError) as error:
        print(f"raycore: {script}: {error}", file=sys.stderr)
        return 1
    return 0


def run_command(command: str) -> int:
    """Run one of raycore's commands with the arguments of this process, which are those of one of vLLM's modules."""
    if command:
        sys.argv[1:1] = [command]
    return raycore_command()


def _first(directory: str, path: str) -> Iterator[str]:
    yield directory
    yield from (each for each in path.split(os.pathsep) if each and each != directory)


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
