"""When a prefix is fetched, and when it is computed."""

from __future__ import annotations

import pytest

from raycore.parts.transfers.connectors.cost import CostModel

BLOCK_BYTES, BLOCK_SIZE = 1_000_000, 16


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cost(clock: Clock) -> CostModel:
    return CostModel(BLOCK_BYTES, BLOCK_SIZE, clock)


def test_what_was_never_measured_is_fetched(cost: CostModel):
    assert cost.is_worth_fetching(1, is_local=True)
    assert not cost.is_worth_fetching(0, is_local=True)


def test_the_faster_way_is_taken(cost: CostModel):
    cost.observe_step(1600, 1.0)  # 10 ms a block
    cost.observe_fetch(100 * BLOCK_BYTES, 0.5, is_local=True)  # 5 ms a block
    assert cost.is_worth_fetching(10, is_local=True)
    for _ in range(20):
        cost.observe_fetch(100 * BLOCK_BYTES, 2.0, is_local=True)
    assert not cost.is_worth_fetching(10, is_local=True)
    for _ in range(20):
        cost.observe_step(160, 1.0)
    assert cost.is_worth_fetching(10, is_local=True)


def test_few_blocks_are_not_worth_the_trouble(cost: CostModel):
    for _ in range(20):
        cost.observe_step(16_000, 1.0)  # 1 ms a block
        cost.observe_fetch(100 * BLOCK_BYTES, 0.05, is_local=True)  # 0.5 ms a block, and 2 ms
    assert not cost.is_worth_fetching(2, is_local=True)
    assert cost.is_worth_fetching(8, is_local=True)


def test_short_steps_say_nothing(cost: CostModel):
    cost.observe_step(4, 1.0)
    cost.observe_step(1600, 0.0)
    assert cost.compute_s(1) == float("inf")


def test_networks_and_shared_memory_have_rates_of_their_own(cost: CostModel):
    cost.observe_step(1600, 1.0)
    for _ in range(20):
        cost.observe_fetch(BLOCK_BYTES, 1.0, is_local=False)
    assert not cost.is_worth_fetching(100, is_local=False)
    assert cost.is_worth_fetching(100, is_local=True)


def test_failures_count_until_they_are_long_ago(cost: CostModel, clock: Clock):
    cost.observe_step(1600, 1.0)
    for _ in range(8):
        cost.observe_failure(is_local=True)
    assert not cost.is_worth_fetching(100, is_local=True)
    clock.now_s += 61
    assert cost.is_worth_fetching(100, is_local=True)
