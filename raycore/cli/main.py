"""The command line: `raycore generate`, `serve`, `run-batch`, `status` and `scale`."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence

from raycore.cli.control import add_control_commands
from raycore.cli.engine_options import add_device_option, add_wait_option
from raycore.cli.run_batch import add_run_batch_command
from raycore.cli.serve import add_serve_command
from raycore.cli.signals import interrupted_by, raising_on_signals
from raycore.cli.terminal import outlive_terminal
from raycore.demo import demo_model_path
from raycore.errors import EngineDeadError, PlacementShortage, RaycoreError
from raycore.logs import DATE_FORMAT, line_format


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (the process's own arguments by default) names. Returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    outlive_terminal()
    logging.basicConfig(level=args.log_level.upper(), format=line_format(), datefmt=DATE_FORMAT)
    try:
        with raising_on_signals():
            return args.command(args)
    except (RaycoreError, PlacementShortage) as error:
        print(f"raycore: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        number = interrupted_by()
        text = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        print(f"raycore: {text}", file=sys.stderr)
        return 128 + number
    except BrokenPipeError:
        # the reader of our output left (`raycore generate | head -1`): nothing to say, nobody to say it to
        sys.stderr.close()
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="raycore", description="Large-language-model inference as Ray actors.")
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_serve_command(commands)
    add_run_batch_command(commands)
    generate = commands.add_parser("generate", help="continue prompts", description="Continue prompts.")
    generate.set_defaults(command=_generate)
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: standard input, one prompt a line")
    generate.add_argument("--model", default=None, metavar="DIR", help="a checkpoint; default: the bundled model")
    generate.add_argument("--tokenizer", default=None, metavar="DIR", help="default: the model's")
    generate.add_argument("-tp", "--tensor-parallel-size", type=int, default=1, metavar="N")
    generate.add_argument("-dp", "--data-parallel-size", type=int, default=1, metavar="N")
    add_device_option(generate)
    add_wait_option(generate)
    generate.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    generate.add_argument("--max-model-len", type=int, default=None, metavar="N")
    generate.add_argument("--max-tokens", type=int, default=None, metavar="N", help="tokens to generate at most")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    generate.add_argument("--seed", type=int, default=None, metavar="N", help="makes sampling repeatable")
    generate.add_argument(
        "--drain-timeout", type=float, default=2.0, metavar="S", help="seconds to finish in after SIGTERM or Ctrl-C"
    )
    generate.add_argument("--json", action="store_true", help="print an object a line: text, token ids, finish reason")
    generate.add_argument("--no-progress", action="store_true", help="show no progress bars (a terminal gets them)")
    add_control_commands(commands)
    return parser


def _generate(args: argparse.Namespace) -> int:
    prompts = args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        print("raycore generate: no prompt given, and none on standard input", file=sys.stderr)
        return 2
    shows_progress = sys.stderr.isatty() and not args.no_progress
    # imported late so that `raycore --help` answers at once
    from raycore.client.client import DRAINING
    from raycore.llm import LLM

    with LLM(
        args.model or str(demo_model_path()),
        args.tokenizer,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel_size=args.data_parallel_size,
        wait_for_nodes_s=args.wait_for_nodes_s,
        device=args.device,
        use_tqdm_on_load=shows_progress,
    ) as llm:
        chosen = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
        params = llm.get_default_sampling_params(**{name: value for name, value in chosen.items() if value is not None})
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
