"""Kinds of requests: for each, seeds show a fault that is put into the product."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ROOT / "tests" / "simulation" / "cluster" / "kinds"
_PARTS = (
    ("adapter", "embeddings", "constraint"),
    ("drafts", "pooled", "logprobs", "prompt logprobs"),
    ("hidden states", "min tokens", "stop tokens", "allowed tokens", "bad words"),
    ("cache salt", "output kind", "added", "pieces", "refused"),
)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("names", _PARTS, ids=lambda names: names[0])
def test_seeds_with_requests_of_a_kind_show_faults_of_these(names: tuple[str, ...]):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "simulation.injected", *names]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert {re.split(r" \d+: found by seed", line)[0] for line in run.stdout.splitlines()} == set(names)


def test_each_kind_with_data_has_a_fault_that_shows_its_judge():
    """Kinds that only name what requests have of themselves are judged by their tokens."""
    named = {name for names in _PARTS for name in names}
    modules = [path for path in KINDS.glob("*.py") if "\nKIND = " in path.read_text()]
    assert len(modules) == len(named) + len({"aborted", "n", "streamed"})
