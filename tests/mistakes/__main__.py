"""Makes mistakes as people make them, and shows for each the last line, the number of lines, and the time.

    python tests/mistakes                     all that this machine allows
    python tests/mistakes --only commands machines

Each command, each program and each machine with something wrong is a process of its own. Calls share an engine, and
requests a server. Machines need user namespaces, in which directories are full or can't be written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mistakes.files import write_files
from mistakes.machines import MACHINES, can_unshare
from mistakes.table import CALLS, COMMANDS, PROGRAMS, REQUESTS, Request

_LONGEST_S = 120.0
_START_S = 120.0
_IMPORTS = """\
import asyncio, sys
from raycore import *
from raycore.beam_search import BeamSearchParams
from raycore.data import ProcessorConfig, build_processor
from raycore.demo import demo_model_path
from raycore.serve import build_openai_app

MODEL = demo_model_path()
"""
_CALLS = """\
import json, time
from mistakes.table import CALLS, IMAGE_MESSAGES as image_messages

def constrained(**fields):
    return SamplingParams(structured_outputs=StructuredOutputsParams(**fields))

ended = LLM(MODEL)
ended.shutdown()
llm = LLM(MODEL)
for call in CALLS:
    begun = time.monotonic()
    try:
        eval(call.does)
        told = "no error"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    print("TOLD", json.dumps([told, time.monotonic() - begun]), flush=True)
llm.shutdown()
"""


class Result:
    """What somebody read, and when."""

    def __init__(self, does: str, text: str, took_s: float, says: str) -> None:
        lines = [line for line in text.splitlines() if line.strip()]
        self.does = does
        self.last = lines[-1] if lines else ""
        self.num_lines = len(lines)
        self.took_s = took_s
        self.is_as_promised = re.search(says, text) is not None

    def row(self) -> str:
        """A row of the table."""
        cells = [
            self.does,
            self.last,
            str(self.num_lines),
            f"{self.took_s:.1f}",
            "yes" if self.is_as_promised else "NO",
        ]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def run(does: str, command: list[str], says: str, environment: dict[str, str] | None = None) -> Result:
    """Run a command as a user would. It reads no input."""
    begun = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=_LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        text += f"\nno end within {_LONGEST_S:.0f} s"
    return Result(does, text, time.monotonic() - begun, says)


def commands() -> Iterator[Result]:
    """The commands of the table."""
    for each in COMMANDS:
        yield run(f"`raycore {each.does}`", [sys.executable, "-m", "raycore", *shlex.split(each.does)], each.says)


def programs() -> Iterator[Result]:
    """The expressions that need no engine, each in a program of its own."""
    for each in PROGRAMS:
        yield run(f"`{each.does}`", [sys.executable, "-c", f"{_IMPORTS}\n{each.does}"], each.says)


def calls() -> Iterator[Result]:
    """The expressions that need an engine."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", f"{_IMPORTS}\n{_CALLS}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    told = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    if len(told) < len(CALLS):
        raise RuntimeError(f"the program of calls has ended early:\n{done.stderr}")
    for each, (text, took_s) in zip(CALLS, told, strict=True):
        yield Result(f"`{each.does}`", text, took_s, each.says)


def requests() -> Iterator[Result]:
    """The requests of the table, to one server."""
    with server("--served-model-name", "demo", "--api-key", "k") as url:
        for each in REQUESTS:
            begun = time.monotonic()
            text = answer(url, each)
            shown = each.body if isinstance(each.body, str) else json.dumps(each.body)
            yield Result(f"`{each.path}` {shown[:60]}", text, time.monotonic() - begun, each.says)


@contextmanager
def server(*flags: str) -> Iterator[str]:
    """A server of the bundled model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "raycore", "serve", "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + _START_S
        while not is_up(url):
            if time.monotonic() > deadline_s or process.poll() is not None:
                raise RuntimeError("the server doesn't start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_up(url: str) -> bool:
    """Whether a server is healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def answer(url: str, asked: Request) -> str:
    """The message of the error that a request gets."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k", **asked.headers}
    body = asked.body if isinstance(asked.body, str) else json.dumps(asked.body)
    data = None if asked.method == "GET" else body.encode()
    sent = urllib.request.Request(url + asked.path, data, headers, method=asked.method)
    try:
        with urllib.request.urlopen(sent, timeout=60) as response:
            return f"status {response.status}"
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["error"]["message"])


def machines() -> Iterator[Result]:
    """A command on each machine with something wrong."""
    for each in MACHINES:
        if each.mounts and not can_unshare():
            yield Result(each.what, "skipped: this machine allows no user namespaces", 0.0, "skipped")
            continue
        with each.prepared() as environment:
            yield run(f"{each.what}: `{each.command}`", each.argv(), each.says, environment)


PARTS: dict[str, Callable[[], Iterator[Result]]] = {
    each.__name__: each for each in (commands, programs, calls, requests, machines)
}


def main() -> int:
    """Print the table. Returns how many mistakes got another message than they should, at most 1."""
    parser = argparse.ArgumentParser(
        prog="mistakes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    args = parser.parse_args()
    num_others = 0
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        os.chdir(folder)
        print("| mistake | last line | lines | s | as promised |\n|---|---|---|---|---|")
        for part in args.only:
            for result in PARTS[part]():
                num_others += not result.is_as_promised
                print(result.row(), flush=True)
    return min(num_others, 1)


if __name__ == "__main__":
    raise SystemExit(main())
