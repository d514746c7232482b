"""Turns the output batches of ranks into the outputs that callers get. Does not depend on Ray.

Most requests need their text only at the end. Their tokens are collected, one list append each, and decoded once. Only
requests that stream or have stop strings are processed after every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from raycore.client.ask import CheckedAsk
from raycore.client.part import OutputPart
from raycore.client.request_state import RequestState, SequenceState, position_logprobs
from raycore.client.updates import Update
from raycore.errors import InvalidRequest, RequestFailed, WeightVersionChanged
from raycore.messages import FIRST_WEIGHTS, FinishedRequest, OutputBatch
from raycore.outputs import RequestMetrics, RequestOutput, RequestTrace
from raycore.system import time
from raycore.text.tokenizer import Tokenizer


class Arrival(NamedTuple):
    """The tokens of one engine step."""

    seq_ids: list[int]
    """The sequences that got tokens, without repetition. Leaves out sequences that this client no longer knows."""
    num_tokens: int
    """How many tokens these got."""
    made_s: float
    """When the tokens were made, on this process's clock. The time that it took to send them is neglected."""
    duration_s: float
    """How long the step took, in seconds."""


@dataclass(slots=True)
class ProcessedOutputs:
    """The result of processing one batch."""

    now_s: float
    """When the batch arrived, on this process's clock."""
    updates: list[Update] = field(default_factory=list[Update])
    """One for each request that finished, failed, or streams and has what its caller wants."""
    aborts: list[int] = field(default_factory=list[int])
    """The seq_ids that the rank must abort, because this client ended them after a stop string or an error."""
    arrivals: list[Arrival] = field(default_factory=list[Arrival])
    """The new tokens, step by step."""
    first_tokens: list[SequenceState] = field(default_factory=list[SequenceState])
    """Sequences that got their first token."""
    ended: list[SequenceState] = field(default_factory=list[SequenceState])
    """Sequences that ended."""

    def completed(self) -> list[RequestState]:
        """The generating requests whose last sequence ended, and that didn't fail."""
        ended = {each.request: None for each in self.ended if each.request.pooling is None and each.request.finished}
        return [each for each in ended if all(one.finish_reason != "error" for one in each.sequences)]


