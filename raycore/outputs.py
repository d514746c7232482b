"""What callers get back. Names and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One token's log probability (natural logarithm), its 1-based rank, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Log probabilities at one position, by token id."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the sampled tokens' log probabilities; None when `logprobs` wasn't asked for."""
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, or None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for end-of-sequence."""

    def finished(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None


MAX_TRACED_STEPS = 128
"""A long request's later steps are only counted."""


@dataclass(slots=True)
class RequestTrace:
    """What became of a request's first sequence when, on this process's clock."""

    dp_rank: int | None = None
    """The rank that has it, or had it last."""
    queue_s: float | None = None
    """Seconds from its arrival in the engine to its first step."""
    num_steps: int = 0
    """Steps that gave it a token."""
    steps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(begin, end) of the first of them: from the engine's plan to its workers' result."""

    def add_step(self, begin_s: float, end_s: float) -> None:
        """One more step has given it a token."""
        self.num_steps += 1
        if len(self.steps) < MAX_TRACED_STEPS:
            self.steps.append((begin_s, end_s))


@dataclass(slots=True)
class RequestOutput:
    """A request's output so far: cumulative, and final once `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry for each prompt token; None for the first, which nothing predicts."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache already held."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds on this process's clock: `arrival_s`, `first_token_s`, `finished_s`."""
    trace: RequestTrace | None = None
    """Only where requests are traced."""
