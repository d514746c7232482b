"""The state of one request in a client: its sequences' tokens, text and log probabilities so far. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raycore.client.part import OutputAddition
from raycore.client.updates import Streaming
from raycore.errors import RequestFailed
from raycore.lora.request import LoRARequest
from raycore.messages import Pooled, TokenLogprobs, WeightVersion
from raycore.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    PositionLogprobs,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    RequestTrace,
    SampleLogprobs,
    WeightVersionSpan,
)
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.text.detokenizer import SequenceText
from raycore.text.tokenizer import Tokenizer


@dataclass(slots=True)
class PooledOutput(RequestOutput):
    """The output of a request that pools, among those of requests that generate."""

    data: NDArray[np.float32] | None = field(default=None, compare=False)
    """The result; None if the request was aborted."""

    def result(self) -> PoolingRequestOutput[PoolingOutput]:
        """Return what callers get.

        Raises:
            RequestFailed: the request was aborted.
        """
        if self.data is None:
            raise RequestFailed(f"request {self.request_id} was aborted")
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(self.data),
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one request, with a `SequenceState` for each of its `n` sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: Streaming
    sequences: list[SequenceState] = field(default_factory=list["SequenceState"])
    num_cached_tokens: int | None = None
    lora: LoRARequest | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    added: Mapping[str, OutputAddition] = field(default_factory=dict[str, OutputAddition])
    """What parts add to outputs, by their names."""
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    trace: RequestTrace | None = None
    pooling: PoolingParams | None = None
    """None: the request generates."""
    pooled: Pooled | None = None
    """The result of a request that pools; None before it has come."""

    @property
    def finished(self) -> bool:
        """Whether all sequences have finished."""
        for sequence in self.sequences:  # noqa: SIM110 - runs once a token, where all() is slower
            if sequence.finish_reason is None:
                return False
        return True

    def output(self) -> RequestOutput:
        """The request's output so far."""
        if self.pooling is not None:
            return self._pooled_output()
        outputs: list[CompletionOutput] = []
        num_tokens, finished = 0, True
        for sequence in self.sequences:  # one loop, because this runs with every token of a stream
            outputs.append(sequence.output())
            num_tokens += len(sequence.token_ids)
            finished = finished and sequence.finish_reason is not None
        self.metrics.num_generation_tokens = num_tokens
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if self.prompt_logprobs is None else self._prompt_logprobs(self.prompt_logprobs),
            outputs=outputs,
            finished=finished,
            metrics=self.metrics,
            lora_request=self.lora,
            num_cached_tokens=self.num_cached_tokens,
            trace=self.trace,
        )
        for addition in self.added.values():
            addition.add_to(output)
        return output

    def _pooled_output(self) -> PooledOutput:
        data = None
        if self.pooled is not None:
            data = np.ndarray(self.pooled.shape, np.float32, self.pooled.data)
        return PooledOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.output() for sequence in self.sequences],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            trace=self.trace,
            data=data,
        )

    def _prompt_logprobs(self, known: list[PositionLogprobs | None]) -> PromptLogprobs:
        return FlatLogprobs(known) if self.params.flat_logprobs else known


