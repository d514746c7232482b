"""Seeds of engines of each capability find each fault that is put into the product."""

from __future__ import annotations

import pytest

from simulation.cluster.deployments import injected
from simulation.forking import Programs


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", list(injected.FAULTS))
def test_seeds_find_this_fault(name: str, programs: Programs):
    found = programs.run("simulation.cluster.deployments.injected", "--seeds", "60", "--faults", name)
    assert found.stdout.startswith(f"{name}: seed "), found.stdout + found.stderr
