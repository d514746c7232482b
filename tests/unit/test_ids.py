"""The ids of tests."""

from __future__ import annotations

from collections import Counter

import pytest


def test_ids_are_unique(request: pytest.FixtureRequest) -> None:
    """Of several tests with the same id, pytest-xdist runs only one."""
    counts = Counter(item.nodeid for item in request.session.items)
    assert [each for each, count in counts.items() if count > 1] == []
