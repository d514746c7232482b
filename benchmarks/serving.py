"""The server under concurrent streams: raycore compared with vLLM, as installed and on all cores.

Each run starts a server, warms it up, and keeps each number of `--streams` running for `--seconds`, from a separate
client process (`stream_load.py`). Runs alternate between the engines, and between the numbers of data-parallel ranks in
`--dp`. All get the same checkpoint, prompts (random token ids), output lengths and limits. On all cores, vLLM's ranks
are bound to cores of their own and have Intel's OpenMP, as its documentation recommends.

The tables have medians over the runs: tokens per second, milliseconds to the first token (TTFT) and per further token
(TPOT), errors (there must be none), and memory of all the server's processes. Memory is the proportional set size,
which counts shared memory once. `growth` is the memory at the end of a load, relative to its middle, without raycore's
KV cache, whose pages are touched for the first time under load.

With `--inputs N`, the model gives embeddings instead: a stream sends one request for those of N prompts after the
other. The tables have texts per second, and milliseconds to the response.

    python benchmarks/serving.py --peer-python PEER/bin/python CHECKPOINT
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import PEER_ENVIRONMENT, finish_load, median, peer_on_all_cores, start_load, table, this_python

from raycore.demo import demo_model_path

NAME = "model"
"""The served name."""

MOST_GROWTH = 1.05
"""Memory at the end of a load relative to its middle, above which it counts as a leak."""

_PEER_ENVIRONMENT = PEER_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

_OF_COMPLETIONS = {
    "tokens_per_s": ("tokens/s", 0),
    "ttft_p50": ("TTFT p50", 0),
    "ttft_p99": ("p99", 0),
    "tpot_p50": ("TPOT p50", 1),
    "tpot_p99": ("p99", 1),
}
_OF_EMBEDDINGS = {"texts_per_s": ("texts/s", 1), "ttft_p50": ("ms p50", 1), "ttft_p99": ("p99", 1)}
"""By key of a run: the column's heading, and its number of digits."""
_PLAIN = ("tokens_per_s", "texts_per_s", "requests", "memory", "cache")
"""What runs measure with one number."""
_START_TIMEOUT_S = 900.0
_END_TIMEOUT_S = 60.0
_WARM_UP_S = 3.0
_HUGE_PAGES = "hg"
"""Marks the mappings of raycore's KV caches: no other memory asks for huge pages."""


@dataclass(frozen=True, eq=False)
class Engine:
    """One of the compared servers."""

    name: str
    dp: int
    command: list[str]
    environment: Mapping[str, str]


Measures = Mapping[str, tuple[str, int]]
"""`_OF_COMPLETIONS` or `_OF_EMBEDDINGS`."""
Medians = dict[Engine, dict[int, dict[str, float]]]
"""By engine and number of streams: medians of the runs."""
Results = dict[Engine, dict[int, list[dict[str, Any]]]]
"""By engine and number of streams: what each run measured."""


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(demo_model_path()), help="default: the bundled model")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="the interpreter that has vLLM; without it only raycore runs"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each load")
    parser.add_argument("--runs", type=int, default=2, help="runs per engine")
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2], help="numbers of data-parallel ranks")
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--inputs", type=int, default=0, help="inputs of a request for embeddings; 0: completions")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="limit of each rank")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peer-dtype", default=None, help="default: as --dtype")
    args = parser.parse_args()
    engines = list(_engines(args))
    results: Results = {engine: defaultdict(list) for engine in engines}
    for _ in range(args.runs):
        for engine in engines:
            with _server(engine) as (url, pid):
                _load(url, args, min(args.streams), _WARM_UP_S)
                for streams in args.streams:
                    found = _measure(url, pid, args, streams)
                    results[engine][streams].append(found)
                    print(f"{engine.name}, DP {engine.dp}, {streams} streams: {found}", file=sys.stderr, flush=True)
    print(
        f"\n{Path(args.checkpoint).name}: {args.api_server_count} API servers, prompts of "
        f"{args.prompt_tokens} tokens, {_what(args)}, at most {args.max_num_seqs} requests per rank; "
        f"{args.seconds:g} s per load, medians of {args.runs} runs, alternating; dtype {args.dtype}, vLLM's "
        f"{args.peer_dtype or args.dtype}"
    )
    medians = {engine: {n: _medians(runs) for n, runs in by_streams.items()} for engine, by_streams in results.items()}
    measures = _OF_EMBEDDINGS if args.inputs else _OF_COMPLETIONS
    print(_as_table(medians, args.streams, measures))
    if args.peer_python:
        print("\nraycore's over those of the vLLM server with the most tokens per second")
        print(_ratios(medians, args.streams, args.dp, measures))
    _judge({engine: by_streams for engine, by_streams in results.items() if engine.name == "raycore"})


def _what(args: argparse.Namespace) -> str:
    return f"{args.inputs} to a request for embeddings" if args.inputs else f"outputs of {args.new_tokens}"


def _engines(args: argparse.Namespace) -> Iterator[Engine]:
    for dp in args.dp:
        options = _shared_options(args, dp)
        ours = [this_python(), "-m", "raycore", "serve", *options, "--dtype", args.dtype]
        yield Engine("raycore", dp, ours, {})
        if args.peer_python:
            vllm = str(Path(args.peer_python).parent / "vllm")
            peers = [vllm, "serve", *options, "--dtype", args.peer_dtype or args.dtype, "--disable-log-stats"]
            yield Engine("vLLM", dp, peers, _PEER_ENVIRONMENT)
            on_all_cores = _PEER_ENVIRONMENT | peer_on_all_cores(args.peer_python, dp)
            yield Engine("vLLM, all cores", dp, peers, on_all_cores)


