"""Short runs of the program that breaks ranks at random: no request is lost, and none comes out differently."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import forked_ray
import pytest
from number_formats import DTYPE

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "chaos" / "failures.py"
MIN_FAULTS = 4
TIMEOUT_S = 200


def rows_of_a_run(*flags: str, **options: object) -> dict[str, str]:
    """Run the program. Returns the rows of its report."""
    options |= {"dp": 2, "requests": 12, "fault_interval_s": 0.3, "timeout_s": TIMEOUT_S, "dtype": DTYPE}
    arguments = [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), str(value))]
    command = [sys.executable, forked_ray.__file__, str(PROGRAM), *flags, *arguments]
    folders = (TESTS, TESTS / "support", TESTS.parent / "benchmarks")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S + 80, check=False, env=environment)
    rows = dict(re.findall(r"^ *(\S.*?)  +(\S.*)$", run.stdout, re.MULTILINE))
    said = run.stdout[-4000:] + run.stderr[-4000:]
    assert rows.get("requests lost") == "0", said
    assert re.fullmatch(r"0 of \d+", rows["results that differ"]), said
    assert rows["left behind"] == "nothing", said
    assert run.returncode == 0, said
    return rows


@pytest.mark.timeout(300)
def test_requests_survive_faults_of_several_kinds():
    rows = rows_of_a_run(min_faults=MIN_FAULTS, spare_nodes=1)
    assert len(re.findall(r"\d+ x ([a-z ]+)", rows["faults injected"])) >= MIN_FAULTS, rows


@pytest.mark.timeout(300)
def test_requests_with_and_without_adapters_survive_faults_in_pauses_and_sleeps():
    often = {"interruption_interval_s": 0.3, "still_s": 0.2, "adapters": 2}
    rows = rows_of_a_run("--one-node", "--pauses", "--sleep", min_faults=2, **often)
    assert int(rows["interruptions"].partition(":")[0]) >= 2, rows
    assert rows["outputs of streams while it was still"] == "0", rows
    assert "an adapter was added and removed" in rows
