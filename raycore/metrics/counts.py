"""The metrics of one rank, as values that can be copied, sent and added up.

The values are plain integers and lists, so counting is an addition. Names and labels are added only when metrics are
read. Bucket boundaries are vLLM's, so that vLLM's dashboards work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import msgspec.structs

FINISH_REASONS = ("stop", "length", "repetition", "abort", "error")

REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
SEQUENCES = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP_TOKENS = (1.0, *(float(1 << power) for power in range(3, 15)))
"""Bucket boundaries: 1, 8, 16, 32, … up to 16,384."""


def token_bounds(max_model_len: int) -> tuple[float, ...]:
    """Bucket boundaries: 1, 2, 5, 10, 20, 50, … up to `max_model_len`."""
    bounds: list[float] = []
    unit = 1
    while unit <= max_model_len:
        bounds += [float(unit * step) for step in (1, 2, 5) if unit * step <= max_model_len]
        unit *= 10
    return tuple(bounds)


class BucketCounts(msgspec.Struct):
    """Counts of values by bucket."""

    bounds: tuple[float, ...]
    """The buckets' upper bounds, inclusive and ascending. One more bucket has no bound."""
    counts: list[int] = []
    """One count per bucket, not cumulative."""
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value that occurred `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Number of values in all buckets."""
        return sum(self.counts)

    def __add__(self, other: BucketCounts) -> BucketCounts:
        """The sum of two histograms with the same buckets."""
        return BucketCounts.total([self, other])

    @staticmethod
    def total(parts: Sequence[BucketCounts]) -> BucketCounts:
        """The sum of one or more histograms with the same buckets."""
        columns = zip(*(each.counts for each in parts), strict=True)
        return BucketCounts(parts[0].bounds, [sum(column) for column in columns], sum(each.sum for each in parts))

    def copy(self) -> BucketCounts:
        """An independent copy."""
        return BucketCounts(self.bounds, self.counts.copy(), self.sum)


def _histogram(bounds: tuple[float, ...]) -> Callable[[], BucketCounts]:
    return lambda: BucketCounts(bounds)


class RankCounts(msgspec.Struct, kw_only=True):
    """What one client has counted for one rank since the client's start. Restarts of the rank don't reset the counts.

    "Request" means each of a request's `n` sequences, except in `n` and `longest_output_tokens`. Histograms of whole
    requests leave out aborted and failed ones.
    """

    num_prompt_tokens: int = 0
    """Prompt tokens, including cached ones, of the requests whose first output token has arrived."""
    num_cached_prompt_tokens: int = 0
    """How many of them weren't computed: the prefix cache had them, or the KV connector brought them."""
    num_external_prompt_tokens: int = 0
    """How many of these the KV connector brought."""
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    """Tokens looked up in the prefix cache."""
    num_prefix_hits: int = 0
    num_external_queries: int = 0
    """Tokens that the prefix cache didn't have, and the KV connector was asked for."""
    num_host_hits: int = 0
    """Tokens that the KV connector brought, from the host's memory."""
    num_disk_hits: int = 0
    num_p2p_hits: int = 0
    """From other ranks."""
    num_unspecified_hits: int = 0
    num_image_lookups: int = 0
    """Images that the client has looked up among those that it keeps."""
    num_image_hits: int = 0
    num_drafts: int = 0
    """How many times a step had drafts for a request."""
    num_draft_tokens: int = 0
    num_accepted_per_position: list[int] = []
    """Number of drafted tokens that were right, by their position in the draft."""
    num_finished: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    """Finished requests, by finish reason."""
    first_token_s: BucketCounts = msgspec.field(default_factory=_histogram(FIRST_TOKEN_SECONDS))
    """Time from a request's arrival at the client to its first token."""
    between_tokens_s: BucketCounts = msgspec.field(default_factory=_histogram(TOKEN_SECONDS))
    """Time between consecutive tokens of a request, as the rank generates them. Tokens of one step count as one. The
    time for which the rank holds tokens back, to send more at once, doesn't count."""
    per_output_token_s: BucketCounts = msgspec.field(default_factory=_histogram(TOKEN_SECONDS))
    """A request's mean time per token after the first."""
    request_s: BucketCounts = msgspec.field(default_factory=_histogram(REQUEST_SECONDS))
    queue_s: BucketCounts = msgspec.field(default_factory=_histogram(REQUEST_SECONDS))
    """Time from a request's arrival in the engine to its first step."""
    prefill_s: BucketCounts = msgspec.field(default_factory=_histogram(REQUEST_SECONDS))
    """Time from a request's first step to its first token."""
    decode_s: BucketCounts = msgspec.field(default_factory=_histogram(REQUEST_SECONDS))
    """Time from a request's first token to its last."""
    inference_s: BucketCounts = msgspec.field(default_factory=_histogram(REQUEST_SECONDS))
    """Time from a request's first step to its last token."""
    step_tokens: BucketCounts = msgspec.field(default_factory=_histogram(STEP_TOKENS))
    """Tokens of a step: those that the step generated, and the prompt tokens of requests whose first token is among
    these. Only this client's requests count."""
    prompt_tokens: BucketCounts
    computed_prompt_tokens: BucketCounts
    """A request's prompt tokens that the prefix cache didn't hold."""
    output_tokens: BucketCounts
    longest_output_tokens: BucketCounts
    """Output tokens of the longest of a request's `n` sequences."""
    max_tokens: BucketCounts
    """The `max_tokens` of requests that set it."""
    n: BucketCounts = msgspec.field(default_factory=_histogram(SEQUENCES))
    preemptions: BucketCounts = msgspec.field(default_factory=_histogram(PREEMPTIONS))
    """How often a request was preempted."""

    @property
    def num_external_hits(self) -> int:
        """Tokens that the KV connector brought."""
        return self.num_host_hits + self.num_disk_hits + self.num_p2p_hits + self.num_unspecified_hits

    @property
    def num_accepted_tokens(self) -> int:
        """Number of drafted tokens that were right."""
        return sum(self.num_accepted_per_position)

    @staticmethod
    def empty(max_model_len: int) -> RankCounts:
        """Counts that are all zero."""
        bounds = token_bounds(max_model_len)
        return RankCounts(
            prompt_tokens=BucketCounts(bounds),
            computed_prompt_tokens=BucketCounts(bounds),
            output_tokens=BucketCounts(bounds),
            longest_output_tokens=BucketCounts(bounds),
            max_tokens=BucketCounts(bounds),
        )

    def copy(self) -> RankCounts:
        """An independent copy."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        mutable = {name: value.copy() for name, value in values.items() if not isinstance(value, int)}
        return msgspec.structs.replace(self, **mutable)


_OF_THE_RANK = (
    *("num_preemptions", "num_prefix_queries", "num_prefix_hits", "num_external_queries"),
    *("num_host_hits", "num_disk_hits", "num_p2p_hits", "num_unspecified_hits"),
    *("num_drafts", "num_draft_tokens", "num_accepted_per_position"),
)
"""Counters that a rank reports for all clients together. Each client has the full number, so `total()` doesn't add them
up over clients."""


def total(parts: Sequence[dict[int, RankCounts]]) -> dict[int, RankCounts]:
    """The sum of several clients' counts, by dp_rank."""
    of_rank: dict[int, list[RankCounts]] = {}
    for part in parts:
        for dp_rank, counts in part.items():
            of_rank.setdefault(dp_rank, []).append(counts)
    return {dp_rank: _sum_of(of_rank[dp_rank]) for dp_rank in sorted(of_rank)}


def _sum_of(counts: list[RankCounts]) -> RankCounts:
    if len(counts) == 1:
        return counts[0]
    sums: dict[str, Any] = {}
    for name in RankCounts.__struct_fields__:
        values = [getattr(each, name) for each in counts]
        sums[name] = max(values) if name in _OF_THE_RANK else _sum(values)
    return RankCounts(**sums)


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], BucketCounts):
        return BucketCounts.total(values)
    if isinstance(values[0], dict):
        keys = cast("dict[str, int]", values[0])
        return {key: sum(each[key] for each in values) for key in keys}
    return sum(values)
