"""The command line, as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

from number_formats import DTYPE


def raycore(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "raycore", *arguments],
        env=os.environ | environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_prompts_from_standard_input_come_back_as_json_lines(address):
    # on a Ray that runs: test_copies_of_raycore.py has the command start one
    options = ("--json", "-dp", "2", "--dtype", DTYPE, "--num-threads", "1")
    ended = raycore("generate", *options, stdin="27 + 58 =\n\n40 - 9 =\n", RAY_ADDRESS=address)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(line["prompt"], line["text"], line["finish_reason"]) for line in lines] == [
        ("27 + 58 =", " 85", "stop"),
        ("40 - 9 =", " 31", "stop"),
    ]
    assert all(line["token_ids"] for line in lines)


def test_user_errors_print_one_line_and_set_the_exit_status():
    for arguments, message in (
        (("generate", "--model", "/nowhere", "x"), "/nowhere"),
        (("generate", "-tp", "3", "x"), "tensor_parallel_size=3"),
        (("generate", "--temperature", "-1", "x"), "temperature=-1"),
    ):
        ended = raycore(*arguments)
        assert ended.returncode == 1
        assert ended.stderr.startswith("raycore: ")
        assert message in ended.stderr
        assert "Traceback" not in ended.stderr
    assert raycore("generate").returncode == 2


def test_an_interrupted_generate_drains_its_requests_until_the_timeout_and_aborts_the_rest(address):
    # until the prompts are tokenized there is nothing to cut short
    for delay_s in (3.0, 20.0):
        status, stdout, stderr = generate_and_interrupt(delay_s, address)
        assert status == 128 + signal.SIGINT, stderr
        if b"before anything was generated" not in stderr:
            break
    assert b"outputs cut short" in stderr.splitlines()[-1]
    reasons = Counter(json.loads(line)["finish_reason"] for line in stdout.splitlines())
    assert reasons["abort"]
    assert reasons.keys() <= {"stop", "abort"}
    assert sum(reasons.values()) == 20_000


def generate_and_interrupt(delay_s: float, address: str) -> tuple[int, bytes, bytes]:
    """Interrupt a program on this cluster so long after its engine has come up. Returns its exit status and output."""
    command = [sys.executable, "-m", "raycore", "--log-level", "info", "generate", "--json"]
    command += ["--drain-timeout", "0.3", "--dtype", DTYPE, "--num-threads", "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": address}, **pipes) as process:
        process.stdin.write(b"27 + 58 =\n" * 20_000)
        process.stdin.close()
        process.stdin = None
        while b"is up" not in (line := process.stderr.readline()):
            assert line, "it ended before it was up"
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr
