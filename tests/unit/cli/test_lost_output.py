"""A server goes on without its log: its reader has left, its disk is full, or it never had one."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = """
import logging, sys
import raycore.cli.serve as serve
from raycore.cli.main import main

def serving(args):
    for stream in (sys.stdout, sys.stderr):
        for _ in range(2):
            print("x" * 10_000, file=stream, flush=True)
    logging.getLogger("raycore").error("a line of the log")
    with open("served", "w") as file:
        file.write(str(file.fileno()))
    return 0

serve._serve = serving
sys.argv = ["raycore", "serve"]
sys.exit(main())
"""


def run(directory: Path, redirections: str) -> subprocess.CompletedProcess[bytes]:
    command = shlex.join([sys.executable, "-c", SERVER])
    return subprocess.run(["sh", "-c", f"exec {command} {redirections}"], cwd=directory, check=False, timeout=120)


@pytest.mark.parametrize("redirections", ["> /dev/full 2>&1", ">&- 2>&- <&-", "2>&-", ">&-"])
def test_a_server_needs_no_log(tmp_path: Path, redirections: str) -> None:
    assert run(tmp_path, redirections).returncode == 0
    assert int((tmp_path / "served").read_text()) > 2, (
        "a file got the descriptor of a stream, and with it what is printed"
    )


def test_a_server_survives_the_reader_of_its_log(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", SERVER]
    ended = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=writing, check=False, timeout=120)
    os.close(writing)
    assert ended.returncode == 0
    assert (tmp_path / "served").exists()


LEVELS = """
import logging, sys
from raycore.cli.main import main
from raycore.errors import InvalidConfig
import raycore.llm

def start(**options):
    print(logging.getLevelName(logging.getLogger("raycore.server").getEffectiveLevel()))
    raise InvalidConfig("enough")

raycore.llm.AsyncLLM = start
main()
"""


@pytest.mark.parametrize(
    ("command", "flags", "level"),
    [
        ("serve", [], "INFO"),
        ("serve", ["--log-level", "debug"], "DEBUG"),
        ("run-batch", [], "INFO"),
        ("run-batch", ["--log-level", "warning"], "WARNING"),
    ],
)
def test_the_log_level_that_is_asked_for_holds(tmp_path: Path, command: str, flags: list[str], level: str) -> None:
    (tmp_path / "in").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1"}}'
    )
    files = ["--port", "0"] if command == "serve" else ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    arguments = [sys.executable, "-c", LEVELS, command, *files, *flags]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.splitlines()[:1] == [level], done.stderr
