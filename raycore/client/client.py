"""A client of the engine: takes requests, hands them to ranks, and turns what comes back into text.

When a rank is lost its requests are handed to others, prompt and tokens so far, and their streams go on where they
stopped; while there is no rank they wait for one. `RequestTable` knows the requests, `RankConnections` the ranks; here
is the lock that joins them. One thread for each rank delivers outputs; callers' threads submit and abort; the
supervisor's say which ranks there are. Knows no Ray.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raycore.client.inputs import ParsedPrompt, checked_request_id, priorities_for_each
from raycore.client.rank_connections import RankConnection, RankConnections, call_utility
from raycore.client.request_table import News, RequestTable
from raycore.client.updates import Sink
from raycore.config import EngineConfig
from raycore.engine.rank_events import EngineLost, LossExplained, RankEvent, RanksLost, RankUp
from raycore.errors import EngineDeadError, InvalidRequest
from raycore.grammar.compiler import GrammarCompiler
from raycore.messages import NO_LOAD, EngineInfo, LoadView, OutputBatch
from raycore.metrics.counts import RankCounts
from raycore.sampling_params import SamplingParams
from raycore.scheduler.request import RequestLimits
from raycore.text.tokenizer import Tokenizer

UTILITY_TIMEOUT_S = 300.0

DRAINING = "the engine is draining: it finishes what it has, takes nothing new, and then stops"


@dataclass(frozen=True)
class LinkView:
    """A rank that serves, as the client sees it."""

    is_leaving: bool
    """Whether it gets no new requests, because it is about to be stopped."""
    load: LoadView


class EngineClient:
    """Submits to the ranks of one engine, streams back, aborts. Thread-safe. A `RankListener` of the supervisor's."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, client_index: int = 0, limits: EngineInfo | None = None
    ) -> None:
        """There are no ranks yet: requests wait for the first `RankUp`.

        `limits`: a rank's, to go by until then; without it nothing can be submitted before.
        """
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        """Notified whenever requests have ended."""
        self._requests = RequestTable(config.model, tokenizer, client_index, config.recovery.max_request_replays)
        self._connections = RankConnections(client_index, self._deliver)
        spec = config.model.spec
        self._vocab_size = spec.vocab_size
        self._grammars = GrammarCompiler(config.model.tokenizer, spec.vocab_size, spec.eos_token_ids)
        if config.model.prepare_structured_outputs:
            self._grammars.prepare()  # while the ranks start
        self._failure: BaseException | None = None
        self._is_draining = False
        self._tightest = limits

    @property
    def on_broken_stream(self) -> Callable[[int, str], object]:
        """Told of a rank whose outputs can't be received although it hasn't been found lost, and why."""
        return self._connections.on_broken_stream

    @on_broken_stream.setter
    def on_broken_stream(self, told: Callable[[int, str], object]) -> None:
        self._connections.on_broken_stream = told

    def submit(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Sequence[SamplingParams],
        sink: Sink,
        *,
        stream: bool = False,
        flush_interval_s: float = 0.0,
        request_ids: Sequence[str] | None = None,
        priorities: Sequence[int] | None = None,
        data_parallel_rank: int | None = None,
    ) -> list[str]:
        """Check requests, route them, and hand them to their ranks, one message a rank.

        Args:
            sink: gets an update for each step of a request with `stream`, else one at its end.
            flush_interval_s: tokens may wait this long for company before they are sent here.
            priorities: one for each, lower first.
            data_parallel_rank: the rank that gets the requests. While it is being replaced, and when it is lost, others
                get them.

        Returns: the request ids, in order.

        Raises:
            InvalidRequest: naming what is wrong with which request; then none was submitted.
            EngineDeadError: the engine is gone.
        """
        self._raise_if_failed()
        ids = _checked_ids(request_ids) if request_ids is not None else [uuid.uuid4().hex for _ in prompts]
        ranked = priorities_for_each(priorities, len(prompts)) or [0] * len(prompts)
        # the caller may change its own while a request is under way
        snapshots = {id(param): param.snapshot() for param in {id(param): param for param in params}.values()}
        params = [snapshots[id(param)] for param in params]
        for prompt, param in zip(prompts, params, strict=True):
            self.check(prompt, param)
            self.check_structured_outputs(param)
        # before the lock is taken, for which all that comes from the ranks would wait
        bad_words = [self.tokenizer.bad_words_token_ids(param.bad_words or ()) for param in params]
        with self._lock:
            self._raise_if_failed()
            if self._is_draining:
                raise EngineDeadError(DRAINING)
            for request_id in ids:
                if request_id in self._requests:
                    raise InvalidRequest(f"request_id={request_id!r} is already under way")
            rank = None if data_parallel_rank is None else self._requests.checked_rank(data_parallel_rank)
            try:
                for i, (request_id, prompt, param) in enumerate(zip(ids, prompts, params, strict=True)):
                    self._requests.add(
                        request_id,
                        prompt,
                        param,
                        sink,
                        stream=stream,
                        bad_words_token_ids=bad_words[i],
                        flush_interval_s=flush_interval_s,
                        priority=ranked[i],
                        wanted_rank=rank,
                    )
                self._connections.submit(self._requests.dispatch(ids))
            except BaseException:
                self._abort(ids)
                raise
        return ids

    def check_structured_outputs(self, params: SamplingParams) -> None:
        """Refuse a constraint that can't be followed. For one that wasn't seen lately this may take a second.

        Raises:
            InvalidRequest: naming what is wrong with it.
        """
        if params.structured_outputs is not None:
            self._grammars.check(params.structured_outputs)

    def check(self, prompt: ParsedPrompt, params: SamplingParams) -> None:
        """Raises InvalidRequest when the request could never run."""
        assert self._tightest is not None, "there has been no rank yet"
        RequestLimits.of(self._tightest, self._vocab_size).check(prompt.token_ids, params)

    def abort(self, request_ids: Sequence[str], notify: bool = False) -> None:
        """Drop requests; those that have finished are ignored. With `notify` their sinks get a last, aborted output."""
        with self._lock:
            news = self._abort(request_ids)
        if notify:
            _tell(news)

    def utility(self, method: str, args: tuple[Any, ...], timeout_s: float = UTILITY_TIMEOUT_S) -> list[Any]:
        """Call a utility on every rank that serves. Returns the results in rank order.

        Raises: what any rank raised; EngineDeadError when one is gone.
        """
        with self._lock:
            self._raise_if_failed()
            connections = self._connections.all()
        try:
            return call_utility(connections, method, args, timeout_s)
        except EngineDeadError:
            self._raise_if_failed()
            raise

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its output together, at most."""
        assert self._tightest is not None, "there has been no rank yet"
        return self._tightest.max_model_len

    @property
    def num_unfinished_requests(self) -> int:
        """Requests under way."""
        return len(self._requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens received since the start, of all requests."""
        return self._requests.num_output_tokens

    @property
    def unavailable_reason(self) -> str | None:
        """Why no requests are taken; None when they are."""
        if self._failure is not None:
            return str(self._failure).partition("\n")[0]
        return DRAINING if self._is_draining else None

    def drain(self, timeout_s: float) -> bool:
        """Refuse whatever comes from now on, and wait for what is under way. Returns whether all of it has finished."""
        with self._lock:
            self._is_draining = True
            return self._drained.wait_for(lambda: not len(self._requests), timeout_s)

    def abort_all(self) -> None:
        """Have every caller get what there is, with the finish reason `abort`."""
        with self._lock:
            request_ids = self._requests.request_ids()
        self.abort(request_ids, notify=True)

    def links(self) -> dict[int, LinkView]:
        """The ranks that serve, by dp_rank, with their loads as far as they are known here: none is asked."""
        with self._lock:
            views: dict[int, LinkView] = {}
            for connection in self._connections.all():
                num_own = self._requests.router.num_own(connection.dp_rank)
                views[connection.dp_rank] = LinkView(num_own is None, _known_load(connection.load, num_own))
            return views

    def trace_requests(self) -> None:
        """Have the outputs of requests that come from now on say what became of them when."""
        self._requests.trace_requests()

    def counts(self) -> dict[int, RankCounts]:
        """What has been counted of each rank since the start, by dp_rank; ranks that have gone are among them."""
        with self._lock:
            return self._requests.counts()

    @property
    def num_waiting_for_rank(self) -> int:
        """Requests that no rank has, because there is none."""
        return self._requests.num_parked

    def num_on_ranks(self) -> dict[int, int]:
        """How many of this client's requests are on each rank, by dp_rank; those without any are left out."""
        with self._lock:
            return self._requests.num_on_ranks()

    def forget_client(self, client_index: int) -> None:
        """Another client's process is gone: have the ranks drop what it had there."""
        with self._lock:
            self._connections.forget_client(client_index)

    def close(self, reason: BaseException) -> None:
        """Fail what is under way, and what comes, with `reason`. The ranks' streams end when the ranks do."""
        self._fail(reason)

    # ---- ranks come and go: see `RankListener`

    def on_rank_event(self, event: RankEvent) -> None:
        """Ranks have come or gone: requests go to those that there are."""
        match event:
            case RankUp():
                self._take_rank(event)
            case RanksLost():
                self._disconnect(event.dp_ranks)
                with self._lock:
                    self._connections.submit(self._requests.lose_ranks(event.dp_ranks, event.loss))
            case LossExplained():
                with self._lock:
                    news = self._requests.explain_loss(event.loss, event.error)
                    self._drained.notify_all()
                _tell(news)
            case EngineLost():
                self._fail(event.error)

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float) -> None:
        """The ranks are to go: give them nothing more, wait for what they have, and hand what is left to others."""
        with self._lock:
            self._requests.close_ranks(dp_ranks, for_good=True)
            self._drained.wait_for(lambda: not self._requests.on_ranks(dp_ranks), timeout_s)
        left = self._disconnect(dp_ranks)
        with self._lock:
            submissions, aborts = self._requests.take_back(dp_ranks)
            for connection in left:
                # what isn't aborted would go on until the rank is stopped
                connection.actor.abort.remote(list(aborts.get(connection.dp_rank, ())))
            self._connections.submit(submissions)

    def is_busy(self, dp_rank: int) -> bool:
        """Whether any request is on the rank."""
        with self._lock:
            return bool(self._requests.on_ranks([dp_rank]))

    def _take_rank(self, event: RankUp) -> None:
        with self._lock:
            self._connections.connect(event.dp_rank, event.actor, event.info)
            infos = [connection.info for connection in self._connections.all()]
            self._tightest = min(infos, key=lambda info: info.num_kv_tokens)
            self._connections.submit(self._requests.add_rank(event.dp_rank))

    def _disconnect(self, dp_ranks: Sequence[int]) -> list[RankConnection]:
        """Take nothing more from these ranks. What they have given last is with the callers when this returns."""
        with self._lock:
            self._requests.close_ranks(dp_ranks)
            connections = self._connections.disconnect(dp_ranks)
        for connection in connections:
            with connection.delivering:
                pass
        return connections

    # ---- details

    def _deliver(self, connection: RankConnection, batch: OutputBatch) -> None:
        """On the rank's thread."""
        with connection.delivering:
            with self._lock:
                if not self._connections.is_current(connection):
                    return
                by_sink, aborts = self._requests.take(connection.dp_rank, connection.load, batch)
                connection.load = batch.load
                self._connections.abort(aborts)
                self._drained.notify_all()
            for sink, updates in by_sink.items():
                sink(updates)

    def _abort(self, request_ids: Sequence[str]) -> News:
        """With the lock held. Returns what to tell those who wait."""
        news, aborts = self._requests.abort(request_ids)
        self._connections.abort(aborts)
        self._drained.notify_all()
        return news

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._connections.close()
            news = self._requests.fail_all(self._failure)
            self._drained.notify_all()
        _tell(news)

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # it is raised for every caller, and would keep all their frames


def _checked_ids(request_ids: Sequence[str]) -> list[str]:
    ids = [checked_request_id(request_id) for request_id in request_ids]
    repeated = [request_id for request_id, count in Counter(ids).items() if count > 1]
    if repeated:
        raise InvalidRequest(f"request_id={repeated[0]!r} is given to more than one request")
    return ids


def _known_load(said: LoadView, num_own: int | None) -> LoadView:
    """A rank's word of its load, which comes with outputs, set right by how many requests it has; None: unknown."""
    if num_own is None:
        return said
    if num_own == 0:
        return NO_LOAD  # the last were aborted, which no output follows
    num_waiting = max(said.num_waiting, num_own - said.num_running)
    return LoadView(num_waiting, said.num_running, said.kv_usage, num_deferred=said.num_deferred)


def _tell(news: News) -> None:
    for sink, update in news:
        sink([update])
