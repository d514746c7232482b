"""`raycore run-batch`: answers a file of OpenAI requests. Flags have vLLM's names."""

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
from raycore.cli.output import is_full, unwritten
from raycore.cli.parser import Parser
from raycore.cli.signals import interrupted_by
from raycore.errors import InvalidConfig, RaycoreError
from raycore.extras import needing
from raycore.server.options import check_enable_lora

if TYPE_CHECKING:
    from raycore.cli.batch_progress import Tally
    from raycore.llm import AsyncLLM
    from raycore.server.batch.files import RequestFile, Result, ResultFile

SOME_FAILED = 3
"""Exit status of a batch that is complete, but in which some requests failed."""

_DESCRIPTION = """\
Answer a file of requests in the format of OpenAI's Batch API.

The input file has one JSON object per line, with "custom_id", "method": "POST", "url" and "body".
The URL is "/v1/completions" or "/v1/chat/completions", or for a model that pools "/v1/embeddings",
"/v1/score" or "/v1/rerank". The output file gets one JSON object per
line, with "id", "custom_id", "response" and "error", in the order in which requests finish. "error"
is null if the request succeeded. A second run with the same files continues the batch: it keeps
successful results, and runs the missing and failed requests.

exit status:
  0    all requests succeeded
  1    the batch could not start, or stopped because of an error
  2    a flag is invalid
  3    the batch is complete, but some requests failed
  128 + the signal's number: a signal stopped the batch before it was complete
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
    command.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="File with the requests.")
    command.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="File for the results.")
    command.add_argument(
        "--max-concurrent-requests",
        type=int,
        default=None,
        metavar="N",
        help="Maximum number of requests in the engine at a time. Default: twice max_num_seqs for each rank.",
    )
    command.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="Seconds that running requests have to finish after SIGTERM, SIGINT or SIGHUP. The rest get no result. "
        "Default: 30.",
    )
    command.add_argument("--no-progress", action="store_true", help="Show no progress.")
    add_server_options(command, has_http=False)
    add_engine_options(command)


def _run_batch(args: argparse.Namespace) -> int:
    # imported lazily to keep `raycore --help` fast
    from raycore.cli.batch_progress import Tally
    from raycore.server.batch.files import RequestFile, ResultFile

    if args.max_concurrent_requests is not None and args.max_concurrent_requests < 1:
        raise InvalidConfig(f"max_concurrent_requests={args.max_concurrent_requests} isn't at least 1")
    requests = RequestFile(args.input_file)
    with ResultFile(args.output_file, requests.line_numbers) as results:
        if "working_dir_files" in results.path.parts:
            print(
                f"raycore: {args.output_file} is in this job's copy of its working directory, which Ray deletes: "
                "give an absolute path to keep the results",
                file=sys.stderr,
            )
        tally = Tally(requests.num_lines, len(results.done))
        ended_by = None
        if tally.num_left:
            try:
                ended_by = _answer(args, requests, results, tally)
            except KeyboardInterrupt:  # the engine had not started
                ended_by = interrupted_by()
            except (RaycoreError, OSError) as error:
                if not tally.is_begun:
                    raise  # no results to count
                text = unwritten(error) if isinstance(error, OSError) and is_full(error) else error
                print(f"raycore: {text}", file=sys.stderr)
                print(f"raycore: ended by the error above: {tally}", file=sys.stderr)
                return 1
    if ended_by is not None and tally.num_left:
        print(f"raycore: ended by {signal.Signals(ended_by).name}: {tally}", file=sys.stderr)
        return 128 + ended_by
    if tally.num_left:
        changed = f"{args.input_file} changed during the batch, so some of its lines weren't answered"
        print(f"raycore: {changed}: {tally}", file=sys.stderr)
        return 1
    print(f"raycore: batch complete: {tally}", file=sys.stderr)
    return SOME_FAILED if tally.num_failed else 0


def _answer(args: argparse.Namespace, requests: RequestFile, results: ResultFile, tally: Tally) -> int | None:
    """Answer the remaining lines of the file. Returns the signal that stopped the batch, or None."""
    from raycore.cli.batch_progress import BatchProgress
    from raycore.llm import AsyncLLM

    with needing("`raycore run-batch` needs", "serve"):
        from raycore.parts.adapters.server.adapters import check_adapters, load_adapters
        from raycore.server.batch.runner import run_lines
        from raycore.server.contract.models import Models

    chosen = chosen_engine_options(args)
    options = chosen_server_options(args, chosen["model"])
    check_enable_lora(bool(chosen.get("enable_lora")), options.lora_modules)
    check_adapters(chosen, options)
    if args.log_level is None:
        logging.getLogger("raycore").setLevel(logging.INFO)
    engine = AsyncLLM(use_tqdm_on_load=sys.stderr.isatty(), **chosen)
    try:
        models = Models(options.served_model_names)
        asyncio.run(load_adapters(engine, options)).subscribe(models.set_adapters)
        with (
            engine.draining_on_signals(args.shutdown_timeout) as came,
            BatchProgress(tally, args.no_progress) as progress,
        ):
            results.begin()
            tally.is_begun = True

            def note(result: Result) -> None:
                results.append(result)
                tally.note(result)
                progress.show()

            run = run_lines(
                engine,
                options,
                models,
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
    """Twice the number of sequences that all ranks run concurrently: when one finishes, the next is already waiting."""
    return 2 * engine.config.scheduler.max_num_seqs * engine.config.parallel.data_parallel_size
