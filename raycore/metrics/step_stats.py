"""Figures of an engine, with vLLM's names, for classes of the user's (`raycore.metrics.stat_loggers`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from raycore.system import time


@dataclass
class CacheStats:
    """Look-ups in a cache since the figures before."""

    queries: int = 0
    """Tokens looked up."""
    hits: int = 0
    """Tokens found."""


@dataclass
class SpecDecodingStats:
    """Drafts since the figures before."""

    num_drafts: int = 0
    """How many times a step had drafts for a request."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list[int])


@dataclass
class SchedulerStats:
    """What a rank has to do, and its caches."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    """Fraction of the KV cache's blocks that running requests hold, 0 to 1."""
    prefix_cache_stats: CacheStats = field(default_factory=CacheStats)
    connector_prefix_cache_stats: CacheStats | None = None
    """The same for a KV connector. None: it was asked for nothing."""
    spec_decoding_stats: SpecDecodingStats | None = None
    """None: there were no drafts."""


@dataclass
class FinishedRequestStats:
    """A sequence that has ended. Times are in seconds."""

    finish_reason: str
    e2e_latency: float = 0.0
    """From the request's arrival at the client."""
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    """From its arrival in the engine to its first step."""
    prefill_time: float = 0.0
    inference_time: float = 0.0
    """From its first step."""
    decode_time: float = 0.0
    """From its first token."""
    mean_time_per_output_token: float = 0.0
    num_cached_tokens: int = 0


@dataclass
class IterationStats:
    """What this process's requests got from a rank since the figures before. Times are in seconds."""

    iteration_timestamp: float = field(default_factory=time.time)
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens, cached ones included, of the requests whose first token has come."""
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list[FinishedRequestStats])
    max_num_generation_tokens_iter: list[int] = field(default_factory=list[int])
    """Tokens of the longest sequence of each request that has finished."""
    n_params_iter: list[int] = field(default_factory=list[int])
    time_to_first_tokens_iter: list[float] = field(default_factory=list[float])
    inter_token_latencies_iter: list[float] = field(default_factory=list[float])