def _shared_options(args: argparse.Namespace, dp: int) -> list[str]:
    longest = args.prompt_tokens + args.new_tokens
    return [
        *(args.checkpoint, "--served-model-name", NAME, "--host", "127.0.0.1", "-dp", str(dp)),
        *("--max-model-len", str(longest), "--max-num-seqs", str(args.max_num_seqs)),
        *("--api-server-count", str(args.api_server_count)),
        *(("--runner", "pooling") if args.inputs else ()),
    ]


@contextmanager
def _server(engine: Engine) -> Generator[tuple[str, int], None, None]:
    """Run a server while the context is open. Yields its URL and the pid of its first process."""
    port = _free_port()
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [*engine.command, "--port", str(port)],
            env={**os.environ, **engine.environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            if not _wait_until_healthy(url, server):
                log.seek(0)
                raise RuntimeError(f"{' '.join(engine.command)} didn't start:\n{log.read()[-3000:]}")
            yield url, server.pid
        finally:
            _end(server)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> bool:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except OSError:
            time.sleep(0.2)
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(_END_TIMEOUT_S)


def _measure(url: str, pid: int, args: argparse.Namespace, streams: int) -> dict[str, Any]:
    """Run one load. Returns its report, and the server's memory in MiB and its growth."""
    client = start_load(url, NAME, args, streams, args.seconds)
    time.sleep(args.seconds / 2)
    middle, middle_cache = _memory_mib(pid)
    time.sleep(args.seconds / 2)
    end, cache = _memory_mib(pid)
    growth = (end - cache) / (middle - middle_cache)
    found = finish_load(client, _START_TIMEOUT_S)
    found["texts_per_s"] = found["tokens_per_s"] / args.prompt_tokens
    return {**found, "memory": end, "cache": cache, "growth": growth}


def _load(url: str, args: argparse.Namespace, streams: int, seconds: float) -> dict[str, Any]:
    return finish_load(start_load(url, NAME, args, streams, seconds), _START_TIMEOUT_S)


def _memory_mib(pid: int) -> tuple[float, float]:
    """Proportional set size of a process and its descendants, in MiB: of everything, and of raycore's KV caches."""
    num_kib, num_kib_of_caches = 0, 0
    for each in [pid, *_descendants(pid)]:
        try:
            lines = Path(f"/proc/{each}/smaps").read_text().splitlines()
        except OSError:
            continue  # it has just ended
        of_mapping = 0
        for line in lines:
            name, *values = line.split()
            if name == "Pss:":
                of_mapping = int(values[0])
                num_kib += of_mapping
            elif name == "VmFlags:" and _HUGE_PAGES in values:
                num_kib_of_caches += of_mapping
    return num_kib / 1024, num_kib_of_caches / 1024


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children[parent].append(int(path.parent.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        of_one = children[pending.pop()]
        found += of_one
        pending += of_one
    return found


def _as_table(medians: Medians, streams: list[int], measures: Measures) -> str:
    headings = [heading for heading, _ in measures.values()]
    rows: list[list[object]] = [
        ["streams", "DP", "engine", *headings, "requests", "errors", "MiB", "growth", "cache MiB"]
    ]
    for count in streams:
        rows += [
            [count, engine.dp, engine.name, *_cells(by_count[count], measures)] for engine, by_count in medians.items()
        ]
    return table(rows)


def _ratios(medians: Medians, streams: list[int], dps: list[int], measures: Measures) -> str:
    rows: list[list[object]] = [
        ["streams", "raycore", "vLLM", *(heading for heading, _ in measures.values()), "memory"]
    ]
    for count in streams:
        for own_dp, peer_dp in [*zip(dps, dps, strict=True), *([(2, 1)] if {1, 2} <= set(dps) else [])]:
            of_dp = {e.name: by_count[count] for e, by_count in medians.items() if e.dp == own_dp}
            peers = {
                e.name: by_count[count] for e, by_count in medians.items() if e.dp == peer_dp and e.name != "raycore"
            }
            name = max(peers, key=lambda name: peers[name]["tokens_per_s"])
            ours, peer = of_dp["raycore"], peers[name]
            ratios = [f"{ours[key] / peer[key]:.2f}" for key in (*measures, "memory")]
            rows.append([count, f"DP {own_dp}", f"DP {peer_dp}{name.removeprefix('vLLM')}", *ratios])
    return table(rows)


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    values = {key: median([run[key] for run in runs]) for key in _PLAIN}
    for name in ("ttft", "tpot"):
        for part in ("p50", "p99"):
            values[f"{name}_{part}"] = median([run[f"{name}_ms"][part] for run in runs])
    values["errors"] = sum(run["errors"] for run in runs)
    values["growth"] = max(run["growth"] for run in runs)
    return values


def _cells(values: dict[str, float], measures: Measures) -> list[str]:
    digits = {key: num_digits for key, (_, num_digits) in measures.items()}
    digits |= {"requests": 0, "errors": 0, "memory": 0, "growth": 3, "cache": 0}
    return [f"{values[key]:.{num_digits}f}" for key, num_digits in digits.items()]


def _judge(results: Results) -> None:
    """Print errors and leaks, and exit with status 1 if there are any."""
    missed: list[str] = []
    for engine, by_streams in results.items():
        for streams, runs in by_streams.items():
            values, load = _medians(runs), f"with {streams} streams at DP {engine.dp}"
            if values["errors"]:
                first = next(run["first_errors"] for run in runs if run["first_errors"])
                missed.append(f"{values['errors']:.0f} errors {load}: {first}")
            if values["growth"] > MOST_GROWTH:
                missed.append(f"memory grew by {values['growth']:.3f} {load}")
    print("no errors, no leak" if not missed else "MISSED: " + "; ".join(missed))
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
