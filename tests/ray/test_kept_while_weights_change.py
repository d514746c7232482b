"""Ranks that share what they keep, while their weights change and ranks are killed: a few rounds of the benchmark."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chaos.kept_results import KINDS, is_good, measure

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_find_what_equal_weights_have_computed_and_nothing_of_others(
    ray_cluster: Any, tmp_path: Path, kind: str
) -> None:
    run = asyncio.run(measure(kind, 4, tmp_path))
    assert is_good(run), (run.counts, run.wrong)
