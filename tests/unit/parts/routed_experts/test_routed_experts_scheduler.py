"""Requests have the experts of all their tokens, whatever the scheduler does with them: `FakeEngineCore` checks it."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine_core import FakeEngineCore
from scheduler_parts import part_of

from raycore.messages import StepPlan
from raycore.parts.routed_experts.scheduler import CachedExperts

PROMPT = [1 + index % 5 for index in range(21)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("has_cache", [True, False])
def test_a_cached_prefix_has_the_experts_with_which_it_was_computed(has_cache: bool, depth: int) -> None:
    engine = FakeEngineCore(has_experts=True, enable_prefix_caching=has_cache, depth=depth)
    for length in (21, 21, 13, 6):
        engine.submit(PROMPT[:length], max_tokens=4)
        engine.step()
    engine.run()
    assert (engine.runner.num_cached > 0) == has_cache


DRAFTED = {"num_right": [2, 0, 5], "depth": 2}
AHEAD: dict[str, Any] = DRAFTED | {"workers_draft": True}


@pytest.mark.parametrize(
    "options", [{}, {"depth": 3}, DRAFTED | {"tells_tokens": True}, AHEAD, AHEAD | {"depth": 3, "drafts_ahead": True}]
)
def test_preempted_requests_have_their_experts(options: dict[str, Any]) -> None:
    engine = FakeEngineCore(has_experts=True, num_blocks=14, **options)
    for first in range(4):
        engine.submit([first, *PROMPT[:9]], max_tokens=14)
    engine.run()
    assert engine.scheduler.load().num_preemptions > 0


def test_wrong_drafts_are_not_reported() -> None:
    engine = FakeEngineCore(has_experts=True, num_right=[0])
    engine.submit(PROMPT[:5], max_tokens=9, ignore_eos=True)
    positions: list[tuple[int, int]] = []
    while engine.scheduler.has_work():
        plan = engine.scheduler.schedule()
        assert isinstance(plan, StepPlan)
        outputs = engine.scheduler.update(plan, engine.runner.execute(plan))
        engine.runner.unseen.popleft()
        positions += [(report.position, report.num_tokens) for _, report in outputs.reports]
    assert positions == [(0, 5), *((position, 1) for position in range(5, 13))]


@pytest.mark.parametrize("depth", [2, 3])
def test_drafts_in_flight_do_not_shift_the_experts_of_prefixes(depth: int) -> None:
    """A prefix that goes on where steps were planned while it wasn't known how many drafts were right."""
    engine = FakeEngineCore(has_experts=True, enable_prefix_caching=True, **AHEAD | {"depth": depth})
    first = engine.submit(PROMPT, max_tokens=30, ignore_eos=True)
    engine.run()
    engine.submit([*PROMPT, *engine.tokens[first]], max_tokens=4)
    engine.run()
    assert engine.runner.num_cached > len(PROMPT)


def test_nothing_is_kept_of_requests_that_are_aborted_in_flight() -> None:
    engine = FakeEngineCore(has_experts=True, depth=2)
    for _ in range(2):
        engine.submit(PROMPT, max_tokens=4)
        engine.step()
    engine.abort(0, 1)
    engine.run()
    assert part_of(engine.scheduler, CachedExperts)._cached == {}
    assert not part_of(engine.scheduler, CachedExperts)._planned