class SequenceState:
    """The state of one of a request's `n` sequences. Ranks identify the sequence by its seq_id."""

    def __init__(self, index: int, seq_id: int, request: RequestState, tokenizer: Tokenizer) -> None:
        self.index = index
        self.seq_id = seq_id
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache or brought by a KV connector; None until known."""
        self.num_external_tokens = 0
        """How many of them a KV connector brought."""
        self.num_preemptions = 0
        self.lora_revision: int | None = None
        """The revision of its adapter that the sequence has begun with; None until known, and without an adapter."""
        self.versions: list[tuple[WeightVersion, int]] = []
        """(weights that tokens come from, index of the first of these tokens), in order."""
        self.queue_s: float | None = None
        """Seconds from the sequence's arrival in the engine to its first step; None until known."""
        self.first_token_s: float | None = None
        """When the sequence's first token was made, on this process's clock; None before."""
        self._tokenizer = tokenizer
        params = request.params
        self._logprobs: SampleLogprobs | None = None
        if params.num_logprobs is not None:
            self._logprobs = FlatLogprobs() if params.flat_logprobs else []
        self._cumulative_logprob = 0.0
        self._updates_text = params.detokenize and bool(request.stream or params.stop_strings)
        self._text = self._new_text() if self._updates_text else None
        self._num_in_text = 0
        self._num_characters: int | None = None
        """Length of the text when `has_grown()` was last called; None before."""

    @property
    def is_watched(self) -> bool:
        """Whether the sequence is processed after every batch, not only at its end."""
        return bool(self.request.stream) or self._updates_text

    def has_grown(self) -> bool:
        """Whether the text has grown since the last call. True in the first call, and if the text isn't updated."""
        if self._text is None:
            return True
        before, self._num_characters = self._num_characters, len(self._text.text)
        return before != self._num_characters

    def note_version(self, version: WeightVersion, start: int) -> bool:
        """Note that the tokens from index `start` on come from these weights.

        Returns: whether earlier tokens come from other weights.
        """
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, start))
        return self.versions[0][0].number != version.number  # another name alone changes nothing

    def add_logprobs(self, entry: TokenLogprobs) -> None:
        """Append the log probabilities of the next token."""
        if self._logprobs is not None:
            texts = self._tokenizer if self.request.params.detokenize else None
            are_ranked = self.request.params.logprob_token_ids is None
            self._logprobs.append(position_logprobs(entry, texts, are_ranked=are_ranked))
            self._cumulative_logprob += entry.logprobs[0]

    def update_text(self, ends_with_stop_token: bool = False) -> bool:
        """Decode the new tokens. Returns whether a stop string was found, which finishes the sequence.

        If the last token is a stop token, it is not part of the text, unless `include_stop_str_in_output` is set.
        """
        if self._text is None:
            return False
        end = len(self.token_ids)
        if ends_with_stop_token and not self.request.params.include_stop_str_in_output:
            end -= 1
        new_ids = self.token_ids[self._num_in_text : end]
        self._num_in_text += self._text.append(new_ids)
        if self._text.stop is None:
            return False
        del self.token_ids[self._num_in_text :]
        if self._logprobs is not None:
            del self._logprobs[self._num_in_text :]
            # summed again instead of subtracting, because log probabilities may be infinite
            self._cumulative_logprob = sum(
                entry[token_id].logprob for token_id, entry in zip(self.token_ids, self._logprobs, strict=True)
            )
        self.finish("stop", self._text.stop)
        return True

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Mark the sequence as finished and complete its text."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if self._text is not None:
            self._text.finish()

    def output(self) -> CompletionOutput:
        """The sequence's output so far."""
        return CompletionOutput(
            index=self.index,
            text=self._decoded() if self._text is None else self._text.text,
            token_ids=self.token_ids.copy(),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            lora_request=self.request.lora,
            weight_versions=None if self.finish_reason is None else self._version_spans(),
        )

    def _version_spans(self) -> list[WeightVersionSpan]:
        spans: list[WeightVersionSpan] = []
        end = len(self.token_ids)
        for version, start in self.versions:
            if start >= end:
                break  # behind a stop string
            if not spans or spans[-1].version != version.name:
                spans.append(WeightVersionSpan(version.name, start, end))
        for span, following in itertools.pairwise(spans):
            span.end = following.start
        return spans

    def _decoded(self) -> str:
        """The text, if it isn't updated."""
        params = self.request.params
        if not params.detokenize:
            return ""
        has_stop_token = self.finish_reason == "stop" and not params.include_stop_str_in_output
        text = self._new_text()
        text.append(self.token_ids[:-1] if has_stop_token else self.token_ids)
        text.finish()
        return text.text

    def _new_text(self) -> SequenceText:
        return SequenceText(self._tokenizer, self.request.params, self.request.prompt_token_ids)


def position_logprobs(
    entry: TokenLogprobs, tokenizer: Tokenizer | None, *, are_ranked: bool = True
) -> PositionLogprobs:
    """The log probabilities of one position by token id: the actual token first, then the most likely ones.

    Args:
        tokenizer: decodes the tokens. None: they have no texts.
        are_ranked: False if the others are tokens that the request chose, whose ranks aren't known.
    """
    count = len(entry.token_ids)
    ranks: Sequence[int | None] = [entry.rank, *(range(1, count) if are_ranked else [None] * (count - 1))]
    result: PositionLogprobs = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        text = None if tokenizer is None else tokenizer.token_text(token_id)
        result.setdefault(token_id, Logprob(logprob, rank, text))
    return result
