"""Keeps one client's unfinished requests: which rank has each request, and what another rank needs to continue it.

Does no I/O: methods return what has to be sent to ranks and callers. Does not depend on Ray.

Not thread-safe: the client's lock is held in every call, and until what the call returned has been sent to the ranks.
Callers get their updates after that, without the lock. Reading a number, such as `len()`, needs no lock.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from raycore.client.ask import CheckedAsk
from raycore.client.output_processor import OutputProcessor
from raycore.client.part import OutputPart
from raycore.client.recorder import Recorder, Told
from raycore.client.requests_by_rank import RequestsByRank
from raycore.client.routes import Routes
from raycore.client.routing import Router
from raycore.client.updates import Sink, Update
from raycore.config import ModelConfig
from raycore.errors import EngineDeadError, InvalidRequest, RequestFailed
from raycore.messages import EngineRequest, LoadView, OutputBatch, first_seq_id
from raycore.metrics.counts import RankCounts
from raycore.parts.images.client.sent_features import SentFeatures
from raycore.sampling_params import MAX_SEED, SamplingParams
from raycore.system import time
from raycore.text.tokenizer import Tokenizer

Submissions = Mapping[int, Sequence[EngineRequest]]
"""By dp_rank: the sequences that have to be sent to the rank."""

Aborts = Mapping[int, Sequence[int]]
"""By dp_rank: the seq_ids that the rank has to abort."""

Updates = list[tuple[Sink, Update]]
"""Updates that have to be delivered to callers, each with the caller's sink."""


@dataclass(slots=True)
class _Underway:
    """An unfinished request."""

    sink: Sink
    sequences: list[EngineRequest]
    """One for each of the request's `n` sequences."""
    cache_salt: str | None = None
    """The same for requests that can share cached prefixes: their salt, and their adapter."""
    wanted_rank: int | None = None
    """The rank that the caller asked for, if any. While that rank isn't in service, another rank gets the request."""
    dp_rank: int | None = None
    """The rank that has the request; None while no rank has it. `RequestTable._place` sets it."""
    num_failures: int = 0
    """How often a rank failed while it had the request."""

    @property
    def seq_ids(self) -> list[int]:
        """The seq_ids of all sequences of the request, including finished ones."""
        return [sequence.seq_id for sequence in self.sequences]


