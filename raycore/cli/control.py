"""`raycore status` and `raycore scale`, which show and scale an engine that another process runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raycore.errors import ControlError
from raycore.status import FoundEngine, describe_engine, engine_table

if TYPE_CHECKING:
    from types import FrameType


_REFRESH_S = 1.0
"""Seconds between refreshes of `--watch`: the interval at which engines publish their status."""

_CLEAR = "\x1b[H\x1b[2J"


def add_control_commands(commands: Any) -> None:
    """Add `status` and `scale` to the command line."""
    status = commands.add_parser(
        "status",
        help="show running engines",
        description="Show the ranks of an engine that runs in another process, or a table of the engines if several "
        "run.",
    )
    status.set_defaults(command=_status)
    status.add_argument("--watch", action="store_true", help="Print the status every second until Ctrl-C.")
    status.add_argument(
        "--json",
        action="store_true",
        help="Print the status as JSON, as one object on one line. If several engines run and none is named, the "
        "object has a list of them, `engines`.",
    )
    scale = commands.add_parser(
        "scale",
        help="change a running engine's number of ranks",
        description="Change the number of ranks of an engine that runs in another process. Running requests continue.",
    )
    scale.set_defaults(command=_scale)
    scale.add_argument(
        "-dp",
        "--data-parallel-size",
        type=int,
        required=True,
        metavar="N",
        help="The total number of ranks that the engine is to have.",
    )
    scale.add_argument(
        "--drain-timeout",
        type=float,
        default=None,
        metavar="S",
        help="Seconds that removed ranks have to finish their requests. The rest move to other ranks. Default: the "
        "engine's drain_timeout_s.",
    )
    names = ((status, "Default: all engines."), (scale, "Required if several run."))
    for parser, default in names:
        parser.add_argument("--name", default=None, metavar="ENGINE", help=f"Name of the engine. {default}")
        parser.add_argument(
            "--address",
            default="auto",
            metavar="HOST:PORT",
            help="Address of the engine's Ray cluster. Default: RAY_ADDRESS if it is set, else all clusters with a "
            "node of this user on this machine are searched.",
        )


def _status(args: argparse.Namespace) -> int:
    # imported lazily to keep `raycore --help` fast
    from raycore.control.clusters import connected
    from raycore.control.remote import ask_engines, find_engines

    flags = [flag for flag, is_given in (("--watch", args.watch), ("--json", args.json)) if is_given]
    engines = find_engines(args.address, args.name, " ".join(["raycore status", *flags]))
    if not args.watch:
        return _show(engines, args.json)
    addresses = sorted({engine.address for engine in engines})
    if len(addresses) > 1:
        raise ControlError(
            f"--watch shows the engines of one cluster: add --address {' or --address '.join(addresses)}"
        )
    is_screen = sys.stdout.isatty() and not args.json
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()  # an exception raised here would be lost if the signal arrived during a callback of Ray

    before = signal.signal(signal.SIGINT, end)
    try:
        with connected(addresses[0]):
            while not ended.is_set():
                engines = [engine for engine in ask_engines(args.name) if args.name in (None, engine.name)]
                if not engines:
                    raise ControlError(f"{'the engine' if args.name is None else f'engine {args.name}'} has ended")
                _show(engines, args.json, before=_CLEAR if is_screen else "")
                ended.wait(_REFRESH_S)
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


def _scale(args: argparse.Namespace) -> int:
    from raycore.control.remote import ask_engines, reached

    timeout = "" if args.drain_timeout is None else f" --drain-timeout {args.drain_timeout:g}"
    command = f"raycore scale -dp {args.data_parallel_size}{timeout}"
    with reached(args.address, args.name, command) as engine:
        try:
            engine.call("scale", data_parallel_size=args.data_parallel_size, drain_timeout_s=args.drain_timeout)
        except KeyboardInterrupt:
            print("raycore: interrupted; the engine continues to scale", file=sys.stderr)
            raise
        return _show([each for each in ask_engines(engine.name) if each.name == engine.name], as_json=False)


def _show(engines: Sequence[FoundEngine], as_json: bool, before: str = "") -> int:
    """Print the status of one engine, or a table of several. Returns the exit status: 0 if all are alive, else 1."""
    first, *others = engines
    if not others and first.status is None:
        raise ControlError(str(first.problem))
    if as_json:
        shown = json.dumps(
            _as_json(first) if not others else {"engines": [*map(_as_json, engines)]}, ensure_ascii=False
        )
    else:
        shown = engine_table(engines) if others or first.status is None else describe_engine(first.status)
    print(before + shown, flush=True)
    if not others and first.problem is not None:
        print(f"raycore: {first.problem}", file=sys.stderr)
    return 0 if all(engine.problem is None for engine in engines) else 1


def _as_json(engine: FoundEngine) -> dict[str, Any]:
    """An engine's status, its cluster's address, and what is wrong with it (None: nothing)."""
    status = {"name": engine.name} if engine.status is None else dataclasses.asdict(engine.status)
    return status | {"address": engine.address, "problem": engine.problem}
