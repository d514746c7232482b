"""The real engine over simulated workers: each fault that is put in is shown by some seed. See also `test_stories`."""

from __future__ import annotations

import pytest

from simulation.engine.faults import FAULTS
from simulation.forking import Programs


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_hundred_seeds_show_this_fault(name: str, programs: Programs):
    found = programs.run("simulation.engine", "--seeds", "0", "100", "--faults", name)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith(f"{name}: seed "), found.stdout + found.stderr


def test_the_story_of_a_seed_is_told(programs: Programs):
    found = programs.run("simulation.engine", "--seed", "1")
    assert found.returncode == 0, found.stdout
    assert " ends by " in found.stdout


@pytest.mark.parametrize("name", ["", "no_such_fault"])
def test_an_unknown_fault_is_refused(name: str, programs: Programs):
    assert "invalid choice" in programs.run("simulation.engine", "--seeds", "0", "1", "--faults", name).stderr
