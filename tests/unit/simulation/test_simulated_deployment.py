"""A deployment in virtual time: every request ends once with its length, and failures and scaling cost what they do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engines import make_engine, make_plan

from raycore.client.request_table import RequestTable
from raycore.config import EngineConfig
from raycore.errors import InvalidConfig
from raycore.simulation.autoscaling import Autoscaling, autoscaling_options
from raycore.simulation.deployment import Deployment, Kill, Plan
from raycore.simulation.outcome import Outcome
from raycore.simulation.traces import TracedRequest


def served(config: EngineConfig, plan: Plan, trace: list[TracedRequest]) -> Outcome:
    """Serve a trace, and check that nothing is left over on any rank."""
    deployment = Deployment(config, plan)
    ranks: list[Any] = []
    add = deployment._add_rank

    def add_rank(*args: Any, **options: Any) -> None:
        add(*args, **options)
        ranks.append((list(deployment._ranks)[-1], list(deployment._ranks.values())[-1]))

    deployment._add_rank = add_rank
    outcome = deployment.run(trace)
    for _, serving in ranks:
        if not serving.is_dead:
            scheduler = serving.rank.scheduler
            scheduler.check_integrity()
            assert not scheduler.has_work()
            assert scheduler.load().kv_usage == 0.0
    return outcome


def check_ends(outcome: Outcome, trace: list[TracedRequest]) -> None:
    assert sorted(outcome.requests) == list(range(len(trace)))
    for index, request in enumerate(trace):
        found = outcome.requests[index]
        assert found.error is None
        assert found.num_output == request.num_output
        assert found.first_token_s is not None
        assert found.last_token_s is not None
        assert request.arrival_s < found.first_token_s <= found.last_token_s
    assert outcome.num_output_tokens == sum(request.num_output for request in trace)


def test_a_request_alone_takes_the_time_of_its_steps():
    config = make_engine()
    outcome = served(config, make_plan(config), [TracedRequest(0.0, 100, 3)])
    found = outcome.requests[0]
    # 64 and 36 tokens of the prompt, then two tokens that see 101 and 102
    chunks = [0.001 + 0.01 + 0.0064, 0.001 + 0.01 + 0.0036]
    decodes = [0.001 + 0.01 + 0.001 + context * 1e-6 for context in (101, 102)]
    assert found.first_token_s == pytest.approx(sum(chunks))
    assert found.last_token_s == pytest.approx(sum(chunks) + sum(decodes))
    assert found.queue_s == 0.0
    assert outcome.num_steps == 4
    assert outcome.busy_s == pytest.approx(sum(chunks) + sum(decodes) - 4 * 0.001)


def test_two_steps_in_flight_hide_the_make_engine():
    config = make_engine(depth=2)
    found = served(config, make_plan(config), [TracedRequest(0.0, 10, 100)]).requests[0]
    decodes = sum(0.01 + 0.001 + context * 1e-6 for context in range(11, 110))
    assert found.first_token_s == pytest.approx(0.001 + 0.01 + 0.001)
    assert found.last_token_s == pytest.approx(0.012 + decodes)


TRACES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 150), st.integers(1, 60), st.sampled_from([(), (1,), (2,)])),
    min_size=1,
    max_size=24,
).map(lambda rows: [TracedRequest(time / 20, p, n, ids) for time, p, n, ids in sorted(rows)])


@settings(max_examples=60)
@given(
    trace=TRACES,
    depth=st.sampled_from([1, 2, 3]),
    num_ranks=st.sampled_from([1, 2, 3]),
    num_blocks=st.integers(14, 40),
    caches=st.booleans(),
    max_num_seqs=st.sampled_from([1, 4]),
    kills=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 80)), max_size=2),
)
def test_runs_of_decodes_change_nothing_and_all_requests_end(
    trace: list[TracedRequest],
    depth: int,
    num_ranks: int,
    num_blocks: int,
    caches: bool,
    max_num_seqs: int,
    kills: list[tuple[int, int]],
):
    config = make_engine(
        depth, 9, data_parallel_size=num_ranks, enable_prefix_caching=caches, max_num_seqs=max_num_seqs
    )
    losses = [Kill(rank, time / 20) for rank, time in kills if rank < num_ranks]
    chosen = make_plan(config, num_blocks, kills=losses, detection_s=0.1, replacement_s=0.6)
    alone = served(config, replace(chosen, takes_runs=False), trace)
    check_ends(alone, trace)
    together = served(config, chosen, trace)
    check_ends(together, trace)
    for index, request in alone.requests.items():
        other = together.requests[index]
        assert other.first_token_s == pytest.approx(request.first_token_s, rel=1e-9)
        assert other.last_token_s == pytest.approx(request.last_token_s, rel=1e-9)
        assert (other.num_cached, other.num_output) == (request.num_cached, request.num_output)
    for name in ("num_preemptions", "num_queried", "num_cached", "num_steps"):
        assert getattr(together, name) == getattr(alone, name)
    assert [(loss.num_moved, loss.num_tokens_again) for loss in together.losses] == [
        (loss.num_moved, loss.num_tokens_again) for loss in alone.losses
    ]


def test_long_outputs_are_taken_in_few_events(monkeypatch: pytest.MonkeyPatch):
    config = make_engine()
    counted: list[int] = []
    step = Deployment._go_on

    def go_on(self: Deployment, *args: Any) -> None:
        counted.append(1)
        step(self, *args)

    monkeypatch.setattr(Deployment, "_go_on", go_on)
    outcome = served(config, make_plan(config), [TracedRequest(0.0, 10, 200)])
    assert outcome.num_steps == 200
    assert len(counted) == 2, "the prompt's step, and all others up to the last one"


def test_the_client_takes_in_nothing_before_a_request_ends(monkeypatch: pytest.MonkeyPatch):
    config = make_engine()
    taken: list[int] = []
    take = RequestTable.take

    def count(self: RequestTable, dp_rank: int, before: Any, batch: Any) -> Any:
        taken.append(len(batch.finished))
        return take(self, dp_rank, before, batch)

    monkeypatch.setattr(RequestTable, "take", count)
    trace = [TracedRequest(0.0, 10, 150), TracedRequest(0.5, 10, 20), TracedRequest(0.9, 10, 120)]
    plan = make_plan(config)
    together = served(config, plan, trace)
    assert taken == [1, 1, 1]
    alone = served(config, replace(plan, takes_runs=False), trace)
    for index, request in alone.requests.items():
        assert together.requests[index].first_token_s == pytest.approx(request.first_token_s, rel=1e-12)
        assert together.requests[index].last_token_s == request.last_token_s


def test_the_client_knows_of_waiting_requests_after_the_next_step():
    config = make_engine(data_parallel_size=2, max_num_seqs=1, max_num_batched_tokens=256)
    # when the last two come, the third one has waited on the first rank for some steps
    times = [(0.0, 60), (0.0, 90), (0.1, 10), (0.15, 10), (0.15, 10)]
    trace = [TracedRequest(at_s, 10, num_output) for at_s, num_output in times]
    plan = make_plan(config)
    alone, together = served(config, replace(plan, takes_runs=False), trace), served(config, plan, trace)
    for index, request in alone.requests.items():
        assert together.requests[index].last_token_s == pytest.approx(request.last_token_s)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_ends_before_blocks_do(depth: int):
    config = make_engine(depth)
    trace = [TracedRequest(0.0, 10, 200), TracedRequest(0.0, 12, 190)]
    plan = make_plan(config, 16)
    alone, together = served(config, replace(plan, takes_runs=False), trace), served(config, plan, trace)
    assert together.num_preemptions == alone.num_preemptions == 1
    assert together.last_s == pytest.approx(alone.last_s)
    assert together.num_steps == alone.num_steps


def test_prefixes_are_found_on_the_rank_that_has_them():
    config = make_engine(data_parallel_size=2, max_model_len=256, max_num_batched_tokens=256)
    trace = [TracedRequest(float(index), 200, 4, (index % 2,)) for index in range(8)]
    outcome = served(config, make_plan(config), trace)
    check_ends(outcome, trace)
    assert [outcome.requests[index].num_cached for index in range(8)] == [0, 0, *[192] * 6]
    assert outcome.figures()["cache_hit_rate"] == pytest.approx(6 * 192 / 1600)


def test_requests_that_fit_nowhere_are_refused_and_told():
    config = make_engine()
    outcome = served(config, make_plan(config), [TracedRequest(0.0, 300, 4), TracedRequest(0.0, 10, 4)])
    figures = outcome.figures()
    assert (figures["completed"], figures["refused_or_failed"]) == (1, 1)
    assert "the prompt has 300 tokens" in figures["errors"][0]


def test_a_lost_ranks_requests_go_on_elsewhere_with_their_tokens():
    config = make_engine(data_parallel_size=2)
    trace = [TracedRequest(0.0, 20, 50) for _ in range(4)]
    whole = served(config, make_plan(config), trace)
    outcome = served(config, make_plan(config, kills=[Kill(0, 0.2)], detection_s=0.3, replacement_s=5.0), trace)
    check_ends(outcome, trace)
    (loss,) = outcome.losses
    assert loss.num_moved == 2
    # both have got some of their 50 tokens, which are computed again with the prompts
    assert 2 * 20 < loss.num_tokens_again < 2 * 70
    assert min(loss.stalls_s) > 0.3
    assert max(loss.stalls_s) < 0.4
    assert outcome.last_s > whole.last_s + 0.3
    # the replacement hasn't come before the end
    assert outcome.ranks[:2] == [(0.0, 1), (0.0, 2)]
    assert outcome.ranks[2:] == [(0.2, 1)]


def test_requests_wait_for_the_replacement_of_the_only_rank():
    config = make_engine()
    trace = [TracedRequest(0.0, 20, 50), TracedRequest(1.0, 20, 5)]
    outcome = served(config, make_plan(config, kills=[Kill(0, 0.2)], detection_s=0.3, replacement_s=5.0), trace)
    check_ends(outcome, trace)
    first_s = outcome.requests[1].first_token_s
    assert first_s is not None
    assert 5.2 < first_s < 5.3
    assert outcome.rank_s == pytest.approx(0.2 + outcome.last_s - 0.2)


def test_requests_fail_after_too_many_losses():
    config = make_engine(max_replays=1)
    kills = [Kill(0, 0.2), Kill(0, 2.2)]
    outcome = served(
        config, make_plan(config, kills=kills, detection_s=0.1, replacement_s=1.0), [TracedRequest(0, 20, 230)]
    )
    assert outcome.requests[0].error is not None
    assert "2 ranks failed while they had it" in outcome.requests[0].error
    assert outcome.figures()["completed"] == 0


def test_kills_that_find_nobody_are_told():
    config = make_engine()
    outcome = served(config, make_plan(config, kills=[Kill(0, 99.0)]), [TracedRequest(0.0, 20, 5)])
    assert outcome.figures()["failures"] == [{"rank": 0, "at_s": 99.0, "did_happen": False}]


def test_replicas_come_with_the_load_and_go_after_it():
    config = make_engine()
    options = autoscaling_options(
        {
            "min_replicas": 1,
            "max_replicas": 3,
            "target_ongoing_requests": 4,
            "upscale_delay_s": 2,
            "downscale_delay_s": 5,
            "look_back_period_s": 3,
            "metrics_interval_s": 1,
        }
    )
    trace = [TracedRequest(index / 10, 40, 60) for index in range(200)]
    trace += [TracedRequest(20.0 + index, 20, 10) for index in range(100)]
    outcome = served(config, make_plan(config, autoscaling=options, start_s=3.0), trace)
    check_ends(outcome, trace)
    counts = [count for _, count in outcome.ranks]
    assert counts[0] == 1
    assert max(counts) == 3
    assert counts[-1] == 1
    first_more_s = next(time for time, count in outcome.ranks if count > 1)
    assert first_more_s >= 2.0 + 3.0
    fixed = served(make_engine(data_parallel_size=3), make_plan(config), trace)
    assert outcome.rank_s < fixed.rank_s
    assert outcome.figures()["ttft_p99_s"] > fixed.figures()["ttft_p99_s"]


def test_delays_begin_again_when_the_direction_changes():
    scaling = Autoscaling(
        autoscaling_options(
            {"max_replicas": 4, "upscale_delay_s": 2.0, "downscale_delay_s": 3.0, "look_back_period_s": 0.5}
        ),
        max_num_seqs=10,
    )
    decided: list[int] = []
    target = 2
    for second, requests in enumerate([35, 35, 35, 5, 5, 35, 5, 5, 5, 5, 5]):
        scaling._reports.clear()
        scaling.report(float(second), requests, 0)
        target = scaling.decide(float(second), target, target)
        decided.append(target)
    assert decided == [2, 2, 4, 4, 4, 4, 4, 4, 4, 1, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_replica": 2}, "unknown setting 'max_replica'; did you mean max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas=3 and max_replicas=2"),
        ({"target_tokens": 0}, "target_tokens=0.* isn't a positive number"),
        ({"max_replicas": 2, "initial_replicas": 5}, "initial_replicas=5 isn't from min_replicas to max_replicas"),
    ],
)
def test_wrong_settings_of_autoscaling_are_named(given: dict[str, Any], message: str):
    with pytest.raises(InvalidConfig, match=message):
        autoscaling_options(given)
