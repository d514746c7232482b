"""What is counted of batches, on a clock of the test's own."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from asks import checked

from raycore.client.output_processor import OutputProcessor
from raycore.client.recorder import Recorder
from raycore.messages import NO_LOAD, DraftStats, ExternalHits, FinishedRequest, LoadView, OutputBatch, Pooled
from raycore.metrics.catalog import LABELLED_COUNTERS
from raycore.metrics.counts import BucketCounts, total
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams

PROMPT = [5, 6, 7]


class Rank:
    """An assembler and a recorder, as a client has them, for one rank."""

    def __init__(self, tokenizer) -> None:
        self.now_s = 100.0
        self.assembler = OutputProcessor(tokenizer, clock=lambda: self.now_s)
        self.recorder = Recorder(max_model_len=100)
        self.recorder.add_rank(0)
        self.load = NO_LOAD

    def add(self, *seq_ids: int, **params) -> None:
        params = SamplingParams(n=len(seq_ids), **params)
        self.assembler.add(checked(f"r{seq_ids[0]}", PROMPT, params), list(seq_ids))

    def take(self, now_s: float, seq_ids=(), finished=(), load=None, earlier=(), **fields) -> None:
        """A batch comes: `seq_ids` have a token each of just now, `earlier` has (seq_ids, age) of steps before."""
        self.now_s = now_s
        steps = [*((len(each), age_s, 0.01) for each, age_s in earlier), (len(seq_ids), 0.0, 0.01)]
        seq_ids = [seq_id for each, _ in earlier for seq_id in each] + list(seq_ids)
        batch = OutputBatch(
            seq_ids=np.array(seq_ids, np.int64).tobytes(),
            token_ids=np.full(len(seq_ids), 9, np.int32).tobytes(),
            steps=steps,
            finished=[FinishedRequest(*end) for end in finished],
            load=load or self.load,
            **fields,
        )
        self.recorder.take(0, self.load, batch.load, self.assembler.process(batch))
        self.load = batch.load

    @property
    def counts(self):
        return self.recorder.counts()[0]


@pytest.fixture
def rank(tokenizer):
    return Rank(tokenizer)


def values(histogram: BucketCounts) -> tuple[int, float]:
    return histogram.count, pytest.approx(histogram.sum)


def test_a_finished_request_is_counted_with_the_times_of_its_phases(rank):
    rank.add(1, max_tokens=3)
    rank.take(100.5, [1], started=[(1, 2)], queued=[(1, 0.125)])
    rank.take(100.75, [1])
    rank.take(101.5, [1], [(1, "length")])
    counts = rank.counts
    assert (counts.num_prompt_tokens, counts.num_cached_prompt_tokens, counts.num_output_tokens) == (3, 2, 3)
    assert counts.num_finished == {"stop": 0, "length": 1, "repetition": 0, "abort": 0, "error": 0}
    assert values(counts.first_token_s) == (1, 0.5)
    assert values(counts.between_tokens_s) == (2, 1.0)
    assert values(counts.per_output_token_s) == (1, 0.5)
    assert values(counts.request_s) == (1, 1.5)
    assert values(counts.queue_s) == (1, 0.125)
    assert values(counts.prefill_s) == (1, 0.375)
    assert values(counts.decode_s) == (1, 1.0)
    assert values(counts.inference_s) == (1, 1.375)
    assert values(counts.prompt_tokens) == (1, 3)
    assert values(counts.computed_prompt_tokens) == (1, 1)
    assert values(counts.output_tokens) == values(counts.longest_output_tokens) == values(counts.max_tokens) == (1, 3)
    assert values(counts.n) == (1, 1)


def test_prompt_tokens_are_counted_by_where_they_came_from_and_preemptions_by_request(rank):
    load = LoadView(0, 1, 0.5, external=ExternalHits(num_queries=2, host=1, p2p=1))
    rank.add(1)
    rank.add(2)
    rank.take(101.0, [1], started=[(1, 2)], external=[(1, 1)], load=load)
    rank.take(102.0, preempted=[(1,), (2,)])
    rank.take(103.0, [2], started=[(2, 0)], preempted=[(1,)])
    rank.take(104.0, [1, 2], [(1, "length"), (2, "length")])
    counts = rank.counts
    by_source = {name: values for name, _, _, values in LABELLED_COUNTERS}["vllm:prompt_tokens_by_source"](counts)
    assert by_source == {"local_compute": 4, "local_cache_hit": 1, "external_kv_transfer": 1}
    assert (counts.num_external_queries, counts.num_external_hits) == (2, 2)
    assert (counts.num_host_hits, counts.num_p2p_hits) == (1, 1)
    assert values(counts.preemptions) == (2, 3)
    # another client's copy of what the rank counts isn't added
    both = total([{0: counts}, {0: counts}])[0]
    assert (both.num_external_hits, both.num_external_prompt_tokens) == (2, 2)


def test_lookups_of_images_are_counted(rank):
    rank.recorder.count_images(0, 3, 1)
    rank.recorder.count_images(0, 1, 1)
    assert (rank.counts.num_image_lookups, rank.counts.num_image_hits) == (4, 2)


def test_tokens_of_all_n_sequences_are_counted_and_the_request_once(rank):
    rank.add(1, 2, max_tokens=9)
    rank.take(101.0, [1, 2])
    rank.take(102.0, [1, 2], [(1, "stop")])
    assert rank.counts.n.count == 0
    rank.take(103.0, [2], [(2, "length")])
    counts = rank.counts
    assert (counts.num_prompt_tokens, counts.num_output_tokens) == (6, 5)
    assert (counts.num_finished["stop"], counts.num_finished["length"]) == (1, 1)
    assert values(counts.output_tokens) == (2, 5)
    assert values(counts.longest_output_tokens) == (1, 3)
    assert values(counts.n) == (1, 2)
    assert values(counts.between_tokens_s) == (3, 3.0)


def test_a_steps_tokens_include_the_prompts_that_it_finished(rank):
    rank.add(1)
    rank.take(101.0, [1])
    rank.add(2, 3)
    rank.take(102.0, [1], earlier=[([1], 0.75), ([1, 2, 3], 0.5)])
    assert values(rank.counts.step_tokens) == (4, 4 + 1 + 9 + 1)
    assert [rank.counts.step_tokens.counts[index] for index in (0, 1, 2)] == [2, 1, 1]  # up to 1, 8 and 16


def test_two_sequences_that_end_in_one_batch_are_counted_as_one_request(rank):
    rank.add(1, 2)
    rank.take(101.0, [1, 2], [(1, "stop"), (2, "stop")])
    assert values(rank.counts.n) == (1, 2)


def test_tokens_held_back_by_the_rank_are_timed_from_when_they_were_made(rank):
    rank.add(1)
    rank.add(2)
    rank.take(101.0, [1, 2], earlier=[([1], 0.75), ([1], 0.5)])
    assert values(rank.counts.between_tokens_s) == (2, 0.25 + 0.5)
    assert values(rank.counts.first_token_s) == (2, 0.25 + 1.0)
    rank.take(103.0, [], earlier=[([1, 2], 1.0), ([1, 2], 0.875)])
    assert values(rank.counts.between_tokens_s) == (6, 0.75 + 2 * 1.0 + 2 * 0.125)
    assert rank.counts.num_output_tokens == 8


def test_tokens_of_aborted_requests_are_not_counted_or_remembered(rank):
    rank.add(1)
    rank.add(2)
    rank.take(101.0, [1, 2])
    rank.recorder.drop(0, [1], rank.assembler.abort("r1"), "abort")
    rank.take(102.0, [1, 2])
    rank.take(103.0, [1, 2], earlier=[([1], 0.1)])
    counts = rank.counts
    assert counts.num_output_tokens == 4
    assert values(counts.between_tokens_s) == (2, 2.0)
    assert counts.num_finished["abort"] == 1
    assert counts.request_s.count == 0
    rank.take(104.0, [2], [(2, "stop")])
    assert len(rank.recorder._gaps) == 0


def test_inter_token_times_are_measured_for_each_sequence_in_any_batches(tokenizer):
    random = Random(3)
    rank = Rank(tokenizer)
    seq_ids = list(range(1, 9))
    for seq_id in seq_ids:
        rank.add(seq_id)
    last_s: dict[int, float] = {}
    expected = []
    for now_s in range(101, 161):
        steps = [[seq_id for seq_id in seq_ids if random.random() < 0.95] for _ in range(random.randrange(1, 4))]
        earlier = [(step, 0.25 * (len(steps) - 1 - i)) for i, step in enumerate(steps[:-1])]
        ended = [random.choice(seq_ids)] if len(seq_ids) > 2 and random.random() < 0.1 else []
        rank.take(float(now_s), steps[-1], [(seq_id, "stop") for seq_id in ended], earlier=earlier)
        for step, age_s in [*earlier, (steps[-1], 0.0)]:
            expected += [now_s - age_s - last_s[seq_id] for seq_id in step if seq_id in last_s]
            last_s |= dict.fromkeys(step, now_s - age_s)
        seq_ids = [seq_id for seq_id in seq_ids if seq_id not in ended]
    histogram = rank.counts.between_tokens_s
    assert values(histogram) == (len(expected), sum(expected))
    assert len(rank.recorder._gaps) == len(seq_ids) < 8


def test_a_sequence_that_moves_to_another_rank_keeps_its_start_time(rank):
    rank.add(1)
    rank.take(101.0, [1], queued=[(1, 0.5)])
    rank.assembler.rebind(1, 7)
    rank.recorder.rebind(1, 7)
    rank.take(104.0, [1, 7], [(7, "stop")], queued=[(7, 0.0)])
    counts = rank.counts
    assert values(counts.between_tokens_s) == (1, 3.0)
    assert values(counts.first_token_s) == (1, 1.0)
    assert values(counts.queue_s) == (1, 0.5)
    assert counts.num_prompt_tokens == 3


def test_a_request_that_the_engine_refuses_is_counted_as_an_error(rank):
    rank.add(1, 2)
    rank.take(101.0, [], [(1, "error", "too large"), (2, "error", "too large")])
    counts = rank.counts
    assert counts.num_finished["error"] == 2
    assert counts.request_s.count == counts.n.count == 0


def test_a_request_that_fails_when_another_of_its_sequences_ends_is_not_counted_as_a_whole_one(rank):
    rank.add(1, 2)
    rank.take(101.0, [1], [(1, "length"), (2, "error", "too large")])
    counts = rank.counts
    assert (counts.num_finished["length"], counts.num_finished["error"]) == (1, 1)
    assert counts.n.count == counts.longest_output_tokens.count == 0


def test_a_ranks_counts_add_up_over_its_replaced_processes(rank):
    rank.take(101.0, load=LoadView(0, 1, 0.5, 2, 100, 40))
    rank.take(102.0, load=LoadView(0, 1, 0.5, 3, 150, 80))
    rank.load = NO_LOAD  # another process takes its place
    rank.recorder.add_rank(0)
    rank.take(103.0, load=LoadView(0, 1, 0.5, 1, 20, 0))
    counts = rank.counts
    assert (counts.num_preemptions, counts.num_prefix_queries, counts.num_prefix_hits) == (4, 170, 80)


def test_drafts_are_counted_across_replacements(rank):
    def load(*drafts):
        return LoadView(0, 1, 0.5, drafts=DraftStats(*drafts))

    rank.take(101.0, load=load(2, 6, (2, 1)))
    rank.take(102.0, load=load(5, 12, (4, 1)))
    rank.load = NO_LOAD  # another process takes its place
    rank.take(103.0, load=load(1, 3, (1, 0)))
    counts = rank.counts
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (6, 15, 6)
    assert counts.num_accepted_per_position == [5, 1]


def test_a_step_may_give_a_sequence_several_tokens(rank):
    """These count as one in the latencies, as in vLLM."""
    rank.add(1)
    rank.add(2)
    rank.take(101.0, [1, 1, 1, 2])
    rank.take(103.0, [1, 2, 2])
    rank.take(104.0, [1, 2])
    counts = rank.counts
    assert counts.num_output_tokens == 9
    assert values(counts.between_tokens_s) == (4, 6.0)


def test_counts_are_a_copy(rank):
    before = rank.counts
    rank.add(1)
    rank.take(101.0, [1], [(1, "stop")])
    assert before.num_output_tokens == before.request_s.count == before.num_finished["stop"] == 0
    assert rank.recorder.num_tokens() == 4


def test_whoever_wants_them_gets_the_figures_of_each_batch(rank):
    told = []
    rank.recorder.told = lambda *figures: told.append(figures)
    rank.add(1, 2, max_tokens=3)
    loads = [
        LoadView(1, 2, 0.25, prefix_cache_queries=8, prefix_cache_hits=2),
        LoadView(
            0, 2, 0.5, num_preemptions=1, prefix_cache_queries=9, prefix_cache_hits=2, drafts=DraftStats(1, 2, [1])
        ),
    ]
    rank.take(100.5, [1, 2], started=[(1, 2)], queued=[(1, 0.125)], load=loads[0])
    rank.take(101.5, [1, 2], [(1, "stop")], load=loads[1])
    rank.take(102.0, [2], [(2, "length")])

    assert [dp_rank for dp_rank, _, _ in told] == [0, 0, 0]
    first, second, third = (scheduler for _, scheduler, _ in told)
    assert (first.num_waiting_reqs, first.num_running_reqs, first.kv_cache_usage) == (1, 2, 0.25)
    assert (first.prefix_cache_stats.queries, first.prefix_cache_stats.hits) == (8, 2)
    assert (second.prefix_cache_stats.queries, second.prefix_cache_stats.hits) == (1, 0)
    assert first.spec_decoding_stats is third.spec_decoding_stats is None
    assert second.spec_decoding_stats.num_accepted_tokens_per_pos == [1]
    first, second, third = (iteration for _, _, iteration in told)
    assert (first.num_prompt_tokens, first.num_generation_tokens, first.num_preempted_reqs) == (6, 2, 0)
    assert (first.time_to_first_tokens_iter, first.inter_token_latencies_iter) == ([0.5, 0.5], [])
    assert (second.num_prompt_tokens, second.num_generation_tokens, second.num_preempted_reqs) == (0, 2, 1)
    assert second.inter_token_latencies_iter == [1.0, 1.0]
    (ended,) = second.finished_requests
    assert (ended.finish_reason, ended.num_prompt_tokens, ended.num_generation_tokens) == ("stop", 3, 2)
    assert (ended.e2e_latency, ended.queued_time, ended.decode_time, ended.prefill_time) == (1.5, 0.125, 1.0, 0.375)
    assert (ended.mean_time_per_output_token, ended.max_tokens_param) == (1.0, 3)
    assert (second.n_params_iter, third.n_params_iter, third.max_num_generation_tokens_iter) == ([], [2], [3])


def test_figures_of_requests_that_fail_or_pool_agree_with_the_counts(rank):
    told = []
    rank.recorder.told = lambda *figures: told.append(figures)
    rank.add(1)
    rank.assembler.add(checked("r2", PROMPT, PoolingParams(task="embed")), [2])
    rank.take(101.0, [], [(1, "error", "too large"), (2, "stop")], pooled=[(2, Pooled(bytes(4), [1]))])
    ((_, _, figures),) = told
    assert figures.n_params_iter == figures.max_num_generation_tokens_iter == []
    assert rank.counts.n.count == 0
    assert figures.num_prompt_tokens == rank.counts.num_prompt_tokens == len(PROMPT)
