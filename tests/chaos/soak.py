"""Measures what requests leave behind: the growth of each process's private memory, in bytes per request.

Starts `raycore serve` with the bundled demo model, on a local Ray of its own. For each kind of request, it sends as
many requests to warm up as it then measures. Memory is read `_NUM_SECTIONS` times in between, when no request runs. The
growth is the difference between the lowest value of the last quarter and that of the first quarter, so what the garbage
collector frees later doesn't count. Allocators still grow in steps, so a kind that grows by more than `--limit` is
measured again, up to twice. The lowest growth of each process counts: a leak recurs. Exits with 1 if it is beyond the
limit.

    python -m tests.chaos.soak --requests 15000
    python -m tests.chaos.soak --requests 2000 --kinds plain aborted --cluster -- --api-server-count 2

Linux only. Arguments after `--` are passed to `raycore serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from common import table

_NUM_SECTIONS = 20
"""Number of parts of a measurement. Memory is read before the first and after each."""

_QUARTER = _NUM_SECTIONS // 4
_NUM_MEASUREMENTS = 3
"""Maximum number of measurements of one kind of request."""

_CONCURRENCY = 16
_START_S, _REQUEST_S, _END_S, _SETTLE_S = 120.0, 60.0, 60.0, 15.0
_FLAGS = ("--num-gpu-blocks-override", "1000", "--max-model-len", "512", "--port", "0", "--served-model-name", "demo")
"""The prefix cache is small, so that it is full after a short time."""

Body = dict[str, Any]
Memory = dict[str, int]
"""Private bytes of each process, by its role and process id."""


def _plain(number: int) -> Body:
    return {"prompt": _prompt(number), "max_tokens": 3}


def _streamed(number: int) -> Body:
    return _plain(number) | {"stream": True}


def _aborted(number: int) -> Body:
    return {"prompt": _prompt(number), "max_tokens": 400, "ignore_eos": True, "stream": True}


def _constrained(number: int) -> Body:
    # each grammar is new to the cache of compiled grammars
    return {"prompt": _prompt(number), "max_tokens": 3, "structured_outputs": {"regex": f"[0-9]{{1,2}}|{number}"}}


def _choices(number: int) -> Body:
    return _plain(number) | {"n": 3, "temperature": 1}


def _batch(number: int) -> Body:
    return {"prompt": [f"{_prompt(number)} {part}" for part in range(4)], "max_tokens": 2}


def _chat(number: int) -> Body:
    return {"messages": [{"role": "user", "content": _prompt(number)}], "max_tokens": 3}


def _prompt(number: int) -> str:
    return f"{number:06d} {number * 7919 % 1_000_003:06d} 27 + 58 ="


KINDS: dict[str, Callable[[int], Body]] = {
    "plain": _plain,
    "chat": _chat,
    "streamed": _streamed,
    "aborted": _aborted,
    "constrained": _constrained,
    "choices": _choices,
    "batch": _batch,
}
"""Makes the body of the request with a number, by the kind of request. A batch is one request with several prompts."""


def main() -> int:
    """Measure all kinds, and print a table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=15_000, metavar="N", help="measured requests of each kind")
    parser.add_argument("--limit", type=float, default=100.0, metavar="BYTES", help="growth per request")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cluster", action="store_true", help="join a Ray with a dashboard and its agents")
    parser.add_argument("serve_flags", nargs="*", metavar="-- FLAG", help="further arguments of `raycore serve`")
    args = parser.parse_args()
    if args.requests < _NUM_SECTIONS:
        parser.error(f"--requests {args.requests}: at least {_NUM_SECTIONS}")
    with ExitStack() as stack:
        address = stack.enter_context(_cluster()) if args.cluster else "local"
        url = stack.enter_context(_server(address, args.serve_flags))
        grown = asyncio.run(_measure_all(url, args))
    roles = list(dict.fromkeys(role for growths in grown.values() for role in growths))
    rows = [
        [role, *(f"{growths[role]:.0f}" if role in growths else "-" for growths in grown.values())] for role in roles
    ]
    print(f"growth of private memory, in bytes per request, of {args.requests} requests each\n")
    print(table([["process", *grown], *rows]))
    beyond = [
        f"{role} by {growth:.0f} with {kind}"
        for kind, growths in grown.items()
        for role, growth in growths.items()
        if growth > args.limit
    ]
    print(f"\nbeyond {args.limit:g}: {'; '.join(beyond) or 'none'}")
    return 1 if beyond else 0


