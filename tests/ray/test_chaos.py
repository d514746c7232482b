"""A short run of the benchmark that breaks ranks at random: no request is lost, and none comes out differently."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import forked_ray
import pytest
from number_formats import DTYPE

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
MIN_FAULTS = 4


@pytest.mark.timeout(300)
def test_requests_survive_faults_of_several_kinds():
    options = {
        "--dp": 2,
        "--requests": 12,
        "--spare-nodes": 1,
        "--min-faults": MIN_FAULTS,
        "--fault-interval-s": 0.3,
        "--timeout-s": 200,
        "--dtype": DTYPE,
    }
    arguments = [str(value) for option in options.items() for value in option]
    command = [sys.executable, forked_ray.__file__, str(BENCHMARK), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    rows = dict(re.findall(r"^ *(\S.*?)  +(\S.*)$", run.stdout, re.MULTILINE))
    said = run.stdout[-4000:] + run.stderr[-4000:]
    assert rows.get("requests lost") == "0", said
    assert re.fullmatch(r"0 of \d+", rows["results that differ"]), said
    assert rows["left behind"] == "nothing", said
    assert run.returncode == 0, said
    kinds = re.findall(r"\d+ x ([a-z ]+)", rows["faults injected"])
    assert len(kinds) >= MIN_FAULTS, said