class OutputProcessor:
    """The unfinished requests of one client. Not thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic, parts: Sequence[OutputPart] = ()
    ) -> None:
        """`parts`: what adds to outputs."""
        self._tokenizer = tokenizer
        self._clock = clock
        self._parts = parts
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[int, SequenceState] = {}
        """Unfinished sequences by seq_id."""
        self._token_ids: dict[int, list[int]] = {}
        """By seq_id: the list `SequenceState.token_ids` itself. Saves an attribute look-up for each token."""
        self._watched: set[int] = set()
        """The seq_ids of sequences that are processed after every batch, not only at their end."""
        self._tokenless: set[int] = set()
        """The seq_ids of sequences that haven't got a token yet."""
        self._version = FIRST_WEIGHTS
        """The weights that the newest tokens come from."""
        self._unversioned: set[int] = set()
        """The seq_ids of sequences whose next token may come from other weights than the previous one."""
        self._traced: set[int] = set()
        """The first seq_id of each traced request."""
        self.is_tracing = False
        """Whether new requests are traced."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, checked: CheckedAsk, seq_ids: Sequence[int]) -> None:
        """Add a request. `seq_ids` identify its `params.n` sequences."""
        ask, prompt, request_id, params = checked.ask, checked.ask.parsed, checked.request_id, checked.params
        assert request_id not in self._requests, f"request {request_id!r} exists already"
        assert len(seq_ids) == params.n, f"{len(seq_ids)} seq_ids for n={params.n}"
        metrics = RequestMetrics(self._clock(), time.time())
        request = RequestState(
            *(request_id, prompt.text, prompt.token_ids, params, ask.stream),
            pooling=checked.pooling,
            lora=ask.lora,
            metrics=metrics,
            added={part.name: part.begin(params) for part in self._parts if part.is_asked(params)},
        )
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None for _ in prompt.token_ids]
        self._requests[request_id] = request
        for index, seq_id in enumerate(seq_ids):
            sequence = SequenceState(index, seq_id, request, self._tokenizer)
            request.sequences.append(sequence)
            self._sequences[seq_id] = sequence
            self._token_ids[seq_id] = sequence.token_ids
            if sequence.is_watched:
                self._watched.add(seq_id)
        self._tokenless.update(seq_ids)
        if self.is_tracing:
            request.trace = RequestTrace()
            self._traced.add(seq_ids[0])

    def is_tokenless(self, seq_id: int) -> bool:
        """Whether a sequence hasn't got a token yet."""
        return seq_id in self._tokenless

    def abort(self, request_id: str) -> RequestOutput:
        """Remove a request. Returns its output so far. Unfinished sequences get the finish reason `abort`."""
        request = self._requests[request_id]
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._finish(sequence, "abort", None)
        self._forget(request)
        output = request.output()
        request.sequences.clear()
        return output

    def rebind(self, seq_id: int, new_seq_id: int) -> list[int]:
        """Give a sequence a new seq_id, under which another rank continues it. Later outputs for `seq_id` are ignored.

        Returns: the tokens so far. Outputs for `new_seq_id` are appended to them.
        """
        sequence = self._sequences.pop(seq_id)
        sequence.seq_id = new_seq_id
        self._sequences[new_seq_id] = sequence
        self._token_ids[new_seq_id] = self._token_ids.pop(seq_id)
        for seq_ids in (self._watched, self._tokenless, self._traced):
            if seq_id in seq_ids:
                seq_ids.remove(seq_id)
                seq_ids.add(new_seq_id)
        self._unversioned.discard(seq_id)
        self._unversioned.add(new_seq_id)
        return sequence.token_ids

    def revision_begun(self, seq_id: int) -> int | None:
        """The revision of its adapter that a sequence's tokens come from. None: it has no tokens, or no adapter."""
        sequence = self._sequences[seq_id]
        return sequence.lora_revision if sequence.token_ids else None

    def unfinished(self, request_id: str) -> list[int]:
        """The indices of the request's unfinished sequences."""
        request = self._requests[request_id]
        return [sequence.index for sequence in request.sequences if sequence.finish_reason is None]

    def process(self, batch: OutputBatch) -> ProcessedOutputs:
        """Process a rank's batch. Ignores unknown sequences: they have ended or were aborted."""
        step = ProcessedOutputs(self._clock())
        seq_ids: list[int] = np.frombuffer(batch.seq_ids, np.int64).tolist()
        self._note_starts(batch)
        self._note_versions(batch, seq_ids, step)
        has_strangers = self._collect_tokens(batch, seq_ids)
        step.arrivals = self._arrivals(batch, seq_ids, step.now_s, has_strangers)
        self._note_first_tokens(step)
        if self._traced:
            self._trace_steps(step.arrivals)
        self._collect_logprobs(batch)
        for seq_id, report in batch.reports:
            sequence = self._sequences.get(seq_id)
            if sequence is not None:
                sequence.request.added[report.part].take(sequence.index, report)
        for seq_id, pooled in batch.pooled:
            if seq_id in self._sequences:
                self._sequences[seq_id].request.pooled = pooled
        changed = self._update_watched(batch, seq_ids, step)
        for end in batch.finished:
            sequence = self._sequences.get(end.seq_id)
            if sequence is not None:
                self._take_end(sequence, end, step)
                changed[sequence.request.request_id] = None
        self._report(changed, step)
        return step

    def release(self, step: ProcessedOutputs) -> None:
        """Let go of the requests that have ended with a batch, once nobody needs their sequences any more.

        A request and its sequences refer to each other, so otherwise only the garbage collector would free them.
        """
        for sequence in step.ended:
            if sequence.request.request_id not in self._requests:
                sequence.request.sequences.clear()

    def _note_starts(self, batch: OutputBatch) -> None:
        external = dict(batch.external)
        for seq_id, num_cached_tokens in batch.started:
            sequence = self._sequences.get(seq_id)
            # a request that has moved to another rank starts again on that rank: only its first start counts
            if sequence is not None and sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = num_cached_tokens
                sequence.num_external_tokens = external.get(seq_id, 0)
                if sequence.index == 0:
                    sequence.request.num_cached_tokens = num_cached_tokens
        for (seq_id,) in batch.preempted:
            sequence = self._sequences.get(seq_id)
            if sequence is not None:
                sequence.num_preemptions += 1
        for seq_id, revision in batch.adapter_revisions:
            sequence = self._sequences.get(seq_id)
            if sequence is not None:
                sequence.lora_revision = revision
        for seq_id, queue_s in batch.queued:
            sequence = self._sequences.get(seq_id)
            if sequence is not None and sequence.queue_s is None:
                sequence.queue_s = queue_s
                if sequence.index == 0:
                    sequence.request.metrics.queue_s = queue_s
                if seq_id in self._traced and sequence.request.trace is not None:
                    sequence.request.trace.queue_s = queue_s

    def _note_versions(self, batch: OutputBatch, seq_ids: list[int], step: ProcessedOutputs) -> None:
        """Note which weights tokens come from. Looks at tokens only if some may come from other weights than before."""
        parts = batch.versions
        if not parts or parts[0][0] > 0:
            parts = [(0, FIRST_WEIGHTS), *parts]
        if len(parts) > 1 or parts[0][1] != self._version:
            self._version = parts[-1][1]
            self._unversioned.update(self._sequences)
        if not self._unversioned:
            return
        for i, (first, version) in enumerate(parts):
            end = parts[i + 1][0] if i + 1 < len(parts) else len(seq_ids)
            for seq_id in self._unversioned.intersection(seq_ids[first:end]):
                sequence = self._sequences.get(seq_id)
                if sequence is None:
                    continue  # another one of its request has failed
                has_changed = sequence.note_version(version, len(sequence.token_ids) + seq_ids[:first].count(seq_id))
                if has_changed and sequence.request.params.on_version_change == "fail":
                    step.aborts.append(seq_id)
                    self._fail(sequence, _weights_changed(sequence), step)
        self._unversioned.difference_update(seq_ids)

    def _collect_tokens(self, batch: OutputBatch, seq_ids: list[int]) -> bool:
        """Append the tokens to their sequences. Returns whether any belonged to an unknown sequence."""
        token_ids: list[int] = np.frombuffer(batch.token_ids, np.int32).tolist()
        find = self._token_ids.get
        has_strangers = False
        for seq_id, token_id in zip(seq_ids, token_ids, strict=True):
            tokens = find(seq_id)
            if tokens is not None:
                tokens.append(token_id)
            else:
                has_strangers = True
        return has_strangers

    def _arrivals(self, batch: OutputBatch, seq_ids: list[int], now_s: float, has_strangers: bool) -> list[Arrival]:
        arrivals: list[Arrival] = []
        first = 0
        for num_tokens, age_s, duration_s in batch.steps:
            part = seq_ids[first : first + num_tokens]
            first += num_tokens
            if has_strangers:
                part = [seq_id for seq_id in part if seq_id in self._token_ids]
            if part:
                arrivals.append(Arrival(list(dict.fromkeys(part)), len(part), now_s - age_s, duration_s))
        return arrivals

    def _trace_steps(self, arrivals: list[Arrival]) -> None:
        for seq_ids, _, made_s, duration_s in arrivals:
            for seq_id in self._traced.intersection(seq_ids):
                trace = self._sequences[seq_id].request.trace
                assert trace is not None
                trace.add_step(made_s - duration_s, made_s)

    def _note_first_tokens(self, step: ProcessedOutputs) -> None:
        for seq_ids, _, made_s, _ in step.arrivals:
            if not self._tokenless:
                return
            first_tokens = self._tokenless.intersection(seq_ids)
            self._tokenless -= first_tokens
            for seq_id in first_tokens:
                sequence = self._sequences[seq_id]
                sequence.first_token_s = made_s
                if sequence.request.metrics.first_token_s is None:
                    sequence.request.metrics.first_token_s = made_s
                if not sequence.versions:
                    sequence.note_version(self._version, 0)
                step.first_tokens.append(sequence)

    def _collect_logprobs(self, batch: OutputBatch) -> None:
        for seq_id, entry in batch.logprobs:
            sequence = self._sequences.get(seq_id)
            if sequence is not None:
                sequence.add_logprobs(entry)
        for seq_id, first, entries in batch.prompt_logprobs:
            sequence = self._sequences.get(seq_id)
            if sequence is None or sequence.index != 0 or sequence.request.prompt_logprobs is None:
                continue
            texts = self._tokenizer if sequence.request.params.detokenize else None
            positions = [position_logprobs(entry, texts) for entry in entries]
            sequence.request.prompt_logprobs[first : first + len(positions)] = positions

    def _update_watched(self, batch: OutputBatch, seq_ids: list[int], step: ProcessedOutputs) -> dict[str, None]:
        """Update the texts of watched sequences. Returns the ids of changed requests, in the batch's order."""
        changed: dict[str, None] = {}
        if not self._watched or self._watched.isdisjoint(seq_ids):
            return changed
        ends = {end.seq_id: end.finish_reason for end in batch.finished}
        for seq_id in dict.fromkeys(seq_ids):
            if seq_id not in self._watched:
                continue
            sequence = self._sequences[seq_id]
            if sequence.update_text(ends_with_stop_token=ends.get(seq_id) == "stop"):
                self._drop_seq_id(seq_id)
                step.ended.append(sequence)
                if seq_id not in ends:
                    step.aborts.append(seq_id)
            stream = sequence.request.stream
            if sequence.finish_reason is not None or (stream and (stream is True or sequence.has_grown())):
                changed[sequence.request.request_id] = None
        return changed

    def _take_end(self, sequence: SequenceState, end: FinishedRequest, step: ProcessedOutputs) -> None:
        if end.finish_reason not in ("error", "failed"):
            self._finish(sequence, end.finish_reason, end.stop_reason)
            step.ended.append(sequence)
            return
        error = (RequestFailed if end.finish_reason == "failed" else InvalidRequest)(str(end.stop_reason))
        self._fail(sequence, error, step)

    def _fail(self, sequence: SequenceState, error: Exception, step: ProcessedOutputs) -> None:
        """End the request of a sequence, which has ended on its rank, with an error."""
        request = sequence.request
        self._forget(request)
        failed = [each for each in request.sequences if each.finish_reason is None]
        step.aborts += [other.seq_id for other in failed if other is not sequence]
        for each in failed:
            each.finish_reason = "error"
        step.ended += failed
        step.updates.append(Update(request.request_id, error=error))

    def _report(self, changed: Iterable[str], step: ProcessedOutputs) -> None:
        for request_id in changed:
            request = self._requests.get(request_id)
            if request is None:
                continue
            if not (request.stream or request.finished):
                continue
            output = request.output()
            if output.finished:
                request.metrics.finished_s = step.now_s
                self._forget(request)
            if step.arrivals:  # what streams or has ended is sent at once, so these have its newest tokens
                request.metrics.last_token_s = step.arrivals[-1].made_s
            step.updates.append(Update(request_id, output))

    def _finish(self, sequence: SequenceState, reason: str, stop_reason: int | str | None) -> None:
        sequence.finish(reason, stop_reason)
        self._drop_seq_id(sequence.seq_id)

    def _forget(self, request: RequestState) -> None:
        del self._requests[request.request_id]
        for sequence in request.sequences:
            self._drop_seq_id(sequence.seq_id)

    def _drop_seq_id(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)
        self._token_ids.pop(seq_id, None)
        self._watched.discard(seq_id)
        self._tokenless.discard(seq_id)
        self._unversioned.discard(seq_id)
        self._traced.discard(seq_id)


def _weights_changed(sequence: SequenceState) -> WeightVersionChanged:
    (before, _), (after, num_tokens) = sequence.versions[-2:]
    return WeightVersionChanged(
        f"request {sequence.request.request_id}: the weights changed from version {before.name!r} to {after.name!r} "
        f"after {num_tokens} tokens, and on_version_change='fail'"
    )
