"""The server under concurrent streams: raycore compared with vLLM, each with two data-parallel ranks.

Each run starts a server, warms it up, and keeps 64, then 256, then 1,000 streams running for `--seconds` each, from a
separate client process (`stream_load.py`). Runs alternate between the engines. Both get the same checkpoint, prompts
(random token ids), output lengths and limits. The table has medians over the runs: tokens per second, milliseconds to
the first token (TTFT) and per further token (TPOT), errors (there must be none), and memory of all the server's
processes at the end of each load, in MiB and relative to the middle of the load. Memory is the proportional set size,
which counts shared memory once.

    python benchmarks/serving.py --peer-python PEER/bin/python CHECKPOINT
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import MARK, median, table, this_python

from raycore.demo import demo_model_path

NAME = "model"
"""The served name."""

MOST_GROWTH = 1.05
"""Memory at the end of a load relative to its middle, above which it counts as a leak."""

PEER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

_START_TIMEOUT_S = 900.0
_END_TIMEOUT_S = 60.0
_WARM_UP_S = 3.0


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(demo_model_path()), help="default: the bundled model")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="the interpreter that has vLLM; without it only raycore runs"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each load")
    parser.add_argument("--runs", type=int, default=3, help="runs per engine")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=256, help="limit of each rank")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peer-dtype", default=None, help="default: as --dtype")
    parser.add_argument(
        "--peer-environment", nargs="*", default=[], metavar="NAME=VALUE", help="environment variables for vLLM"
    )
    args = parser.parse_args()
    commands = {"raycore": _our_command(args)}
    environments: dict[str, Mapping[str, str]] = {"raycore": {}}
    if args.peer_python:
        commands["vLLM"] = _peer_command(args)
        environments["vLLM"] = PEER_ENVIRONMENT | dict(each.split("=", 1) for each in args.peer_environment)
    results: dict[str, dict[int, list[dict[str, Any]]]] = {name: defaultdict(list) for name in commands}
    for _ in range(args.runs):
        for name, command in commands.items():
            with _server(command, environments[name]) as (url, pid):
                _load(url, args, min(args.streams), _WARM_UP_S)
                for streams in args.streams:
                    results[name][streams].append(_measure(url, pid, args, streams))
    print(
        f"\n{Path(args.checkpoint).name}: DP={args.dp}, {args.api_server_count} API servers, prompts of "
        f"{args.prompt_tokens} tokens, outputs of {args.new_tokens}, at most {args.max_num_seqs} requests per rank; "
        f"{args.seconds:g} s per load, medians of {args.runs} runs, alternating; dtype {args.dtype}, vLLM's "
        f"{args.peer_dtype or args.dtype}"
    )
    print(_as_table(results, args.streams))
    _judge(results["raycore"])


def _our_command(args: argparse.Namespace) -> list[str]:
    return [this_python(), "-m", "raycore", "serve", *_shared_options(args), "--dtype", args.dtype]


def _peer_command(args: argparse.Namespace) -> list[str]:
    vllm = Path(args.peer_python).parent / "vllm"
    dtype = args.peer_dtype or args.dtype
    return [str(vllm), "serve", *_shared_options(args), "--dtype", dtype, "--disable-log-stats"]


def _shared_options(args: argparse.Namespace) -> list[str]:
    longest = args.prompt_tokens + args.new_tokens
    return [
        *(args.checkpoint, "--served-model-name", NAME, "--host", "127.0.0.1", "-dp", str(args.dp)),
        *("--max-model-len", str(longest), "--max-num-seqs", str(args.max_num_seqs)),
        *("--api-server-count", str(args.api_server_count)),
    ]


@contextmanager
def _server(command: list[str], environment: Mapping[str, str]) -> Generator[tuple[str, int], None, None]:
    """Run a server while the context is open. Yields its URL and the pid of its first process."""
    port = _free_port()
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            if not _wait_until_healthy(url, server):
                log.seek(0)
                raise RuntimeError(f"{' '.join(command)} didn't start:\n{log.read()[-3000:]}")
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
    """Run one load. Returns its report and the server's memory in MiB."""
    client = _start_load(url, args, streams, args.seconds)
    time.sleep(args.seconds / 2)
    middle = _memory_mib(pid)
    time.sleep(args.seconds / 2)
    end = _memory_mib(pid)
    return {**_finish_load(client), "memory_middle": middle, "memory_end": end}


