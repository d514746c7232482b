"""Which states are kept, and which requests begin with one. `FakeStates` checks that each is that of the right tokens.

Random requests are in `test_scheduler_random.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine_core import FakeEngineCore

PROMPT = [7 * index % 50 for index in range(45)]


def engine(**options: object) -> FakeEngineCore:
    chosen = {"num_prefix_states": 16, "mamba_block_size": 16, "max_num_batched_tokens": 100} | options
    return FakeEngineCore(block_size=4, **chosen)  # pyright: ignore[reportArgumentType]


def run(core: FakeEngineCore, prompt: list[int], **options: object) -> int:
    """Return how many of the prompt's tokens were cached."""
    seq_id = core.submit(prompt, max_tokens=options.pop("max_tokens", 3), **options)
    core.run()
    return core.started[seq_id]


def saved(core: FakeEngineCore) -> list[int]:
    """After how many tokens states were kept, in order."""
    plans = [plan.states for plan in core.plans if plan.states is not None]
    return [num for states in plans for num in np.frombuffer(states.saves, np.int32)[1::3].tolist()]


def test_a_prompt_begins_where_its_longest_known_prefix_has_a_state() -> None:
    core = engine()
    assert run(core, PROMPT) == 0
    # the last full block before the last token first, then every 16th token from the end on
    assert saved(core) == [44, 32, 16]
    assert run(core, PROMPT) == 44
    assert run(core, [*PROMPT[:40], 1, 2, 3]) == 32, "40 tokens are in blocks, and the last state there is at 32"
    assert run(core, [*PROMPT[:31], 1, 2, 3]) == 16
    assert run(core, PROMPT[:15]) == 0
    assert run(core, PROMPT[:44]) == 40, "its last token is computed, and 40 is its own end"


def test_a_state_at_the_end_of_a_blocks_last_token_is_never_needed() -> None:
    core = engine()
    run(core, PROMPT[:41])
    assert saved(core) == [40, 32, 16]
    assert run(core, PROMPT[:41]) == 40


@pytest.mark.parametrize("budget", range(4, 46))
def test_borders_of_chunks_change_nothing(budget: int) -> None:
    core = engine(max_num_batched_tokens=budget)
    run(core, PROMPT)
    assert sorted(saved(core)) == [16, 32, 44]
    assert run(core, PROMPT) == 44


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_right", [None, [0], [5], [2, 0, 5, 1, 3]])
def test_states_are_kept_while_output_grows(num_right: list[int] | None, depth: int) -> None:
    core = engine(num_right=num_right, depth=1 if num_right else depth, mamba_block_size=8)
    seq_id = core.submit(PROMPT[:9], max_tokens=40)
    core.run()
    assert saved(core) == [8, 16, 24, 32, 40]
    whole = PROMPT[:9] + core.tokens[seq_id]
    assert run(core, [*whole[:30], 1]) == 24
    assert run(core, [*whole[:46], 1]) == 40


def test_the_least_recently_used_state_gives_way() -> None:
    core = engine(num_prefix_states=3)
    run(core, PROMPT)
    assert run(core, PROMPT) == 44
    run(core, [1] * 6)
    assert run(core, PROMPT[:17]) == 0, "of one prompt, the shortest prefix goes first"
    assert run(core, PROMPT) == 44


def test_a_plan_that_needs_too_many_rows_keeps_the_longest_prefixes() -> None:
    core = engine(num_prefix_states=2)
    run(core, PROMPT)
    assert saved(core) == [44, 32]


def test_requests_of_the_same_plan_dont_share_a_state_that_it_computes() -> None:
    core = engine()
    first, second = core.submit(PROMPT, max_tokens=1), core.submit(PROMPT, max_tokens=1)
    core.step()
    third = core.submit(PROMPT, max_tokens=1)
    core.run()
    assert [core.started[each] for each in (first, second, third)] == [0, 0, 44]


def test_requests_with_other_salts_or_adapters_share_no_states() -> None:
    core = engine(max_adapters=2)
    run(core, PROMPT)
    assert run(core, PROMPT, cache_salt="other") == 0
    assert run(core, PROMPT, cache_salt="other") == 44
    assert run(core, PROMPT, adapter=(0, 5)) == 0
    assert run(core, PROMPT, adapter=(0, 5)) == 44


def test_prompt_logprobs_need_the_whole_prompt_but_its_states_are_kept() -> None:
    core = engine()
    run(core, PROMPT, prompt_logprobs=1)
    assert run(core, PROMPT) == 44
    assert run(core, PROMPT, prompt_logprobs=1) == 0


def test_a_preempted_request_goes_on_from_the_last_state() -> None:
    core = engine(num_blocks=14, max_num_batched_tokens=100, mamba_block_size=8)
    for seed in (1, 2):
        core.submit([seed] * 18, max_tokens=20, seed=seed)
    core.run()
    assert core.scheduler.load().num_preemptions > 0
    assert core.runner.states is not None
    assert core.runner.states.num_begun > 0


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"num_prefix_states": 0}])
def test_without_rows_for_prefixes_every_request_computes_all(options: dict[str, object]) -> None:
    core = engine(**options)
    assert [run(core, PROMPT), run(core, PROMPT)] == [0, 0]
    assert saved(core) == []


def test_the_prefix_cache_is_cleared_with_its_states() -> None:
    core = engine()
    run(core, PROMPT)
    assert core.scheduler.reset_prefix_cache()
    assert run(core, PROMPT) == 0
    core.submit(PROMPT, max_tokens=9)
    core.step()
    core.scheduler.start_over()
    core.runner = engine().runner
    core.run()
    assert run(core, PROMPT) == 44
