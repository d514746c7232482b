"""`raycore status` and `raycore scale`: what is asked of an engine that another process runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from raycore.status import EngineStatus, describe_engine

if TYPE_CHECKING:
    from types import FrameType

    from raycore.control.remote import RemoteEngine

_REFRESH_S = 1.0
"""The engine says no more often how it is."""

_CLEAR = "\x1b[H\x1b[2J"


def add_control_commands(commands: Any) -> None:
    """Add both to what `ArgumentParser.add_subparsers` gave."""
    status = commands.add_parser(
        "status", help="show a running engine's ranks", description="Show the ranks of an engine that runs elsewhere."
    )
    status.set_defaults(command=_status)
    status.add_argument("--watch", action="store_true", help="go on until Ctrl-C, once a second")
    status.add_argument("--json", action="store_true", help="print an object a line")
    scale = commands.add_parser(
        "scale",
        help="change how many ranks a running engine has",
        description="Change how many ranks an engine that runs elsewhere has, while its requests go on.",
    )
    scale.set_defaults(command=_scale)
    scale.add_argument("-dp", "--data-parallel-size", type=int, required=True, metavar="N")
    scale.add_argument(
        "--drain-timeout",
        type=float,
        default=None,
        metavar="S",
        help="seconds in which ranks that leave may finish what they have; default: as the engine was configured",
    )
    for parser in (status, scale):
        parser.add_argument("--name", default=None, metavar="ENGINE", help="needed where there are several")
        parser.add_argument(
            "--address",
            default="auto",
            metavar="HOST:PORT",
            help="the Ray cluster's; default: RAY_ADDRESS, or the one of this machine",
        )


def _status(args: argparse.Namespace) -> int:
    # imported late so that `raycore --help` answers at once
    from raycore.control.remote import RemoteEngine, choose_engine, connected, engine_names

    with connected(args.address):
        engine = RemoteEngine(choose_engine(engine_names(), args.name))
        if not args.watch:
            return _show(engine, args.json)
        is_screen = sys.stdout.isatty() and not args.json
        ended = threading.Event()

        def end(number: int, frame: FrameType | None) -> None:
            ended.set()  # not an exception: raised inside one of Ray's callbacks, it would be lost

        before = signal.signal(signal.SIGINT, end)
        try:
            while not ended.is_set():
                _show(engine, args.json, before=_CLEAR if is_screen else "")
                ended.wait(_REFRESH_S)
        finally:
            signal.signal(signal.SIGINT, before)
        return 0


def _scale(args: argparse.Namespace) -> int:
    from raycore.control.remote import RemoteEngine, choose_engine, connected, engine_names

    with connected(args.address):
        engine = RemoteEngine(choose_engine(engine_names(), args.name))
        try:
            engine.scale(args.data_parallel_size, args.drain_timeout)
        except KeyboardInterrupt:
            print("raycore: the engine goes on with what it was asked for", file=sys.stderr)
            raise
        return _show(engine, as_json=False)


def _show(engine: RemoteEngine, as_json: bool, before: str = "") -> int:
    """Print an engine's status. Returns the exit status that says whether it serves."""
    status, is_answering = engine.status()
    print(before + (_as_json(status) if as_json else describe_engine(status)), flush=True)
    if not is_answering:
        print("raycore: that is old: the engine's program doesn't answer", file=sys.stderr)
    if status.failure is not None:
        print(f"raycore: the engine has failed: {status.failure}", file=sys.stderr)
    return 0 if is_answering and status.failure is None else 1


def _as_json(status: EngineStatus) -> str:
    return json.dumps(dataclasses.asdict(status), ensure_ascii=False)
