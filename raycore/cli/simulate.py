"""`raycore simulate`: predicts what a deployment does with a trace. Imports little, as all commands do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raycore.cli.engine_options import add_engine_options, chosen_engine_options
from raycore.cli.help_text import mark_common
from raycore.cli.output import save
from raycore.cli.parser import Parser
from raycore.errors import InvalidConfig


def add_simulate_command(commands: Any) -> None:
    """Add `simulate` to the command line."""
    command: Parser = commands.add_parser(
        "simulate",
        usage="raycore simulate --trace FILE --step-times FILE [FLAG]...",
        help="predict what a deployment does with recorded traffic",
        description="Serve a trace in virtual time, with raycore's own scheduler and routing, and print throughput and "
        "latency.",
    )
    command.set_defaults(command=_simulate)
    add = _adder(command, "Traffic")
    add("--trace", required=True, metavar="FILE", help="The requests: see docs/simulation.md.")
    add(
        "--trace-format",
        default="auto",
        choices=["auto", "mooncake", "azure", "raycore"],
        help="Format of the trace. Default: that which the file looks like.",
    )
    add("--num-requests", type=int, default=None, metavar="N", help="Take only the first N requests.")
    add("--speed", type=float, default=1.0, metavar="F", help="Let requests come F times as fast. Default: 1.")
    add = _adder(command, "Step times")
    add("--step-times", default=None, metavar="FILE", help="What `raycore bench step-times` has measured.")
    add("--memory-bandwidth", type=float, default=None, metavar="GB/S", help="Instead: what a device reads, in GB/s.")
    add("--tflops", type=float, default=None, metavar="N", help="Instead: what a device computes, in TFLOP/s.")
    add("--memory-gib", type=float, default=None, metavar="GIB", help="Instead: memory for weights and KV cache.")
    add(
        "--step-overhead",
        type=float,
        default=0.0,
        metavar="S",
        help="With these: seconds that each step takes besides.",
    )
    add = _adder(command, "Failures and scaling")
    add("--kill", action="append", default=[], metavar="RANK@S", help="Kill a rank at a time. May be repeated.")
    add(
        "--detection-time", type=float, default=0.5, metavar="S", help="From a death until requests move. Default: 0.5."
    )
    add("--replacement-time", type=float, default=30.0, metavar="S", help="Until a replacement serves. Default: 30.")
    add(
        "--autoscaling",
        default=None,
        metavar="JSON",
        help="Ray Serve's autoscaling_config, for replicas of one rank, and target_tokens.",
    )
    add("--start-time", type=float, default=60.0, metavar="S", help="How long a replica's start takes. Default: 60.")
    add = _adder(command, "Settings and results")
    add("--grid", action="append", default=[], metavar="NAME=V,V", help="Try these values of an engine option.")
    add("--json", action="store_true", help="Print the figures as JSON.")
    add("--plot", default=None, metavar="FILE", help="Draw latency over time, or over throughput, as SVG.")
    add_engine_options(command)


def _adder(command: Parser, title: str) -> Callable[..., None]:
    """Return a function that adds flags to a new group. The short help shows them."""
    group = command.add_argument_group(title)

    def add(*flags: str, **options: Any) -> None:
        mark_common(group.add_argument(*flags, **options))

    return add


def _simulate(args: argparse.Namespace) -> int:
    # imported lazily to keep `raycore --help` fast
    from raycore.simulation.planning import parse_grid, parse_kill, simulate
    from raycore.simulation.plot import plot
    from raycore.simulation.report import report

    for name in ("speed", "detection_time", "replacement_time", "start_time", "step_overhead"):
        value = getattr(args, name)
        if not (0 < value < float("inf") or (value == 0 and name != "speed")):
            raise InvalidConfig(f"{_flag(name)} {value:g} isn't a positive number")
    if args.num_requests is not None and args.num_requests < 1:
        raise InvalidConfig(f"--num-requests {args.num_requests} isn't positive")
    if args.plot is not None and not args.plot.endswith(".svg"):
        raise InvalidConfig(f"--plot {args.plot}: pictures are SVG: give a name that ends with .svg")
    grid, kills = parse_grid(args.grid), [parse_kill(each) for each in args.kill]
    scenario = _scenario(args, kills)
    shows_progress = sys.stderr.isatty() and len(grid) > 0

    def tell(setting: str) -> None:
        if shows_progress:
            print(f"simulating {setting}", file=sys.stderr)

    found = simulate(chosen_engine_options(args), grid, scenario, tell)
    if args.plot is not None:
        save(Path(args.plot), plot(found))
    if args.json:
        print(json.dumps([{"setting": each.setting, **each.figures} for each in found], indent=1))
    else:
        print(report(found))
    return 0


def _scenario(args: argparse.Namespace, kills: list[Any]) -> Any:
    from raycore.options.declared import json_object
    from raycore.simulation.autoscaling import autoscaling_options
    from raycore.simulation.planning import Scenario
    from raycore.simulation.roofline import GIB, Device
    from raycore.simulation.step_times import read_step_times
    from raycore.simulation.traces import faster, read_trace

    numbers = {name: getattr(args, name) for name in ("memory_bandwidth", "tflops", "memory_gib")}
    missing = [_flag(name) for name, value in numbers.items() if value is None]
    if (args.step_times is None) == (len(missing) == len(numbers)):
        raise InvalidConfig("give either --step-times, or --memory-bandwidth, --tflops and --memory-gib")
    if args.step_times is None and missing:
        raise InvalidConfig(
            f"{missing[0]} is missing: without --step-times, all of {', '.join(map(_flag, numbers))} count"
        )
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise InvalidConfig(f"{_flag(name)} {value:g} isn't positive")
    device = None
    if args.step_times is None:
        device = Device(args.memory_bandwidth * 1e9, args.tflops * 1e12, args.memory_gib * GIB)
    trace = read_trace(args.trace, args.trace_format)
    return Scenario(
        faster(trace[: args.num_requests], args.speed),
        None if args.step_times is None else read_step_times(args.step_times),
        device,
        args.step_overhead,
        kills,
        args.detection_time,
        args.replacement_time,
        None if args.autoscaling is None else autoscaling_options(json_object("--autoscaling", args.autoscaling)),
        args.start_time,
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
