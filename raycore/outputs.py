"""Outputs of requests. Names and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class Logprob:
    """One token's log probability (natural logarithm), its 1-based rank by probability, and its text."""

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
    """Sum of the sampled tokens' log probabilities; None unless `logprobs` was requested."""
    logprobs: list[PositionLogprobs] | None = None
    hidden_states: NDArray[np.float32] | None = field(default=None, compare=False)
    """float32[number of tokens, hidden size]: the final hidden state that each token was sampled from; None unless
    `return_hidden_states` was requested."""
    finish_reason: str | None = None
    """`stop`, `length` or `abort`; None until the sequence finishes."""
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the sequence; otherwise None."""

    def finished(self) -> bool:
        """Whether the sequence is complete."""
        return self.finish_reason is not None


MAX_TRACED_STEPS = 128
"""Maximum number of steps of a request whose times are recorded. Later steps are only counted."""


@dataclass(slots=True)
class RequestTrace:
    """Timings of a request's first sequence, in seconds on this process's monotonic clock."""

    dp_rank: int | None = None
    """The rank that runs the sequence, or ran it last."""
    queue_s: float | None = None
    """Seconds from the arrival in the engine to the first step."""
    num_steps: int = 0
    """Number of steps that generated a token for the sequence."""
    steps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(begin, end) of the first `MAX_TRACED_STEPS` steps. A step lasts from the engine's plan to the workers' result.
    """

    def add_step(self, begin_s: float, end_s: float) -> None:
        """Record a step that generated a token."""
        self.num_steps += 1
        if len(self.steps) < MAX_TRACED_STEPS:
            self.steps.append((begin_s, end_s))


@dataclass(slots=True)
class RequestOutput:
    """A request's whole output so far. The output is complete if `finished` is True."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry per prompt token. The first is None, because nothing predicts the first token."""
    prompt_hidden_states: NDArray[np.float32] | None = field(default=None, compare=False)
    """float32[number of prompt tokens, hidden size]: their final hidden states; None unless
    `return_prompt_hidden_states` was requested, and as long as some of them haven't arrived."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache already held."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Times in seconds on this process's monotonic clock: `arrival_s`, `first_token_s`, `finished_s`."""
    trace: RequestTrace | None = None
    """None unless requests are traced."""
    kv_transfer_params: dict[str, Any] | None = None
    """What the KV connector tells the client when the request ends."""


@dataclass(slots=True)
class PoolingOutput:
    """The result of a request that pools."""

    data: NDArray[np.float32]
    """For a result of the whole prompt, float32[size]; for one of each token, float32[number of tokens, size]."""


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of elements."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probabilities of a prompt's classes."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit together."""

    score: float


_OutputT = TypeVar("_OutputT", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[_OutputT]):
    """The output of a request that pools."""

    request_id: str
    outputs: _OutputT
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache already held."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Times in seconds on this process's monotonic clock: `arrival_s`, `finished_s`."""


EmbeddingRequestOutput: TypeAlias = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput: TypeAlias = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput: TypeAlias = PoolingRequestOutput[ScoringOutput]
