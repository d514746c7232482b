"""Processes that run the programs of the simulated world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from simulation.forking import Programs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Runs programs of the simulated world, each as a fork of one process."""
    made = Programs(ROOT, "1")
    yield made
    made.close()


@pytest.fixture(scope="session")
def programs_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """The same in another folder and with another seed for hashes, on which no story may depend."""
    elsewhere = tmp_path_factory.mktemp("project") / "elsewhere"
    elsewhere.symlink_to(ROOT)
    made = Programs(elsewhere, "2")
    yield made
    made.close()
