"""`raycore status` and `raycore scale`, which show and scale an engine that another process runs."""

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
"""Seconds between refreshes of `--watch`: the interval at which engines publish their status."""

_CLEAR = "\x1b[H\x1b[2J"


def add_control_commands(commands: Any) -> None:
    """Add `status` and `scale` to the command line."""
    status = commands.add_parser(
        "status",
        help="show a running engine's ranks",
        description="Show the ranks of an engine that runs in another process.",
    )
    status.set_defaults(command=_status)
    status.add_argument("--watch", action="store_true", help="Print the status every second until Ctrl-C.")
    status.add_argument("--json", action="store_true", help="Print the status as JSON, as one object on one line.")
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
    for parser in (status, scale):
        parser.add_argument(
            "--name", default=None, metavar="ENGINE", help="Name of the engine. Required if several run."
        )
        parser.add_argument(
            "--address",
            default="auto",
            metavar="HOST:PORT",
            help="Address of the engine's Ray cluster. Default: RAY_ADDRESS if it is set, else all clusters with a "
            "node of this user on this machine are searched.",
        )


def _status(args: argparse.Namespace) -> int:
    # imported lazily to keep `raycore --help` fast
    from raycore.control.remote import reached

    flags = [flag for flag, is_given in (("--watch", args.watch), ("--json", args.json)) if is_given]
    with reached(args.address, args.name, " ".join(["raycore status", *flags])) as engine:
        if not args.watch:
            return _show(engine, args.json)
        is_screen = sys.stdout.isatty() and not args.json
        ended = threading.Event()

        def end(number: int, frame: FrameType | None) -> None:
            ended.set()  # an exception raised here would be lost if the signal arrived during a callback of Ray

        before = signal.signal(signal.SIGINT, end)
        try:
            while not ended.is_set():
                _show(engine, args.json, before=_CLEAR if is_screen else "")
                ended.wait(_REFRESH_S)
        finally:
            signal.signal(signal.SIGINT, before)
        return 0


def _scale(args: argparse.Namespace) -> int:
    from raycore.control.remote import reached

    timeout = "" if args.drain_timeout is None else f" --drain-timeout {args.drain_timeout:g}"
    command = f"raycore scale -dp {args.data_parallel_size}{timeout}"
    with reached(args.address, args.name, command) as engine:
        try:
            engine.call("scale", data_parallel_size=args.data_parallel_size, drain_timeout_s=args.drain_timeout)
        except KeyboardInterrupt:
            print("raycore: interrupted; the engine continues to scale", file=sys.stderr)
            raise
        return _show(engine, as_json=False)


def _show(engine: RemoteEngine, as_json: bool, before: str = "") -> int:
    """Print an engine's status. Returns the exit status: 0 if the engine is alive, else 1."""
    status, is_answering = engine.status()
    print(before + (_as_json(status) if as_json else describe_engine(status)), flush=True)
    if not is_answering:
        print("raycore: this is the last known status: the engine's driver process doesn't respond", file=sys.stderr)
    if status.failure is not None:
        print(f"raycore: the engine has failed: {status.failure}", file=sys.stderr)
    return 0 if is_answering and status.failure is None else 1


def _as_json(status: EngineStatus) -> str:
    return json.dumps(dataclasses.asdict(status), ensure_ascii=False)