class RequestTable:
    """Unfinished requests, and the rank that each is on."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        client_index: int,
        max_replays: int,
        image_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        make_recorder: Callable[[int], Recorder] = Recorder,
        output_parts: Sequence[OutputPart] = (),
    ) -> None:
        """
        Args:
            max_replays: how often a request may move to another rank because the rank that had it failed. At the next
                failure of a rank that has it, the request fails.
            image_bytes: how many bytes of images' data each rank keeps.
            clock: the time in seconds.
            make_recorder: makes what counts what requests do, from the largest number of tokens of a request.
            output_parts: what adds to outputs.
        """
        self.num_output_tokens = 0
        """Number of output tokens received since the client's start, for all requests."""
        self.router = Router(client_index=client_index)
        self.routes = Routes(self.router)
        """Says which rank gets a request."""
        self._computing: dict[int, str] = {}
        """By seq_id: the ids of the requests whose prompts a rank computes for others."""
        self._computed: dict[str, dict[int, dict[str, Any] | None]] = {}
        """By request_id and seq_id: what that rank has said of the blocks of sequences that are to go on elsewhere."""
        self._config = config
        self._max_replays = max_replays
        self._outputs = OutputProcessor(tokenizer, clock, output_parts)
        self._recorder = make_recorder(config.max_model_len)
        self._underway: dict[str, _Underway] = {}
        self.by_rank = RequestsByRank()
        self._parked: dict[str, None] = {}
        """The ids of requests that wait because no rank serves, in order of arrival."""
        self._is_paused = False
        """Whether new requests wait because the engine is paused."""
        self._paused: dict[str, None] = {}
        """The ids of requests that wait because they came while the engine was paused, in order of arrival."""
        self._older: dict[str, None] = {}
        """The ids of the unfinished requests that came before the last call of `pause_new()`, in their order."""
        self._unexplained: dict[int, list[tuple[str, _Underway, int]]] = {}
        """By the number of a loss (`RanksLost.loss`): (request_id, request, dp_rank) of the requests that fail when the
        loss is explained."""
        self._dp_ranks: set[int] = set()
        """The ranks in service, and others that may come back: lost ones, and those without weights."""
        self._seq_ids = itertools.count(first_seq_id(client_index))
        self._sent = SentFeatures(image_bytes)
        self._asked_again: dict[int, list[EngineRequest]] = {}
        """By dp_rank: the sequences that it lacks the images of."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._underway

    def __len__(self) -> int:
        return len(self._underway)

    def request_ids(self) -> list[str]:
        """The ids of all unfinished requests."""
        return list(self._underway)

    @property
    def num_parked(self) -> int:
        """Number of requests that wait because no rank serves, or because the engine is paused."""
        return len(self._parked) + len(self._paused)

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens of the prompts of requests that have no output yet."""
        firsts = (request.sequences[0] for request in self._underway.values())
        return sum(len(first.prompt_token_ids) for first in firsts if self._outputs.is_tokenless(first.seq_id))

    def counts(self) -> dict[int, RankCounts]:
        """This client's counts for each rank since the client's start, by dp_rank, including ranks that are gone."""
        return self._recorder.counts()

    def trace_requests(self) -> None:
        """Record timing traces of the requests added from now on, in `RequestOutput.trace`."""
        self._outputs.is_tracing = True

    def tell_figures(self, told: Told) -> None:
        """Pass on the figures of each batch from now on."""
        self._recorder.told = told

    # ---- requests come and go

    def check(self, checked: CheckedAsk) -> None:
        """Raise InvalidRequest if the request's id is in use, or the engine lacks the rank that it names."""
        if checked.request_id in self._underway:
            raise InvalidRequest(f"request_id={checked.request_id!r} is already in use")
        if checked.wanted_rank is not None and checked.wanted_rank not in self._dp_ranks:
            known = ", ".join(map(str, sorted(self._dp_ranks)))
            raise InvalidRequest(f"data_parallel_rank={checked.wanted_rank} isn't one of this engine's ranks: {known}")

    def add(self, checked: CheckedAsk, sink: Sink) -> None:
        """Add a request that passes `check()`. A later `dispatch()` assigns it to a rank."""
        ask, params, prompt = checked.ask, checked.params, checked.ask.parsed
        seq_ids = [next(self._seq_ids) for _ in range(params.n)]
        first = EngineRequest(
            seq_id=seq_ids[0],
            request_id=checked.request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            seed=self._seed(params, 0, seq_ids[0]),
            eos_token_ids=self._config.spec.eos_token_ids,
            bad_words_token_ids=checked.bad_words_token_ids,
            thinking=checked.thinking,
            priority=checked.priority,
            flush_interval_s=checked.flush_interval_s,
            cache_salt=prompt.cache_salt,
            lora=ask.lora,
            pooling=checked.pooling,
            second_text=prompt.second_text,
            features=list(prompt.features),
            feature_data=list(prompt.feature_data),
        )
        # What a prompt's tokens give is the same for all sequences. Only the first one computes it, so that the others
        # can take the prompt from the prefix cache.
        later = params
        if params.prompt_logprobs is not None or params.return_prompt_hidden_states:
            later = msgspec.structs.replace(params, prompt_logprobs=None, return_prompt_hidden_states=False)
        others = [
            msgspec.structs.replace(first, seq_id=seq_id, params=later, seed=self._seed(params, index, seq_id))
            for index, seq_id in enumerate(seq_ids[1:], start=1)
        ]
        shares = prompt.cache_salt if ask.lora is None else f"{ask.lora.lora_path} {prompt.cache_salt or ''}"
        if prompt.features:
            shares = f"{prompt.features[0].identifier} {shares or ''}"
        self._underway[checked.request_id] = _Underway(sink, [first, *others], shares, checked.wanted_rank)
        self._outputs.add(checked, seq_ids)

    def dispatch_new(self, request_ids: Iterable[str]) -> Submissions:
        """Assign new requests to ranks. While new requests are paused, they wait for `resume_new()` instead."""
        if not self._is_paused:
            return self.dispatch(request_ids)
        self._paused |= dict.fromkeys(request_ids)
        return {}

    def pause_new(self) -> None:
        """Pause new requests: they wait from now on. `older` are those that are unfinished now."""
        self._is_paused = True
        self._older = dict.fromkeys(self._underway)

    def resume_new(self) -> Submissions:
        """Pause new requests no more, and assign those that have waited to ranks."""
        self._is_paused = False
        paused, self._paused = self._paused, {}
        return self.dispatch(paused)

    @property
    def is_paused(self) -> bool:
        """Whether new requests are paused."""
        return self._is_paused

    @property
    def has_older(self) -> bool:
        """Whether there are requests in `older`."""
        return bool(self._older)

    @property
    def older(self) -> list[str]:
        """The ids of the unfinished requests that came before the last call of `pause_new()`."""
        return list(self._older)

    def dispatch(self, request_ids: Iterable[str]) -> Submissions:
        """Assign requests to ranks. While no rank serves, requests wait instead."""
        submissions: dict[int, list[EngineRequest]] = defaultdict(list)
        for request_id in request_ids:
            request = self._underway[request_id]
            if not self.router.has_ranks:
                self._parked[request_id] = None
                continue
            self._parked.pop(request_id, None)
            unfinished = [request.sequences[index] for index in self._outputs.unfinished(request_id)]
            route = self.routes.route(unfinished[0], request.cache_salt, request.wanted_rank)
            if route.hints is not None or route.hands_over:
                changed = {"hints": route.hints, "hands_over": route.hands_over}
                unfinished = [msgspec.structs.replace(each, **changed) for each in unfinished]
            if route.hands_over:
                self._computing.update((sequence.seq_id, request_id) for sequence in unfinished)
            self._place(request_id, request, route.rank)
            submissions[route.rank] += [self._sent.without_known(route.rank, sequence) for sequence in unfinished]
        return submissions

    def abort(self, request_ids: Iterable[str]) -> tuple[Updates, Aborts]:
        """Remove requests; unknown ids are ignored. The returned updates have the requests' last outputs."""
        updates: Updates = []
        aborts: dict[int, list[int]] = defaultdict(list)
        was_interrupted = False
        for request_id in request_ids:
            request = self._underway.get(request_id)
            if request is None:
                continue
            dp_rank = request.dp_rank
            if dp_rank is not None:
                aborts[dp_rank] += request.seq_ids
            elif request_id not in self._parked and request_id not in self._paused:
                was_interrupted = True
            self._drop(request_id)
            if request_id not in self._outputs:
                continue  # a signal's handler raised an exception in the middle of `add()`
            output = self._outputs.abort(request_id)
            self._recorder.drop(dp_rank, request.seq_ids, output, "abort")
            updates.append((request.sink, Update(request_id, output)))
        if was_interrupted:  # maybe when the router had just placed one
            self.router.correct(self.by_rank.counts())
        return updates, aborts

    def take(self, dp_rank: int, before: LoadView, batch: OutputBatch) -> tuple[dict[Sink, list[Update]], Aborts]:
        """Process a rank's batch. Returns the updates for each sink, and the sequences that the rank has to abort.

        Args:
            before: the load in the previous batch from the same process of the rank.
        """
        if self._computing:
            self._take_computed(batch)
        if batch.cache is not None:
            self.routes.take(dp_rank, batch.cache)
        if batch.missing_features:
            self._note_missing(dp_rank, batch)
        step = self._outputs.process(batch)
        self._recorder.take(dp_rank, before, batch.load, step)
        self._outputs.release(step)
        self.router.observe(dp_rank, batch.load)
        self.num_output_tokens += len(batch.token_ids) // 4
        by_sink: dict[Sink, list[Update]] = defaultdict(list)
        for update in step.updates:
            output = update.output
            request = self._underway.get(update.request_id)
            if request is None:
                continue
            if update.is_last:
                self._drop(update.request_id)
            if output is not None and output.trace is not None:
                output.trace.dp_rank = dp_rank
            by_sink[request.sink].append(update)
        return by_sink, {dp_rank: step.aborts}

    def count_images(self, dp_rank: int, num_lookups: int, num_hits: int) -> None:
        """Count lookups of images: see `Recorder.count_images`."""
        self._recorder.count_images(dp_rank, num_lookups, num_hits)

    def take_asked_again(self) -> Submissions:
        """Return what has to be sent to ranks again, because they lacked images."""
        asked, self._asked_again = self._asked_again, {}
        return asked

    def forget_images(self) -> None:
        """Note that no rank keeps any images' data."""
        self._sent.clear()

    def _note_missing(self, dp_rank: int, batch: OutputBatch) -> None:
        """Note which sequences a rank lacks images of. They are sent again with all of theirs."""
        self._sent.forget(dp_rank)
        missing = {seq_id for seq_id, _ in batch.missing_features}
        for request_id in self.by_rank.on([dp_rank]):
            self._asked_again.setdefault(dp_rank, []).extend(
                self._sent.without_known(dp_rank, sequence)
                for sequence in self._underway[request_id].sequences
                if sequence.seq_id in missing
            )

    def _take_computed(self, batch: OutputBatch) -> None:
        """Note which sequences have only reached the end of what their rank computes. For them, nothing has ended."""
        ended = [end for end in batch.finished if end.seq_id in self._computing]
        hints = dict(batch.hints) if ended else {}
        for end in ended:
            request_id = self._computing.pop(end.seq_id)
            request = self._underway.get(request_id)
            if request is not None and end.finish_reason == "length" and not self._is_full(request, end.seq_id):
                batch.finished.remove(end)
                self._computed.setdefault(request_id, {})[end.seq_id] = hints.get(end.seq_id)

    def _is_full(self, request: _Underway, seq_id: int) -> bool:
        """Whether a sequence, which has got one token since it was sent, may have no more."""
        sequence = next(each for each in request.sequences if each.seq_id == seq_id)
        num_output = len(sequence.output_token_ids) + 1
        most = sequence.params.max_tokens
        has_all = most is not None and num_output >= most
        return has_all or len(sequence.prompt_token_ids) + num_output >= self._config.max_model_len

    @property
    def has_computed(self) -> bool:
        """Whether there is something for `continue_computed()`."""
        return bool(self._computed)

    def continue_computed(self) -> Submissions:
        """Send requests whose prompts are computed to the ranks that go on, and what those ranks are told with them."""
        submissions: dict[int, list[EngineRequest]] = defaultdict(list)
        computing = set(self._computing.values()) if self._computed else ()
        for request_id in [each for each in self._computed if each not in computing]:
            told = self._computed.pop(request_id)
            request = self._underway.get(request_id)
            if request is None or request.dp_rank is None:
                continue
            self.router.finish(request.dp_rank)
            hints = {index: told.get(each.seq_id) for index, each in enumerate(request.sequences)}
            indexes = self._rebind(request_id)
            if not self.router.has_ranks:
                self._parked[request_id] = None
                continue
            first = indexes[0]
            route = self.routes.route_on(request.sequences[first], request.cache_salt, hints[first])
            self._place(request_id, request, route.rank)
            submissions[route.rank] += [
                self._sent.without_known(
                    route.rank,
                    msgspec.structs.replace(
                        request.sequences[index], hints=hints[index] if index != first else route.hints
                    ),
                )
                for index in indexes
            ]
        return submissions

    def fail_all(self, error: BaseException) -> Updates:
        """Remove all requests. The returned updates fail them with `error`."""
        updates: Updates = []
        for request_id, request in self._underway.items():
            self._recorder.drop(request.dp_rank, request.seq_ids, self._outputs.abort(request_id), "error")
            updates.append((request.sink, Update(request_id, error=error)))
        self._underway.clear()
        self.by_rank.clear()
        self._computing.clear()
        self._computed.clear()
        self._parked.clear()
        self._paused.clear()
        self._older.clear()
        self._unexplained.clear()
        return updates

    # ---- ranks come and go

    def add_rank(self, dp_rank: int, kv_addresses: Sequence[str] = ()) -> Submissions:
        """Add a rank to those in service, and dispatch the waiting requests.

        `kv_addresses`: how workers of other ranks reach those of this one.
        """
        self._dp_ranks.add(dp_rank)
        self.routes.add_rank(dp_rank, kv_addresses)
        self._recorder.add_rank(dp_rank)
        self.router.add(dp_rank)
        self._sent.forget(dp_rank)
        return self.dispatch(list(self._parked))

    def close_ranks(self, dp_ranks: Sequence[int], *, for_good: bool = False) -> None:
        """Assign no more requests to these ranks.

        `for_good`: whether the ranks won't come back, so that `check()` refuses them from now on.
        """
        for dp_rank in dp_ranks:
            self.router.remove(dp_rank)
        if for_good:
            self._dp_ranks.difference_update(dp_ranks)

    def lose_ranks(self, dp_ranks: Sequence[int], loss: int) -> Submissions:
        """Move requests from lost ranks to other ranks. Call `close_ranks()` first.

        A request that has been on failing ranks more than `max_replays` times is not moved: `explain_loss()` fails it.
        """
        self._dp_ranks.update(dp_ranks)  # a client that has just joined hasn't seen them in service
        failing: list[tuple[str, _Underway, int]] = []
        moving: list[str] = []
        for request_id in self.by_rank.on(dp_ranks):
            request = self._underway[request_id]
            request.num_failures += 1
            if request.num_failures > self._max_replays:
                assert request.dp_rank is not None
                failing.append((request_id, request, request.dp_rank))
                self._place(request_id, request, None)
            else:
                moving.append(request_id)
        if failing:
            self._unexplained[loss] = failing
        return self._move(moving)

    def explain_loss(self, loss: int, error: EngineDeadError) -> Updates:
        """Fail the requests that `lose_ranks()` didn't move. `error` is the cause of the loss."""
        updates: Updates = []
        for request_id, request, dp_rank in self._unexplained.pop(loss, []):
            if self._underway.get(request_id) is request:
                self._drop(request_id)
                self._recorder.drop(dp_rank, request.seq_ids, self._outputs.abort(request_id), "error")
                updates.append((request.sink, Update(request_id, error=_request_failed(request_id, request, error))))
        return updates

    def take_back(self, dp_ranks: Sequence[int]) -> Submissions:
        """Move unfinished requests away from ranks that go out of service. Call `close_ranks()` first.

        Returns: what to send to the other ranks.
        """
        return self._move(self.by_rank.on(dp_ranks))

    # ---- details

    def _move(self, request_ids: Sequence[str]) -> Submissions:
        """Dispatch requests to other ranks, which continue them after the tokens received so far."""
        for request_id in request_ids:
            self._computed.pop(request_id, None)
            self._rebind(request_id)
        return self.dispatch(request_ids)

    def _rebind(self, request_id: str) -> list[int]:
        """Let a request, which no rank has from now on, go on after the tokens received so far.

        Returns: the indexes of its unfinished sequences.
        """
        request = self._underway[request_id]
        self._place(request_id, request, None)
        indexes = self._outputs.unfinished(request_id)
        for index in indexes:
            old = request.sequences[index]
            self._computing.pop(old.seq_id, None)
            # a new seq_id, so that late outputs of the old rank, which have the old seq_id, are ignored
            seq_id = next(self._seq_ids)
            tokens = self._outputs.rebind(old.seq_id, seq_id)
            self._recorder.rebind(old.seq_id, seq_id)
            request.sequences[index] = msgspec.structs.replace(
                old,
                seq_id=seq_id,
                output_token_ids=list(tokens),
                lora_revision=self._outputs.revision_begun(seq_id),
            )
        return indexes

    def _drop(self, request_id: str) -> None:
        request = self._underway.pop(request_id)
        self._parked.pop(request_id, None)
        self._paused.pop(request_id, None)
        self._older.pop(request_id, None)
        if self._computing or self._computed:
            self._computed.pop(request_id, None)
            for seq_id in request.seq_ids:
                self._computing.pop(seq_id, None)
        if request.dp_rank is not None:
            self.router.finish(request.dp_rank)
            # `request.dp_rank` stays: the end is counted as that rank's
            self.by_rank.move(request_id, request.dp_rank, None)

    def _place(self, request_id: str, request: _Underway, dp_rank: int | None) -> None:
        """Note which rank has a request from now on."""
        before, request.dp_rank = request.dp_rank, dp_rank
        self.by_rank.move(request_id, before, dp_rank)

    def _seed(self, params: SamplingParams, index: int, seq_id: int) -> int:
        if params.seed is not None:
            return (params.seed + index) & MAX_SEED
        # a large odd multiplier spreads consecutive seq_ids over the range of seeds without collisions
        return (self._config.seed + 0x9E3779B97F4A7C15 * (seq_id + 1)) & MAX_SEED


def _request_failed(request_id: str, request: _Underway, error: EngineDeadError) -> RequestFailed:
    failed = RequestFailed(
        f"request {request_id}: {request.num_failures} ranks failed while they had it, so it isn't retried. "
        f"The last failure: {error}"
    )
    failed.__cause__ = error
    return failed
