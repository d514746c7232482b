"""A request waits for its last token if a rule of its own needs it, and otherwise doesn't."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine_core import FakeEngineCore

from raycore.messages import ThinkingLimit
from raycore.structured_outputs import StructuredOutputsParams

RULES: list[dict[str, Any]] = [
    {"structured_outputs": StructuredOutputsParams(regex="a+")},
    {"thinking": ThinkingLimit(5, [2], [3], [3])},
    {"bad_words_token_ids": [[4], [5, 6]]},
]


@pytest.mark.parametrize("options", RULES)
def test_the_next_token_is_planned_when_the_last_one_has_arrived(options: dict[str, Any]) -> None:
    assert num_plans_in_flight(**options) == 1


@pytest.mark.parametrize("options", [{}, {"bad_words_token_ids": [[4], [5]]}, {"min_tokens": 2}])
def test_a_request_without_such_a_rule_does_not_wait(options: dict[str, Any]) -> None:
    assert num_plans_in_flight(**options) == 2


def num_plans_in_flight(**options: Any) -> int:
    """How many steps are planned of a request before the first result arrives, if two may be in flight."""
    engine = FakeEngineCore()
    engine.submit([1, 2, 3], max_tokens=8, **options)
    return sum(engine.scheduler.schedule() is not None for _ in range(2))
