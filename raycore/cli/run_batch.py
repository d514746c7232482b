"""`raycore run-batch`: answers to a file of OpenAI requests. Flags are vLLM's."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycore.cli.engine_options import (
    add_engine_options,
    add_server_options,
    chosen_engine_options,
    chosen_server_options,
)
from raycore.cli.parser import Parser
from raycore.cli.signals import interrupted_by
from raycore.errors import InvalidConfig, RaycoreError

if TYPE_CHECKING:
    from raycore.cli.batch_progress import Tally
    from raycore.llm import AsyncLLM
    from raycore.server.batch.files import RequestFile, Result, ResultFile

SOME_FAILED = 3
"""The exit status of a batch that came to its end, with requests that could not be answered."""

_DESCRIPTION = """\
Answer a file of requests: a line each, {"custom_id", "method": "POST", "url": "/v1/completions" or
"/v1/chat/completions", "body"}. Results are lines {"id", "custom_id", "response", "error"}, in the
order in which requests end; "error" is null where the request was answered. Run again with the same
files, it goes on: what was answered stays, what failed is tried again.

exit status: 0, all were answered; 1, it could not run, or not to the end; 2, a flag is wrong;
3, it ran to the end, and some lines failed; 128 and the signal's number, a signal ended it
before all was done.
"""


def add_run_batch_command(commands: Any) -> None:
    """Add `run-batch` to the command line."""
    command: Parser = commands.add_parser(
        "run-batch",
        usage="raycore run-batch -i FILE -o FILE [--model DIR] [FLAG]...",
        help="answer a file of OpenAI requests",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=_run_batch)
    command.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="Requests.")
    command.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="Results.")
    command.add_argument(
        "--max-concurrent-requests",
        type=int,
        default=None,
        metavar="N",
        help="Requests that are given to the engine at a time. Default: twice what it runs at once.",
    )
    command.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="Seconds to finish requests in after SIGTERM or Ctrl-C. Default: 30.",
    )
    command.add_argument("--no-progress", action="store_true", help="Print nothing before the end.")
    add_server_options(command, has_http=False)
    add_engine_options(command)


def _run_batch(args: argparse.Namespace) -> int:
    # imported late so that `raycore --help` answers at once
    try:
        from raycore.cli.batch_progress import Tally
        from raycore.server.batch.files import RequestFile, ResultFile
    except ModuleNotFoundError as error:
        raise InvalidConfig(f"{error.name} is missing: pip install 'raycore[serve]'") from error

    if args.max_concurrent_requests is not None and args.max_concurrent_requests < 1:
        raise InvalidConfig(f"max_concurrent_requests={args.max_concurrent_requests}: at least 1")
    requests = RequestFile(args.input_file)
    with ResultFile(args.output_file, requests.line_numbers) as results:
        if "working_dir_files" in results.path.parts:
            print(
                f"raycore: {args.output_file} lies in this job's copy of its working directory, which Ray deletes: "
                "name an absolute path to keep it",
                file=sys.stderr,
            )
        tally = Tally(requests.num_lines, len(results.done))
        ended_by = None
        if tally.num_left:
            try:
                ended_by = _answer(args, requests, results, tally)
            except KeyboardInterrupt:  # there was no engine yet to finish anything
                ended_by = interrupted_by()
            except (RaycoreError, OSError) as error:
                if not tally.is_begun:
                    raise  # nothing to add to what is wrong
                print(f"raycore: {error}", file=sys.stderr)
                print(f"raycore: ended by the error above: {tally}", file=sys.stderr)
                return 1
    if ended_by is not None and tally.num_left:
        print(f"raycore: ended by {signal.Signals(ended_by).name}: {tally}", file=sys.stderr)
        return 128 + ended_by
    if tally.num_left:
        print(f"raycore: {args.input_file} has changed since the batch began: {tally}", file=sys.stderr)
        return 1
    print(f"raycore: batch complete: {tally}", file=sys.stderr)
    return SOME_FAILED if tally.num_failed else 0


def _answer(args: argparse.Namespace, requests: RequestFile, results: ResultFile, tally: Tally) -> int | None:
    """Answer what is left. Returns the signal that came, if one did."""
    from raycore.cli.batch_progress import Progress
    from raycore.llm import AsyncLLM
    from raycore.server.batch.runner import run_lines

    chosen = chosen_engine_options(args)
    options = chosen_server_options(args, chosen["model"])
    logging.getLogger("raycore").setLevel(logging.INFO)
    engine = AsyncLLM(use_tqdm_on_load=sys.stderr.isatty(), **chosen)
    try:
        with engine.draining_on_signals(args.shutdown_timeout) as came, Progress(tally, args.no_progress) as progress:
            results.begin()
            tally.is_begun = True

            def note(result: Result) -> None:
                results.append(result)
                tally.note(result)
                progress.show()

            run = run_lines(
                engine,
                options,
                requests.lines(results.done),
                note,
                max_concurrent=min(args.max_concurrent_requests or _default_concurrency(engine), tally.num_left),
                is_stopping=lambda: bool(came),
            )
            asyncio.run(run)
    finally:
        engine.shutdown()
    return came[0] if came else None


def _default_concurrency(engine: AsyncLLM) -> int:
    """As many as run at once, and as many again, so that one that ends has a successor at hand."""
    return 2 * engine.config.scheduler.max_num_seqs * engine.config.parallel.data_parallel_size
