"""The entry point of the command line, and `raycore generate`. Each other command has a module of its own."""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from raycore import __version__
from raycore.cli.bench.flags import add_bench_command
from raycore.cli.collect_env import add_collect_env_command
from raycore.cli.completion import add_completion_command
from raycore.cli.control import add_control_commands
from raycore.cli.engine_options import add_engine_options, chosen_engine_options
from raycore.cli.output import discard_output, is_full, unwritten
from raycore.cli.parser import Parser
from raycore.cli.run_batch import add_run_batch_command
from raycore.cli.serve import add_serve_command
from raycore.cli.signals import interrupted_by, raising_on_signals
from raycore.cli.simulate import add_simulate_command
from raycore.cli.talk import add_talk_commands
from raycore.cli.terminal import open_missing_streams, outlive_log, outlive_terminal
from raycore.errors import EngineDeadError, PlacementShortage, RaycoreError
from raycore.node.logs import DATE_FORMAT, line_format
from raycore.sampling_params import SamplingParams

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_LOG_LEVEL_HELP = (
    "Lowest level of the messages to log. Default: warning, and info for raycore's own messages of `serve` and "
    "`run-batch`."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's arguments). Returns the exit status."""
    if argv is None:
        open_missing_streams()
    return run(build_parser().parse_args(argv), owns_process=argv is None)


def run(args: argparse.Namespace, *, owns_process: bool = False) -> int:
    """Run the command that was parsed. `owns_process`: the process ends then. Returns the exit status."""
    if owns_process and getattr(args, "is_server", False):
        outlive_log()
    else:
        outlive_terminal()
    logging.basicConfig(level=(args.log_level or "warning").upper(), format=line_format(), datefmt=DATE_FORMAT)
    try:
        with raising_on_signals(exits_then=owns_process):
            status = args.command(args)
            sys.stdout.flush()
            return status
    except (RaycoreError, PlacementShortage) as error:
        print(f"raycore: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        number = interrupted_by()
        text = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        print(f"raycore: {text}", file=sys.stderr)
        if owns_process:
            _exit(128 + number)
        return 128 + number
    except BrokenPipeError:
        # the reader of stdout has closed the pipe, as in `raycore generate | head -1`
        sys.stderr.close()
        return 141
    except OSError as error:
        if not is_full(error):
            raise
        print(f"raycore: {unwritten(error)}", file=sys.stderr)
        discard_output()
        return 1


def _exit(status: int) -> NoReturn:
    """End the process, after its exit functions, but without the destructors of its C++ libraries.

    If the signal interrupted the start of Ray, some of Ray's threads are still running. They would crash when the
    destructors free what they use.
    """
    try:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # it has no other name
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def build_parser() -> Parser:
    """The parser of all commands. In parsed arguments, `command` is the function that runs the chosen command."""
    parser = Parser(prog="raycore", description="Large-language-model inference as Ray actors.")
    parser.add_argument("--version", action="version", version=f"raycore {__version__}")
    parser.add_argument("--log-level", default=None, type=str.lower, choices=_LOG_LEVELS, help=_LOG_LEVEL_HELP)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_serve_command(commands)
    add_run_batch_command(commands)
    _add_generate_command(commands)
    add_talk_commands(commands)
    add_bench_command(commands)
    add_simulate_command(commands)
    add_control_commands(commands)
    add_collect_env_command(commands)
    add_completion_command(commands, parser)
    for command in commands.choices.values():
        # without a default, which would override a --log-level that precedes the command
        command.add_argument(
            "--log-level", default=argparse.SUPPRESS, type=str.lower, choices=_LOG_LEVELS, help=_LOG_LEVEL_HELP
        )
    return parser


def _add_generate_command(commands: Any) -> None:
    command: Parser = commands.add_parser(
        "generate",
        help="generate text from prompts",
        description="Generate text that continues prompts.",
        usage="raycore generate [FLAG]... [PROMPT]...",
    )
    command.set_defaults(command=_generate)
    command.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="A prompt. Without any, each line of standard input is a prompt."
    )
    command.add_argument(
        "--max-tokens",
        type=int,
        default=None,
        metavar="N",
        help="Maximum number of tokens per output. Default: the checkpoint's, else 16.",
    )
    command.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="Sampling temperature. Default: 0 (greedy)."
    )
    command.add_argument(
        "--seed",
        type=int,
        default=None,
        metavar="N",
        help="Seed of each prompt's random numbers. Default: a different one for each prompt.",
    )
    command.add_argument(
        "--drain-timeout",
        type=float,
        default=2.0,
        metavar="S",
        help="Seconds that outputs have to finish after SIGTERM, SIGINT or SIGHUP. Then they are cut short. "
        "Default: 2.",
    )
    command.add_argument(
        "--json", action="store_true", help="Print one JSON object per line: prompt, text, token ids, finish reason."
    )
    command.add_argument("--no-progress", action="store_true", help="Show no progress bars.")
    add_engine_options(command, without=["--seed"])


def _generate(args: argparse.Namespace) -> int:
    prompts = args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        print("raycore generate: no prompt given, and none on standard input", file=sys.stderr)
        return 2
    chosen = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    SamplingParams(**chosen)  # invalid values fail before an engine is started
    shows_progress = sys.stderr.isatty() and not args.no_progress
    # imported lazily to keep `raycore --help` fast
    from raycore.client.client import DRAINING
    from raycore.llm import LLM

    with LLM(use_tqdm_on_load=shows_progress, **chosen_engine_options(args)) as llm:
        params = llm.get_default_sampling_params(**chosen)
        with llm.draining_on_signals(args.drain_timeout) as signals:
            try:
                outputs = llm.generate(prompts, params, use_tqdm=shows_progress)
            except EngineDeadError as error:
                if str(error) != DRAINING:
                    raise
                name = signal.Signals(signals[0]).name
                print(f"raycore: ended by {name} before anything was generated", file=sys.stderr)
                return 128 + signals[0]
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        if args.json:
            fields = {
                "prompt": prompt,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
            }
            print(json.dumps(fields, ensure_ascii=False))
        else:
            print(prompt + completion.text)
    num_aborted = sum(completion.finish_reason == "abort" for output in outputs for completion in output.outputs)
    if signals and num_aborted:
        name = signal.Signals(signals[0]).name
        print(f"raycore: ended by {name}, with {num_aborted} of {len(outputs)} outputs cut short", file=sys.stderr)
        return 128 + signals[0]
    return 0
