"""Each account is seen to name faults that are put into the product."""

from __future__ import annotations

import pytest

from simulation.forking import Programs

NUM_SEEDS = 12


@pytest.mark.timeout(1600)
def test_a_few_seeds_show_each_fault_and_the_account_names_it(programs: Programs):
    names = programs.run("simulation.cluster.planted", "0").stdout.splitlines()
    found = programs.run("simulation.cluster.planted", str(NUM_SEEDS))
    assert not found.stderr, found.stderr
    lines = found.stdout.splitlines()
    faults = dict(line.split(": ", 1) for line in lines if ": seed " in line or "NOT FOUND" in line)
    assert list(faults) == names
    assert all(said.startswith("seed ") for said in faults.values()), found.stdout
