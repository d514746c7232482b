import msgspec

from raycore.metrics.counts import Histogram, RankCounts, token_bounds


def test_a_histogram_counts_a_bound_in_its_bucket_and_larger_values_in_one_more():
    histogram = Histogram((1.0, 2.0))
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