def _load(url: str, args: argparse.Namespace, streams: int, seconds: float) -> dict[str, Any]:
    return _finish_load(_start_load(url, args, streams, seconds))


def _start_load(url: str, args: argparse.Namespace, streams: int, seconds: float) -> subprocess.Popen[str]:
    config = json.loads((Path(args.checkpoint) / "config.json").read_text())
    numbers = {
        "streams": streams,
        "seconds": seconds,
        "prompt-tokens": args.prompt_tokens,
        "new-tokens": args.new_tokens,
        "vocab-size": config["vocab_size"],
    }
    options = [part for name, number in numbers.items() for part in (f"--{name}", str(number))]
    script = Path(__file__).with_name("stream_load.py")
    return subprocess.Popen([sys.executable, str(script), url, NAME, *options], stdout=subprocess.PIPE, text=True)


def _finish_load(client: subprocess.Popen[str]) -> dict[str, Any]:
    stdout, _ = client.communicate(timeout=_START_TIMEOUT_S)
    reports = [line.removeprefix(MARK) for line in stdout.splitlines() if line.startswith(MARK)]
    if client.returncode or not reports:
        raise RuntimeError(f"the load process exited with status {client.returncode}")
    return json.loads(reports[-1])


def _memory_mib(pid: int) -> float:
    """Proportional set size of a process and its descendants, in MiB."""
    num_kib = 0
    for each in [pid, *_descendants(pid)]:
        try:
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
        except OSError:
            continue  # it has just ended
        num_kib += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return num_kib / 1024


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


def _as_table(results: dict[str, dict[int, list[dict[str, Any]]]], streams: list[int]) -> str:
    rows: list[list[object]] = [
        ["streams", "engine", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "requests", "errors", "MiB", "growth"]
    ]
    for count in streams:
        ours = _medians(results["raycore"][count])
        for name, by_count in results.items():
            values = _medians(by_count[count])
            rows.append([count, name, *_cells(values)])
        if "vLLM" in results:
            peer = _medians(results["vLLM"][count])
            ratios = [f"{ours[key] / peer[key]:.2f}" for key in ("tokens_per_s", "ttft_p50", "ttft_p99")]
            ratios += [f"{ours[key] / peer[key]:.2f}" for key in ("tpot_p50", "tpot_p99")]
            rows.append([count, "ratio", *ratios, "", "", f"{ours['memory_end'] / peer['memory_end']:.2f}", ""])
    return table(rows)


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    def of(key: str) -> float:
        return median([run[key] for run in runs])

    values = {key: of(key) for key in ("tokens_per_s", "requests", "memory_middle", "memory_end")}
    for name in ("ttft", "tpot"):
        for part in ("p50", "p99"):
            values[f"{name}_{part}"] = median([run[f"{name}_ms"][part] for run in runs])
    values["errors"] = sum(run["errors"] for run in runs)
    values["growth"] = max(run["memory_end"] / run["memory_middle"] for run in runs)
    return values


def _cells(values: dict[str, float]) -> list[str]:
    cells = [f"{values['tokens_per_s']:.0f}"]
    cells += [f"{values[key]:.0f}" for key in ("ttft_p50", "ttft_p99")]
    cells += [f"{values[key]:.1f}" for key in ("tpot_p50", "tpot_p99")]
    return [
        *cells,
        f"{values['requests']:.0f}",
        f"{values['errors']:.0f}",
        f"{values['memory_end']:.0f}",
        f"{values['growth']:.3f}",
    ]


def _judge(by_streams: dict[int, list[dict[str, Any]]]) -> None:
    """Print errors and leaks, and exit with status 1 if there are any."""
    missed: list[str] = []
    for streams, runs in by_streams.items():
        values = _medians(runs)
        if values["errors"]:
            first = next(run["first_errors"] for run in runs if run["first_errors"])
            missed.append(f"{values['errors']:.0f} errors with {streams} streams: {first}")
        if values["growth"] > MOST_GROWTH:
            missed.append(f"memory grew by {values['growth']:.3f} within a load of {streams} streams")
    print("no errors, no leak" if not missed else "MISSED: " + "; ".join(missed))
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
