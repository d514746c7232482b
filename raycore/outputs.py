"""Outputs of requests. Names and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from raycore.lora.request import LoRARequest


@dataclass(slots=True)
class Logprob:
    """One token's log probability (natural logarithm), its 1-based rank by probability, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Log probabilities at one position, by token id."""


class FlatLogprobs(Sequence[PositionLogprobs]):
    """Log probabilities of a sequence's positions, in few lists instead of an object for each.

    Behaves as a list of `PositionLogprobs`, which are made when they are read. Position `i` has the entries from
    `start_indices[i]` to `end_indices[i]`, exclusive, of the other lists. A position without entries reads as an empty
    dict.
    """

    __slots__ = ("decoded_tokens", "end_indices", "logprobs", "ranks", "start_indices", "token_ids")

    def __init__(self, positions: Iterable[PositionLogprobs | None] = ()) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        self.extend(positions)

    def append(self, position: PositionLogprobs | None) -> None:
        """Append a position. None: it has no entries."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[PositionLogprobs | None]) -> None:
        """Append several positions."""
        for position in positions:
            self.append(position)

    def copy(self) -> FlatLogprobs:
        """An independent copy."""
        return self[:]

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> PositionLogprobs | FlatLogprobs:
        if isinstance(index, slice):
            return self._part(range(*index.indices(len(self))))
        entries = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[each]: Logprob(self.logprobs[each], self.ranks[each], self.decoded_tokens[each])
            for each in entries
        }

    def __delitem__(self, index: slice) -> None:
        """Drop the last positions: `del logprobs[n:]`."""
        assert (index.stop, index.step) == (None, None), "only the end can be dropped"
        kept = self[: index.start]
        for name in self.__slots__:
            setattr(self, name, getattr(kept, name))

    def __len__(self) -> int:
        return len(self.start_indices)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return list(self) == [each or {} for each in cast("Sequence[Any]", other)]

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as of all that can change

    def __repr__(self) -> str:
        return f"FlatLogprobs({list(self)!r})"

    def _part(self, positions: range) -> FlatLogprobs:
        part = FlatLogprobs()
        for position in positions:
            begin, end = self.start_indices[position], self.end_indices[position]
            part.start_indices.append(len(part.token_ids))
            for name in ("token_ids", "logprobs", "ranks", "decoded_tokens"):
                getattr(part, name).extend(getattr(self, name)[begin:end])
            part.end_indices.append(len(part.token_ids))
        return part


SampleLogprobs: TypeAlias = "list[PositionLogprobs] | FlatLogprobs"
PromptLogprobs: TypeAlias = "list[PositionLogprobs | None] | FlatLogprobs"


@dataclass(slots=True)
class WeightVersionSpan:
    """The output tokens `[start, end)` come from the weights that are called `version`."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request. With `RequestOutputKind.DELTA`, what is new of it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of all sampled tokens' log probabilities; None unless `logprobs` was requested."""
    logprobs: SampleLogprobs | None = None
    routed_experts: NDArray[np.generic] | None = field(default=None, compare=False)
    """[number of tokens, number of layers, experts per token]: the ids of the experts that computed the tokens of
    prompt and output, without the last one, which wasn't computed. uint8, or uint16 for more than 256 experts. Layers
    without experts have 0. None until the sequence finishes, and without `enable_return_routed_experts`. Of an aborted
    sequence, those that have come."""
    finish_reason: str | None = None
    """`stop`, `length`, `repetition` or `abort`; None until the sequence finishes."""
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the sequence, or `repetition_detected`; otherwise
    None."""
    lora_request: LoRARequest | None = None
    """The adapter that the sequence was generated with."""
    sampling_mask: None = None
    """Always None, as the one below: raycore doesn't return what vLLM has there."""
    spec_decode_metrics: None = None
    weight_versions: list[WeightVersionSpan] | None = None
    """Which weights the tokens come from, in order, without gaps. None until the sequence finishes."""
    hidden_states: NDArray[np.float32] | None = field(default=None, compare=False, kw_only=True)
    """float32[number of tokens, hidden size]: the final hidden state that each token was sampled from; None unless
    `return_hidden_states` was requested."""
    kv_transfer_params: dict[str, Any] | None = field(default=None, kw_only=True)
    """What the KV connector tells the caller when the sequence ends."""

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


_TIMES = ("arrival_s", "first_token_s", "last_token_s", "finished_s")