async def _measure_all(url: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    await _wait_for_processes()
    numbers = itertools.count()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=_REQUEST_S)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        return {kind: await _measure(kind, numbers, session, args) for kind in args.kinds}


async def _wait_for_processes() -> None:
    """Wait until the standby and the control actor, which start after the engine, are up."""
    known: Memory = {}
    while (found := _read_memory()).keys() != known.keys():
        known = found
        await asyncio.sleep(_SETTLE_S)


async def _measure(
    kind: str, numbers: itertools.count[int], session: aiohttp.ClientSession, args: argparse.Namespace
) -> dict[str, float]:
    """The growth of each process, in bytes per request of one kind."""

    async def send(count: int) -> None:
        left = iter(range(count))

        async def run_one_by_one() -> None:
            for _ in left:
                await _send(session, kind, KINDS[kind](next(numbers)))

        await asyncio.gather(*(run_one_by_one() for _ in range(_CONCURRENCY)))

    started_s = time.perf_counter()
    await send(args.requests)
    lowest: dict[str, float] = {}
    for _ in range(_NUM_MEASUREMENTS):
        growths = await _measure_once(send, args.requests)
        lowest = {role: min(growth, lowest.get(role, growth)) for role, growth in growths.items()}
        if max(lowest.values()) <= args.limit:
            break
    print(f"{kind}: {time.perf_counter() - started_s:.0f} s, at most {max(lowest.values()):.0f}", flush=True)
    return lowest


async def _measure_once(send: Callable[[int], Awaitable[None]], num_requests: int) -> dict[str, float]:
    size = num_requests // _NUM_SECTIONS
    memory = [_read_memory()]
    for _ in range(_NUM_SECTIONS):
        await send(size)
        memory.append(_read_memory())
    first, last = memory[: _QUARTER + 1], memory[-_QUARTER - 1 :]
    between = (_NUM_SECTIONS - _QUARTER) * size
    return {
        role: (min(values[role] for values in last) - min(values[role] for values in first)) / between
        for role in memory[0]
        if all(role in values for values in memory)
    }


async def _send(session: aiohttp.ClientSession, kind: str, body: Body) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with session.post(path, json={"model": "demo", "temperature": 0} | body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"a request of kind {kind} got status {answer.status}: {await answer.text()}")
        if kind == "aborted":
            await answer.content.readline()
            answer.close()
        else:
            await answer.read()


@contextmanager
def _server(address: str, flags: list[str]) -> Generator[str]:
    """Run `raycore serve` on the Ray at `address`. Yields the server's URL."""
    with tempfile.TemporaryDirectory(prefix="soak", dir="/tmp", ignore_cleanup_errors=True) as directory:
        log = Path(directory, "log")
        environment = os.environ | {"RAY_ADDRESS": address}
        if address == "local":
            environment["RAY_TMPDIR"] = directory
        with log.open("w") as file:
            command = [sys.executable, "-m", "raycore", "serve", *_FLAGS, *flags]
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        try:
            yield _wait_for_url(process, log)
        except BaseException:
            print(log.read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + _START_S
    while (found := re.search(r"serving .* on (http://\S+)", log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the server isn't up: exit status {process.poll()}")
        time.sleep(0.1)
    return found[1]


@contextmanager
def _cluster() -> Generator[str]:
    """Run a Ray with all processes that `ray start` starts. Yields its address."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": True})
    try:
        yield str(cluster.address)
    finally:
        cluster.shutdown()


def _read_memory() -> Memory:
    """Read the memory of all processes that descend from this one."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, added = set[int](), {os.getpid()}
    while added:
        added = {pid for pid, parent in parents.items() if parent in added}
        found |= added
    memory: Memory = {}
    for pid in sorted(found):
        with suppress(OSError):
            memory[f"{_role(pid)} [{pid}]"] = _private_bytes(pid)
    return memory


def _private_bytes(pid: int) -> int:
    """A process's own memory: what would be free if it ended (USS), and what is swapped out."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_", "Swap:")))


def _role(pid: int) -> str:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
    if arguments[0].startswith("ray::"):
        return arguments[0].removeprefix("ray::").partition(".")[0]
    if "raycore" in arguments:
        return "server"
    scripts = [
        Path(argument).relative_to(Path(argument).parents[1]) for argument in arguments if argument.endswith(".py")
    ]
    return str(scripts[-1].with_suffix("")) if scripts else Path(arguments[0]).name


if __name__ == "__main__":
    sys.exit(main())
