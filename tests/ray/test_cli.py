"""The command line, as processes of their own that start a Ray of their own."""

from __future__ import annotations

import json
import subprocess
import sys


def raycore(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "raycore", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_prompts_from_standard_input_come_back_as_json_lines():
    ended = raycore("generate", "--json", "-dp", "2", stdin="27 + 58 =\n\n40 - 9 =\n")
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(line["prompt"], line["text"], line["finish_reason"]) for line in lines] == [
        ("27 + 58 =", " 85", "stop"),
        ("40 - 9 =", " 31", "stop"),
    ]
    assert all(line["token_ids"] for line in lines)


def test_mistakes_are_one_line_and_a_status():
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
