"""What is selected by scores."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from raycore.attention.selection import first_highest


@given(
    scores=st.lists(st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 2.5]), min_size=9, max_size=9), min_size=1),
    count=st.integers(1, 9),
)
def test_of_equal_scores_the_first_ones_are_taken(scores: list[list[float]], count: int) -> None:
    found = first_highest(torch.tensor(scores), count)
    expected = [sorted(sorted(range(9), key=lambda index: -row[index])[:count]) for row in scores]
    assert found.tolist() == expected
