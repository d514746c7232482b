"""A client of the engine: accepts requests, routes them to ranks, and turns the ranks' outputs into text.

When a rank is lost, its requests move to other ranks with their prompts and the tokens generated so far, and their
streams continue where they stopped. While no rank serves, requests wait. `RequestTable` holds the requests and
`RankConnections` the connections to ranks. Only `RankConnections` uses Ray.

Three kinds of threads meet in `EngineClient`: callers submit and abort, one thread receives all ranks' outputs, and the
supervisor's threads report rank events. There are two kinds of locks:

- `_lock` guards the request table, the connections and the flags. It isn't reentrant. Only waits for `_drained`, which
  release it, are allowed under it: the outputs of all ranks need it. The router and the connections change together
  under it, so no request is routed to a rank without a connection. Ranks are sent their messages under it, so an abort
  never precedes its request: Ray keeps the order of the calls.
- `RankConnection.delivering` is held by the receiver while it processes a batch and calls the sinks. Whoever
  moves a rank's requests to another rank disconnects the rank, and then acquires this lock once, to wait for a delivery
  in progress. Otherwise, the other rank's output could reach a sink before an older one of this rank.

The receiver acquires `delivering` first, and then `_lock`. So nobody may acquire `delivering` with `_lock` held:
both threads would wait for ever. Sinks are called without `_lock`, so that they may use the client. But a sink must not
report that a rank is lost or leaves: the report would wait for the delivery that calls the sink.

Waiters for `_drained`, a condition of `_lock`, wait for different things. So every change that may end a wait notifies
all of them. Without a notification, a waiter would sleep until its timeout, or for ever.

Properties read single attributes without a lock. Their values may be out of date a moment later in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raycore.client.ask import Ask
from raycore.client.inputs import OnlyText, PromptImages
from raycore.client.output_parts import make_output_parts
from raycore.client.rank_connections import RankConnection, RankConnections, ReachableRank, Sent, call_utility
from raycore.client.recorder import Told
from raycore.client.request_checks import RequestChecks
from raycore.client.request_table import RequestTable, Updates
from raycore.client.reserved_ids import ReservedIds
from raycore.client.updates import Sink
from raycore.client.watchers import Watchers
from raycore.config import EngineConfig, ModelConfig
from raycore.engine.rank_events import EngineLost, LossExplained, RankEvent, RanksLost, RankUp
from raycore.errors import EngineDeadError
from raycore.messages import EngineInfo, LoadView, OutputBatch
from raycore.metrics.counts import RankCounts
from raycore.system import threading
from raycore.text.no_tokenizer import NoTokenizer
from raycore.text.tokenizer import Tokenizer

UTILITY_TIMEOUT_S = 300.0

DRAINING = "the engine is draining: it finishes its requests, accepts no new ones, and then stops"


def make_tokenizer(config: ModelConfig) -> Tokenizer:
    """The tokenizer of an engine's clients.

    Raises:
        InvalidCheckpoint: `tokenizer.json` is missing, or one of the tokenizer's files is damaged.
    """
    return NoTokenizer(config.spec.vocab_size) if config.skip_tokenizer_init else Tokenizer.from_dir(config.tokenizer)


@dataclass(frozen=True)
class LinkView:
    """A rank in service, as the client sees it."""

    is_leaving: bool
    """Whether the rank gets no new requests because it is about to be stopped."""
    load: LoadView


class EngineClient:
    """Submits requests to one engine's ranks, delivers outputs, and aborts requests. A `RankListener`. Thread-safe."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, client_index: int = 0, limits: EngineInfo | None = None
    ) -> None:
        """Create a client that isn't connected to any rank yet. A `RankUp` event connects it.

        `limits`: requests are checked against this `EngineInfo` before the first `RankUp`, and wait for that rank.
        Without `limits`, nothing can be submitted before the first `RankUp`.
        """
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        """Notified when requests may have ended, when outputs have been delivered, and when ranks are lost or leave."""
        replays, image_bytes = config.recovery.max_request_replays, config.feature_cache_bytes
        self._requests = RequestTable(
            config.model, tokenizer, client_index, replays, image_bytes, output_parts=[*make_output_parts(config)]
        )
        if config.kv_transfer_config is not None:
            from raycore.parts.transfers.client.routes import make_routes  # imported lazily: few engines need it

            self._requests.routes = make_routes(config, self._requests.router)
        self._connections = RankConnections(client_index, self._deliver)
        self.checks = RequestChecks(config, tokenizer, limits)
        """What requests are checked against before they are submitted."""
        self.images: PromptImages = _images(config, tokenizer)
        """Makes prompts with images."""
        self.chat_template: str | None = None
        """Jinja text for conversations in Python whose calls give no template. None: the checkpoint's."""
        self.stream_interval: int = config.scheduler.stream_interval
        """The option."""
        self.watchers = Watchers()
        """Who sees the requests of this client. Those who submit requests have them watched."""
        self.reserved = ReservedIds()
        """Ids that also are in use while no request has them."""
        self._failure: BaseException | None = None
        self._is_abandoned = False
        self._is_draining = False

    @property
    def on_broken_stream(self) -> Callable[[int, str], object]:
        """The function to call, with a dp_rank and a reason, if a rank's output stream breaks but the supervisor
        doesn't report the rank lost, or if the rank can't be sent requests."""
        return self._connections.on_broken_stream

    @on_broken_stream.setter
    def on_broken_stream(self, told: Callable[[int, str], object]) -> None:
        self._connections.on_broken_stream = told

    def submit(self, asks: Sequence[Ask], sink: Sink) -> None:
        """Check requests, route them, and send them to their ranks, one message per rank.

        `sink` receives updates, as many as each request's `stream` says.

        Raises:
            InvalidRequest: a request is invalid; the message says why. None was submitted.
            EngineDeadError: the engine has failed, or is draining.
        """
        with self._lock:
            self._raise_if_failed()
        # before the lock is taken: tokenization with the lock held would delay the outputs of all ranks
        checked = self.checks.complete(asks)
        ids = [each.request_id for each in checked]
        with self._lock:
            self._raise_if_failed()
            if self._is_draining:
                raise EngineDeadError(DRAINING)
            for each in checked:
                self._requests.check(each)
            try:
                for each in checked:
                    self._requests.add(each, sink)
                self._connections.submit(self._requests.dispatch_new(ids))
            except BaseException:
                self._abort(ids)
                raise

    def forget_images(self) -> None:
        """Drop the processed images that this client keeps, and what it believes of those that ranks keep."""
        self.images.clear()
        with self._lock:
            self._requests.forget_images()

    def abort(self, request_ids: Sequence[str], notify: bool = False) -> None:
        """Abort requests. Ignores finished ones.

        With `notify`, the requests' sinks get a last output with the finish reason `abort`.
        """
        with self._lock:
            updates = self._abort(request_ids)
        if notify:
            _tell(updates)
            self.reserved.abort(request_ids)

    def utility(
        self,
        method: str,
        args: tuple[Any, ...],
        timeout_s: float = UTILITY_TIMEOUT_S,
        *,
        num_ranks: int | None = None,
        others: Sequence[ReachableRank] = (),
    ) -> list[Any]:
        """Call a utility, which `Utilities` lists, on every rank in service, or on the first `num_ranks`, and on
        `others`.

        Returns: the results, in rank order.

        Raises: what any rank raised; EngineDeadError if a rank is lost before it answers.
        """
        with self._lock:
            self._raise_if_failed()
            connections = self._connections.all()[:num_ranks]
        # one of the others may have come into service just now
        ranks: dict[int, ReachableRank] = {rank.dp_rank: rank for rank in (*others, *connections)}
        try:
            return call_utility([rank for _, rank in sorted(ranks.items())], method, args, timeout_s)
        except EngineDeadError:
            with self._lock:
                self._raise_if_failed()
            raise

    @property
    def num_unfinished_requests(self) -> int:
        """Number of unfinished requests of this client."""
        return len(self._requests)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens received since the client's start, for all requests."""
        return self._requests.num_output_tokens

    @property
    def failure(self) -> BaseException | None:
        """What all requests fail with, once the engine has failed or was shut down. None before."""
        return self._failure

    @property
    def unavailable_reason(self) -> str | None:
        """Why requests are refused; None if they are accepted."""
        if self._failure is not None:
            return str(self._failure).partition("\n")[0]
        return DRAINING if self._is_draining else None

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait up to `timeout_s` seconds for the unfinished ones.

        Returns: whether all of them finished in that time.
        """
        with self._lock:
            self._is_draining = True
            return self._drained.wait_for(lambda: not len(self._requests), timeout_s)

    def abort_groups(self, request_ids: Sequence[str] | None) -> int:
        """Abort requests with these ids, and those whose ids are one of them and a number, as `ID-3`. None: all.

        Callers get the output so far, with the finish reason `abort`. Returns the number of aborted requests.
        """
        with self._lock:
            known = dict.fromkeys([*self._requests.request_ids(), *self.reserved])
        wanted = set(request_ids or ())
        found = [
            each
            for each in known
            if request_ids is None
            or each in wanted
            or (each.rpartition("-")[2].isdigit() and each.rpartition("-")[0] in wanted)
        ]
        self.abort(found, notify=True)
        return len(found)

    def abort_all(self) -> None:
        """Abort all requests of this client. Callers get the output so far, with the finish reason `abort`."""
        self.abort_groups(None)

    # ---- while the engine is paused

    def pause_new(self) -> None:
        """Have new requests wait until `resume_new()`. The requests that are unfinished now are the *older* ones."""
        with self._lock:
            self._requests.pause_new()

    def wait_for_older(self) -> bool:
        """Wait until the older requests have ended. Returns False if `resume_new()` was called before that."""
        with self._lock:
            self._drained.wait_for(lambda: not (self._requests.has_older and self._requests.is_paused))
            return not self._requests.has_older

    def complete_pause(self, sent: Sent, aborts: bool, timeout_s: float) -> bool:
        """Wait until the outputs that ranks sent before they paused have been delivered. Then abort the older requests.

        Args:
            aborts: whether to abort requests. Callers get the output so far, with the finish reason `abort`.
            timeout_s: how long to wait for outputs.

        Returns: whether all outputs arrived in that time. If not, no request was aborted.
        """
        left = dict(sent)
        with self._lock:
            if not self._drained.wait_for(lambda: self._connections.has_received(left), timeout_s):
                return False
            updates = self._abort(self._requests.older) if aborts else []
        _tell(updates)
        return True

    def resume_new(self) -> None:
        """Send the paused requests to ranks, and pause no more."""
        with self._lock:
            if not self._connections.is_closed:
                self._connections.resubmit(self._requests.resume_new())
            self._drained.notify_all()

    def links(self) -> dict[int, LinkView]:
        """The ranks in service, by dp_rank, with their last known loads. Sends nothing to the ranks."""
        with self._lock:
            views: dict[int, LinkView] = {}
            for connection in self._connections.all():
                num_own = self._requests.router.num_own(connection.dp_rank)
                views[connection.dp_rank] = LinkView(num_own is None, _known_load(connection.load, num_own))
            return views

    def trace_requests(self) -> None:
        """Record timing traces of the requests submitted from now on, in `RequestOutput.trace`."""
        self._requests.trace_requests()

    def tell_figures(self, told: Told) -> None:
        """Pass on the figures of each batch of a rank from now on."""
        self._requests.tell_figures(told)

    def counts(self) -> dict[int, RankCounts]:
        """This client's counts for each rank since the client's start, by dp_rank, including ranks that are gone."""
        with self._lock:
            return self._requests.counts()

    @property
    def num_waiting_for_rank(self) -> int:
        """Number of this client's requests that wait because no rank serves."""
        return self._requests.num_parked

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens of the prompts of this client's requests that have no output yet."""
        with self._lock:
            return self._requests.num_queued_tokens

    def num_on_ranks(self) -> dict[int, int]:
        """Number of this client's requests on each rank, by dp_rank. Leaves out ranks without requests."""
        with self._lock:
            return self._requests.by_rank.counts()

    def forget_client(self, client_index: int) -> None:
        """Have the ranks abort the requests of another client, whose process has ended."""
        with self._lock:
            self._connections.forget_client(client_index)

    def close(self, reason: BaseException) -> None:
        """Fail all unfinished and future requests with `reason`. The ranks' output streams end when the ranks end."""
        self._fail(reason)

    def abandon(self) -> None:
        """Stop using Ray, and leave unfinished requests waiting for ever. For the interpreter's exit.

        At exit only daemon threads still run. Their later calls never return: Python would print an error of such a
        call, because nothing handles it.
        """
        with self._lock:
            self._is_abandoned = True
            self._failure = self._failure or EngineDeadError("the program is exiting")
            self._connections.close()

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until all output streams have ended. Returns whether they have."""
        return self._connections.join(timeout_s)

    # ---- ranks come and go: see `RankListener`

    def on_rank_event(self, event: RankEvent) -> None:
        """Handle a rank event: connect to or disconnect from ranks, and move or fail their requests."""
        match event:
            case RankUp():
                self._take_rank(event)
            case RanksLost():
                self._disconnect(event.dp_ranks)
                with self._lock:
                    self._connections.resubmit(self._requests.lose_ranks(event.dp_ranks, event.loss))
                    self._drained.notify_all()
            case LossExplained():
                with self._lock:
                    updates = self._requests.explain_loss(event.loss, event.error)
                    self._drained.notify_all()
                _tell(updates)
            case EngineLost():
                self._fail(event.error)

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float, come_back: bool = False) -> None:
        """Send no new requests to these ranks, and wait up to `timeout_s` seconds until their requests have finished.

        Requests that haven't finished then move to other ranks.
        """
        with self._lock:
            self._requests.close_ranks(dp_ranks, for_good=not come_back)
            self._drained.wait_for(lambda: not self._requests.by_rank.has_any_on(dp_ranks), timeout_s)
        left = self._disconnect(dp_ranks)
        with self._lock:
            submissions = self._requests.take_back(dp_ranks)
            for connection in left:
                self._connections.leave(connection)
            self._connections.resubmit(submissions)
            self._drained.notify_all()

    def is_busy(self, dp_rank: int) -> bool:
        """Whether this client has a request on the rank."""
        with self._lock:
            return self._requests.by_rank.has_any_on([dp_rank])

    def _take_rank(self, event: RankUp) -> None:
        with self._lock:
            self.checks.tightest = self._connections.connect(event.dp_rank, event.actor, event.info)
            self._connections.resubmit(self._requests.add_rank(event.dp_rank, event.info.kv_addresses))

    def _disconnect(self, dp_ranks: Sequence[int]) -> list[RankConnection]:
        """Stop receiving from these ranks. On return, requests' sinks have got all outputs received before the call."""
        with self._lock:
            self._requests.close_ranks(dp_ranks)
            connections = self._connections.disconnect(dp_ranks)
        for connection in connections:  # without the lock, which the delivery in progress may need
            with connection.delivering:
                pass
        return connections

    # ---- details

    def _deliver(self, connection: RankConnection, batch: OutputBatch) -> None:
        """Process a batch and pass the updates to the callers. Called on the receiver's thread."""
        with connection.delivering:
            with self._lock:
                if not self._connections.is_current(connection):
                    return  # the rank's requests may be on another rank already
                self._requests.count_images(connection.dp_rank, *self.images.take_lookups())
                by_sink, aborts = self._requests.take(connection.dp_rank, connection.load, batch)
                if batch.missing_features:
                    self._connections.resubmit(self._requests.take_asked_again())
                connection.load = batch.load
                self._connections.abort(aborts)
                if self._requests.has_computed:
                    self._connections.resubmit(self._requests.continue_computed())
                self._drained.notify_all()
            for sink, updates in by_sink.items():
                sink(updates)
            if batch.steps:
                # after the sinks were called: `complete_pause()` takes these outputs for delivered
                with self._lock:
                    connection.num_batches += 1
                    self._drained.notify_all()

    def _abort(self, request_ids: Sequence[str]) -> Updates:
        """Abort requests, with the lock held by the caller. Returns the updates for the requests' sinks."""
        updates, aborts = self._requests.abort(request_ids)
        self._connections.abort(aborts)
        self._drained.notify_all()
        return updates

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._connections.close()
            updates = self._requests.fail_all(self._failure)
            self._drained.notify_all()
        _tell(updates)
        self.reserved.fail(self._failure)
        self.checks.close()  # without the lock: waits for a process

    def _raise_if_failed(self) -> None:
        """If the engine has failed, raise its failure. The caller holds the lock."""
        while self._is_abandoned and threading.current_thread().daemon:
            self._drained.wait()
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # otherwise the error would collect the frames of all callers