@dataclass(slots=True, eq=False)
class RequestMetrics(Mapping[str, float]):
    """When things happened to a request.

    The fields are seconds on this process's monotonic clock, except `arrival_time`. They are None until they are known.
    Properties have vLLM's names: those that end in `_time` are seconds since 1970, those that end in `_ts` are on the
    monotonic clock, with 0.0 for what isn't known. The times can also be read by index, as `metrics["arrival_s"]`.
    """

    arrival_s: float
    """When the client got the request."""
    arrival_time: float = 0.0
    """The same in seconds since 1970."""
    queue_s: float | None = None
    """Seconds from the arrival in the engine to the first step."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    """When the newest tokens were made."""
    finished_s: float | None = None
    num_generation_tokens: int = 0
    """Number of tokens of all sequences so far."""

    @property
    def first_token_latency(self) -> float:
        """Seconds from the arrival to the first token; 0.0 before."""
        return 0.0 if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def queued_ts(self) -> float:
        """The same as `arrival_s`."""
        return self.arrival_s

    @property
    def scheduled_ts(self) -> float:
        """When the first step began."""
        return 0.0 if self.queue_s is None else self.arrival_s + self.queue_s

    @property
    def first_token_ts(self) -> float:
        """When the first token was made."""
        return self.first_token_s or 0.0

    @property
    def last_token_ts(self) -> float:
        """When the newest tokens were made."""
        return self.last_token_s or 0.0

    @property
    def time_in_queue(self) -> float | None:
        """The same as `queue_s`."""
        return self.queue_s

    @property
    def first_scheduled_time(self) -> float | None:
        """When the first step began."""
        return None if self.queue_s is None else self.arrival_time + self.queue_s

    @property
    def first_token_time(self) -> float | None:
        """When the first token was made."""
        return self._since_1970(self.first_token_s)

    @property
    def last_token_time(self) -> float | None:
        """When the newest tokens were made."""
        return self._since_1970(self.last_token_s)

    @property
    def finished_time(self) -> float | None:
        """When the client noticed that the request has ended."""
        return self._since_1970(self.finished_s)

    def __getitem__(self, name: str) -> float:
        value = getattr(self, name) if name in _TIMES else None
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in _TIMES if getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _since_1970(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else self.arrival_time + moment_s - self.arrival_s


@dataclass(slots=True)
class RequestOutput:
    """A request's whole output so far, or, with `RequestOutputKind.DELTA`, what is new. The output is complete if
    `finished` is True."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None = None
    """One entry per prompt token. The first has no log probabilities, because nothing predicts the first token."""
    outputs: list[CompletionOutput] = field(default_factory=list[CompletionOutput])
    finished: bool = False
    metrics: RequestMetrics | None = None
    """The same object in all outputs of a request: it changes until the request has finished."""
    lora_request: LoRARequest | None = None
    """The adapter that the request uses."""
    encoder_prompt: None = None
    """Always None, as `encoder_prompt_token_ids`: raycore has no models with an encoder and a decoder."""
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache already held."""
    num_cache_creation_tokens: None = None
    """Always None, as the two below: raycore doesn't return what vLLM has there."""
    prompt_token_id_logprobs: None = field(default=None, kw_only=True)
    ec_transfer_params: None = field(default=None, kw_only=True)
    prompt_hidden_states: NDArray[np.float32] | None = field(default=None, compare=False, kw_only=True)
    """float32[number of prompt tokens, hidden size]: their final hidden states; None unless
    `return_prompt_hidden_states` was requested, and as long as some of them haven't arrived."""
    trace: RequestTrace | None = field(default=None, kw_only=True)
    """None unless requests are traced."""
    kv_transfer_params: dict[str, Any] | None = field(default=None, kw_only=True)
    """What the KV connector has told the caller: of the first sequence that it has told something of. Each of `outputs`
    has its own."""


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

    @staticmethod
    def from_base(pooled: PoolingOutput) -> EmbeddingOutput:
        """The embedding in a result of `encode()`."""
        return EmbeddingOutput(pooled.data.tolist())


@dataclass(slots=True)
class ClassificationOutput:
    """The probabilities of a prompt's classes."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)

    @staticmethod
    def from_base(pooled: PoolingOutput) -> ClassificationOutput:
        """The probabilities in a result of `encode()`."""
        return ClassificationOutput(pooled.data.tolist())


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit together."""

    score: float

    @staticmethod
    def from_base(pooled: PoolingOutput) -> ScoringOutput:
        """The score in a result of `encode()`."""
        return ScoringOutput(float(pooled.data[0]))


_OutputT = TypeVar("_OutputT", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[_OutputT]):
    """The output of a request that pools."""

    request_id: str
    outputs: _OutputT
    prompt_token_ids: list[int]
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache already held."""
    finished: bool = True
    metrics: RequestMetrics | None = field(default=None, kw_only=True)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """An output of `embed()`."""

    __slots__ = ()

    @staticmethod
    def from_base(output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        """An output of `encode()` as one of `embed()`."""
        return EmbeddingRequestOutput(**_with(output, EmbeddingOutput.from_base(output.outputs)))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """An output of `classify()`."""

    __slots__ = ()

    @staticmethod
    def from_base(output: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
        """An output of `encode()` as one of `classify()`."""
        return ClassificationRequestOutput(**_with(output, ClassificationOutput.from_base(output.outputs)))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """An output of `score()`."""

    __slots__ = ()

    @staticmethod
    def from_base(output: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
        """An output of `encode()` as one of `score()`."""
        return ScoringRequestOutput(**_with(output, ScoringOutput.from_base(output.outputs)))


def _with(output: PoolingRequestOutput[PoolingOutput], outputs: object) -> dict[str, Any]:
    return {each.name: getattr(output, each.name) for each in fields(output)} | {"outputs": outputs}
