"""Kinds of requests: for each, seeds show a fault that is put into the product."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simulation.forking import Programs

KINDS = Path(__file__).parent / "cluster" / "kinds"
JUDGED_BY_TOKENS = {"aborted", "n", "streamed"}
"""They only name what requests have of themselves."""


@pytest.mark.timeout(1600)
def test_seeds_with_requests_of_a_kind_show_faults_of_it(programs: Programs):
    found = programs.run("simulation.injected")
    assert found.returncode == 0, found.stdout + found.stderr
    names = {re.split(r" \d+: found by seed", line)[0] for line in found.stdout.splitlines()}
    modules = [path for path in KINDS.glob("*.py") if "\nKIND = " in path.read_text()]
    assert len(modules) == len(names | JUDGED_BY_TOKENS)