def _images(config: EngineConfig, tokenizer: Tokenizer) -> PromptImages:
    if config.model.spec.vision is None:
        if not config.model.enable_prompt_embeds:
            return OnlyText(config.model.model)
        from raycore.client.prompt_embeds import PromptEmbeds  # imported lazily: few engines need it

        return OnlyText(config.model.model, PromptEmbeds(config))
    from raycore.parts.images.client.inputs import ImageInputs  # imported lazily: engines for texts don't need it

    images = ImageInputs(config, tokenizer)
    images.prepare()  # while the ranks start
    return images


def _known_load(said: LoadView, num_own: int | None) -> LoadView:
    """The load that a rank last reported, corrected by the number of this client's requests on it.

    Ranks report their load with outputs, so a report may be old. If `num_own` is None, because the rank takes no
    requests, the load is returned as reported.
    """
    if num_own is None:
        return said
    if num_own == 0:
        # aborted requests cause no output, so the report may still count them
        return LoadView(0, 0, 0.0, decode_s=said.decode_s)
    num_waiting = max(said.num_waiting, num_own - said.num_running)
    return LoadView(
        num_waiting,
        said.num_running,
        said.kv_usage,
        num_deferred=said.num_deferred,
        adapters=said.adapters,
        kv_fetches=said.kv_fetches,
        decode_s=said.decode_s,
    )


def _tell(updates: Updates) -> None:
    for sink, update in updates:
        sink([update])
