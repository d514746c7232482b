"""`BoundKernel` tells the driver what Triton's own launch tells it, whatever it was launched with before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("bound_kernel_program.py")


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What the program prints."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("Triton needs a C compiler")
    root = Path(__file__).parents[4]
    path = os.pathsep.join([str(root), str(root / "tests" / "support")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_launches_are_those_of_triton(told: dict[str, Any]) -> None:
    for name, (expected, found, num_launches) in told["launches"].items():
        assert found == expected, name
        assert num_launches == 2, name


def test_other_code_is_launched_for_other_arguments(told: dict[str, Any]) -> None:
    functions = {name: expected[0] for name, (expected, *_) in told["launches"].items()}
    same = {"other values", "aligned to less"}
    assert {name for name, function in functions.items() if function == functions["first"]} == {"first", *same}
    others = [function for name, function in functions.items() if name not in same]
    assert len(set(others)) == len(others)


def test_triton_looks_for_its_code_once(told: dict[str, Any]) -> None:
    by_triton = told["by Triton"]
    assert by_triton == [name for name in told["launches"] if name != "other values"] + ["with a hook"]


def test_hooks_of_launches_are_called(told: dict[str, Any]) -> None:
    assert told["hooked"] == ["scale", "scale"]
