import msgspec

from raycore.metrics.counts import FINISH_REASONS, BucketCounts, RankCounts, token_bounds, total


def test_a_histogram_counts_a_bound_in_its_bucket_and_larger_values_in_one_more():
    histogram = BucketCounts((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    histogram.observe(1.25, times=3)
    assert histogram.counts == [2, 5, 1]
    assert histogram.sum == 103.5 + 3.75


def test_token_bounds_end_at_the_longest_request():
    assert token_bounds(1000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert token_bounds(499)[-1] == 200


def test_counts_are_equal_after_encoding_and_decoding():
    counts = RankCounts.empty(100)
    counts.request_s.observe(1.0)
    counts.num_finished["stop"] += 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(counts), type=RankCounts) == counts


def test_the_counts_of_clients_are_added_up_for_each_rank_and_a_ranks_own_counters_are_taken_once():
    def counted(num_output: int, num_drafts: int, accepted: list[int], reason: str) -> RankCounts:
        counts = RankCounts.empty(100)
        counts.num_output_tokens, counts.num_drafts, counts.num_accepted_per_position = num_output, num_drafts, accepted
        counts.request_s.observe(num_output, times=2)
        counts.num_finished[reason] += 1
        return counts

    first, second, third = counted(1, 5, [4, 1], "stop"), counted(2, 7, [5, 1], "abort"), counted(4, 6, [5], "stop")
    summed = total([{3: first, 1: second}, {}, {3: second}, {3: third}])
    assert list(summed) == [1, 3]
    assert summed[1] == second
    assert (summed[3].num_output_tokens, summed[3].num_drafts, summed[3].num_accepted_per_position) == (7, 7, [5, 1])
    assert summed[3].num_finished == dict.fromkeys(FINISH_REASONS, 0) | {"stop": 2, "abort": 1}
    assert (summed[3].request_s.count, summed[3].request_s.sum) == (6, 14.0)
    assert summed[3].request_s == first.request_s + second.request_s + third.request_s
    assert first == counted(1, 5, [4, 1], "stop"), "the parts stay as they are"
