"""A client of the engine: hands requests to ranks and turns what comes back into text.

Owns the requests that are under way: which rank has which, and all that another rank needs to go on with one. When a
rank is lost its requests are handed to others, prompt and tokens so far, and their streams go on where they stopped;
while there is no rank they wait for one. Knows Ray only as the way to reach a rank. One thread for each rank receives;
callers' threads submit and abort; the supervisor's say which ranks there are.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raycore.client.inputs import ParsedPrompt, checked_request_id, priorities_for_each
from raycore.client.output_processor import OutputProcessor
from raycore.client.recorder import Recorder
from raycore.client.routing import Router
from raycore.client.updates import Sink, Update
from raycore.config import EngineConfig
from raycore.errors import EngineDeadError, InvalidRequest, RequestFailed
from raycore.grammar.compiler import GrammarCompiler
from raycore.messages import NO_LOAD, EngineInfo, EngineRequest, LoadView, OutputBatch, first_seq_id
from raycore.metrics.counts import RankCounts
from raycore.sampling_params import MAX_SEED, SamplingParams
from raycore.scheduler.request import RequestLimits
from raycore.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

UTILITY_TIMEOUT_S = 300.0

DRAINING = "the engine is draining: it finishes what it has, takes nothing new, and then stops"

CAUSE_GRACE_S = 2.0
"""A rank's broken output stream waits this long for the supervisor to find the rank gone."""


@dataclass(frozen=True)
class LinkView:
    """A rank that serves, as the client sees it."""

    is_leaving: bool
    """Whether it gets no new requests, because it is about to be stopped."""
    load: LoadView


@dataclass(slots=True)
class _Underway:
    """A request that isn't finished."""

    sink: Sink
    sequences: list[EngineRequest]
    """One for each of its `n` sequences."""
    cache_salt: str | None = None
    wanted_rank: int | None = None
    """The rank that its caller has named, which gets it if it serves."""
    dp_rank: int | None = None
    """The rank that has it; None while it waits for one."""
    num_failures: int = 0
    """How many ranks failed with it."""

    @property
    def seq_ids(self) -> list[int]:
        """By which its rank knows its sequences, finished ones included."""
        return [sequence.seq_id for sequence in self.sequences]


@dataclass(eq=False, slots=True)
class _Link:
    """The connection to one rank, as long as it serves."""

    dp_rank: int
    actor: Any
    info: EngineInfo
    load: LoadView = NO_LOAD
    """What it last said of it."""
    delivering: threading.Lock = field(default_factory=threading.Lock)
    """Held while its outputs are handed to callers, so that nothing older follows what another rank gives later."""


class EngineClient:
    """Submits to the ranks of one engine, streams back, aborts. Thread-safe. A `RankListener` of the supervisor's."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, client_index: int = 0, limits: EngineInfo | None = None
    ) -> None:
        """There are no ranks yet: requests wait for the first `rank_up()`.

        `limits`: a rank's, to go by until then; without it nothing can be submitted before.
        """
        self.tokenizer = tokenizer
        self.on_broken_stream: Callable[[int, str], object] = lambda dp_rank, reason: None
        """Told of a rank whose outputs can't be received although it hasn't been found lost."""
        self._config = config
        self._client_index = client_index
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._assembler = OutputProcessor(tokenizer)
        spec = config.model.spec
        self._grammars = GrammarCompiler(config.model.tokenizer, spec.vocab_size, spec.eos_token_ids)
        if config.model.prepare_structured_outputs:
            self._grammars.prepare()  # while the ranks start
        self._recorder = Recorder(config.model.max_model_len)
        self._links: dict[int, _Link] = {}
        self._dp_ranks: set[int] = set()
        """The ranks that serve, and those that have died and may be replaced."""
        self._router = Router()
        self._underway: dict[str, _Underway] = {}
        self._parked: dict[str, None] = {}
        """Requests without a rank, in the order in which they came."""
        self._seq_ids = itertools.count(first_seq_id(client_index))
        self._failure: BaseException | None = None
        self._is_draining = False
        self._tightest = limits
        self.num_output_tokens = 0
        """Tokens received since the start, of all requests."""

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
                if request_id in self._underway:
                    raise InvalidRequest(f"request_id={request_id!r} is already under way")
            self._check_rank(data_parallel_rank)
            try:
                for i, (request_id, prompt, param) in enumerate(zip(ids, prompts, params, strict=True)):
                    sequences = self._expand(request_id, prompt, param, bad_words[i], flush_interval_s, ranked[i])
                    underway = self._underway[request_id] = _Underway(
                        sink, sequences, prompt.cache_salt, data_parallel_rank
                    )
                    self._assembler.add(request_id, prompt.text, prompt.token_ids, param, underway.seq_ids, stream)
                self._dispatch(ids)
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
        limits = RequestLimits.of(self._tightest, self._config.model.spec.vocab_size)
        limits.check(prompt.token_ids, params)

    def abort(self, request_ids: Sequence[str], notify: bool = False) -> None:
        """Drop requests; those that have finished are ignored. With `notify` their sinks get a last, aborted output."""
        with self._lock:
            aborted = self._abort(request_ids)
        if notify:
            for sink, update in aborted:
                sink([update])

    def utility(self, method: str, args: tuple[Any, ...], timeout_s: float = UTILITY_TIMEOUT_S) -> list[Any]:
        """Call a utility on every rank that serves. Returns the results in rank order.

        Raises: what any rank raised; EngineDeadError when one is gone.
        """
        with self._lock:
            self._raise_if_failed()
            links = [link for _, link in sorted(self._links.items())]
        refs = [link.actor.utility.remote(method, args, {}, timeout_s) for link in links]
        try:
            return ray.get(refs, timeout=timeout_s + 1.0)
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            self._raise_if_failed()
            raise EngineDeadError(f"{error}\na rank was lost before it had answered {method}()") from error

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its output together, at most."""
        assert self._tightest is not None, "there has been no rank yet"
        return self._tightest.max_model_len

    @property
    def num_unfinished_requests(self) -> int:
        """Requests under way."""
        return len(self._underway)

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
            return self._drained.wait_for(lambda: not self._underway, timeout_s)

    def abort_all(self) -> None:
        """Have every caller get what there is, with the finish reason `abort`."""
        with self._lock:
            request_ids = list(self._underway)
        self.abort(request_ids, notify=True)

    def links(self) -> dict[int, LinkView]:
        """The ranks that serve, by dp_rank, with their loads as far as they are known here: none is asked."""
        with self._lock:
            num_own = {dp_rank: self._router.num_own(dp_rank) for dp_rank in self._links}
            return {
                dp_rank: LinkView(num_own[dp_rank] is None, _known_load(link.load, num_own[dp_rank]))
                for dp_rank, link in self._links.items()
            }

    def trace_requests(self) -> None:
        """Have the outputs of requests that come from now on say what became of them when."""
        self._assembler.is_tracing = True

    def counts(self) -> dict[int, RankCounts]:
        """What has been counted of each rank since the start, by dp_rank; ranks that have gone are among them."""
        with self._lock:
            return self._recorder.counts()

    @property
    def num_waiting_for_rank(self) -> int:
        """Requests that no rank has, because there is none."""
        return len(self._parked)

    def num_on_ranks(self) -> dict[int, int]:
        """How many of this client's requests are on each rank, by dp_rank; those without any are left out."""
        with self._lock:
            return Counter(request.dp_rank for request in self._underway.values() if request.dp_rank is not None)

    def forget_client(self, client_index: int) -> None:
        """Another client's process is gone: have the ranks drop what it had there."""
        with self._lock:
            for link in self._links.values():
                link.actor.forget_client.remote(client_index)

    def close(self, reason: BaseException) -> None:
        """Fail what is under way, and what comes, with `reason`. The ranks' streams end when the ranks do."""
        self._fail(reason)

    # ---- ranks come and go: see `RankListener`

    def rank_up(self, dp_rank: int, actor: Any, info: EngineInfo) -> None:
        """The rank serves: receive its outputs, and give it what has waited for one."""
        link = _Link(dp_rank, actor, info)
        with self._lock:
            self._links[dp_rank] = link
            self._dp_ranks.add(dp_rank)
            self._recorder.add_rank(dp_rank)
            self._tightest = min((link.info for link in self._links.values()), key=lambda info: info.num_kv_tokens)
            self._router.add(dp_rank)
            self._dispatch(list(self._parked))
        threading.Thread(target=self._receive, args=(link,), name=f"raycore-outputs-dp{dp_rank}", daemon=True).start()

    def ranks_lost(self, dp_ranks: Sequence[int], explain: Callable[[], EngineDeadError]) -> None:
        """The ranks are gone: others go on with what they had, unless that has now failed with too many ranks."""
        self._unlink(dp_ranks)
        with self._lock:
            affected = self._on_ranks(dp_ranks)
            for request_id in affected:
                self._underway[request_id].num_failures += 1
            limit = self._config.recovery.max_request_replays
            failing = [request_id for request_id in affected if self._underway[request_id].num_failures > limit]
            self._move([request_id for request_id in affected if request_id not in failing])
        if failing:
            self._fail_requests(failing, explain())

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float) -> None:
        """The ranks are to go: give them nothing more, wait for what they have, and hand what is left to others."""
        with self._lock:
            self._dp_ranks.difference_update(dp_ranks)
            for dp_rank in dp_ranks:
                self._router.remove(dp_rank)
            self._drained.wait_for(lambda: not self._on_ranks(dp_ranks), timeout_s)
        links = self._unlink(dp_ranks)
        with self._lock:
            left = self._on_ranks(dp_ranks)
            for link in links:
                # one that isn't aborted would go on until the rank is stopped
                own = [request_id for request_id in left if self._underway[request_id].dp_rank == link.dp_rank]
                link.actor.abort.remote([seq_id for each in own for seq_id in self._underway[each].seq_ids])
            self._move(left)

    def is_busy(self, dp_rank: int) -> bool:
        """Whether any request is on the rank."""
        with self._lock:
            return any(request.dp_rank == dp_rank for request in self._underway.values())

    def engine_lost(self, error: EngineDeadError) -> None:
        """No rank is left: every waiting caller gets `error`, and every later one."""
        self._fail(error)

    def _unlink(self, dp_ranks: Sequence[int]) -> list[_Link]:
        """Take nothing more from these ranks. What they have given last is with the callers when this returns."""
        with self._lock:
            for dp_rank in dp_ranks:
                self._router.remove(dp_rank)
            links = [link for dp_rank in dp_ranks if (link := self._links.pop(dp_rank, None)) is not None]
        for link in links:
            with link.delivering:
                pass
        return links

    # ---- receiving

    def _receive(self, link: _Link) -> None:
        decoder = msgspec.msgpack.Decoder(OutputBatch)
        try:
            outputs = link.actor.outputs.options(num_returns="streaming")
            for ref in outputs.remote(self._client_index):
                self._deliver(link, decoder.decode(ray.get(ref)))
        except RayError as error:
            self._on_stream_lost(link, error)
        except Exception as error:
            # nobody would receive anything of this rank any more: whoever waits for it needs it replaced
            logger.exception("the outputs of rank %d can't be taken in", link.dp_rank)
            self.on_broken_stream(link.dp_rank, f"its outputs can't be taken in: {type(error).__name__}: {error}")

    def _on_stream_lost(self, link: _Link, error: Exception) -> None:
        """Usually the rank has died, and the supervisor knows, or will in a moment."""
        deadline_s = time.monotonic() + CAUSE_GRACE_S
        while self._is_current(link):
            if time.monotonic() > deadline_s:
                self.on_broken_stream(link.dp_rank, f"its output stream broke: {error}")
                return
            time.sleep(0.01)

    def _is_current(self, link: _Link) -> bool:
        return self._failure is None and self._links.get(link.dp_rank) is link

    def _deliver(self, link: _Link, batch: OutputBatch) -> None:
        by_sink: dict[Sink, list[Update]] = defaultdict(list)
        with link.delivering:
            with self._lock:
                if not self._is_current(link):
                    return
                step = self._assembler.process(batch)
                self._recorder.take(link.dp_rank, link.load, batch.load, step)
                link.load = batch.load
                self._router.observe(link.dp_rank, batch.load)
                self.num_output_tokens += len(batch.token_ids) // 4
                for update in step.updates:
                    output = update.output
                    request = self._underway.get(update.request_id)
                    if request is None:
                        continue
                    if output is None or output.finished:
                        self._drop(update.request_id)
                    if output is not None and output.trace is not None:
                        output.trace.dp_rank = link.dp_rank
                    by_sink[request.sink].append(update)
                self._send_aborts({link.dp_rank: step.aborts})
            for sink, updates in by_sink.items():
                sink(updates)

    # ---- requests under way; all of these are called with the lock held

    def _abort(self, request_ids: Sequence[str]) -> list[tuple[Sink, Update]]:
        """Drop requests as far as they are under way. Returns what to tell those who wait for them."""
        aborted: list[tuple[Sink, Update]] = []
        by_rank: dict[int, list[int]] = defaultdict(list)
        for request_id in request_ids:
            request = self._underway.get(request_id)
            if request is None:
                continue
            if request.dp_rank is not None:
                by_rank[request.dp_rank] += request.seq_ids
            self._drop(request_id)
            output = self._assembler.abort(request_id)
            self._recorder.drop(request.dp_rank, request.seq_ids, output, "abort")
            aborted.append((request.sink, Update(request_id, output)))
        self._send_aborts(by_rank)
        return aborted

    def _dispatch(self, request_ids: Iterable[str]) -> None:
        """Hand requests to ranks, or have them wait for one."""
        by_rank: dict[int, list[EngineRequest]] = defaultdict(list)
        for request_id in request_ids:
            request = self._underway[request_id]
            if not self._router.has_ranks:
                self._parked[request_id] = None
                continue
            (request.dp_rank,) = self._router.assign(
                [request.sequences[0].prompt_token_ids], cache_salt=request.cache_salt, rank=request.wanted_rank
            )
            self._parked.pop(request_id, None)
            unfinished = self._assembler.unfinished(request_id)
            by_rank[request.dp_rank] += [request.sequences[index] for index in unfinished]
        for dp_rank, sequences in by_rank.items():
            self._links[dp_rank].actor.submit.remote(msgspec.msgpack.encode(sequences))

    def _move(self, request_ids: Sequence[str]) -> None:
        """Have other ranks go on with requests, from the tokens that their callers have."""
        for request_id in request_ids:
            request = self._underway[request_id]
            request.dp_rank = None
            for index in self._assembler.unfinished(request_id):
                old = request.sequences[index]
                # under a new seq_id, so that what the old rank may still send is recognised, and ignored
                seq_id = next(self._seq_ids)
                tokens = self._assembler.rebind(old.seq_id, seq_id)
                self._recorder.rebind(old.seq_id, seq_id)
                request.sequences[index] = msgspec.structs.replace(old, seq_id=seq_id, output_token_ids=list(tokens))
        self._dispatch(request_ids)

    def _on_ranks(self, dp_ranks: Sequence[int]) -> list[str]:
        return [request_id for request_id, request in self._underway.items() if request.dp_rank in dp_ranks]

    def _drop(self, request_id: str) -> None:
        request = self._underway.pop(request_id)
        self._parked.pop(request_id, None)
        if request.dp_rank is not None:
            self._router.finish(request.dp_rank)
        self._drained.notify_all()

    def _send_aborts(self, by_rank: dict[int, list[int]]) -> None:
        for rank, seq_ids in by_rank.items():
            link = self._links.get(rank)
            if seq_ids and link is not None and self._failure is None:
                link.actor.abort.remote(seq_ids)

    # ---- details

    def _fail_requests(self, request_ids: Sequence[str], error: EngineDeadError) -> None:
        """Have the callers of these requests get `error`, as far as they still wait."""
        failed: list[tuple[Sink, Update]] = []
        with self._lock:
            for request_id in request_ids:
                request = self._underway.get(request_id)
                if request is not None:
                    self._drop(request_id)
                    self._recorder.drop(request.dp_rank, request.seq_ids, self._assembler.abort(request_id), "error")
                    failed.append((request.sink, Update(request_id, error=_request_failed(request_id, request, error))))
        for sink, update in failed:
            sink([update])

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            failed = [
                (request.sink, Update(request_id, error=self._failure))
                for request_id, request in self._underway.items()
            ]
            for request_id, request in self._underway.items():
                self._recorder.drop(request.dp_rank, request.seq_ids, self._assembler.abort(request_id), "error")
            self._underway.clear()
            self._parked.clear()
            self._drained.notify_all()
        for sink, update in failed:
            sink([update])

    def _expand(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        params: SamplingParams,
        bad_words: list[list[int]],
        flush_interval_s: float,
        priority: int,
    ) -> list[EngineRequest]:
        """One engine request for each of `params.n` sequences, which differ in their seeds.

        Only the first has the prompt's log probabilities made, which are the same for all; the others can then take
        the prompt from the prefix cache.
        """
        seq_ids = [next(self._seq_ids) for _ in range(params.n)]
        later = params if params.prompt_logprobs is None else msgspec.structs.replace(params, prompt_logprobs=None)
        return [
            EngineRequest(
                seq_id=seq_id,
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                params=later if index else params,
                seed=self._seed(params, index, seq_id),
                eos_token_ids=self._config.model.spec.eos_token_ids,
                bad_words_token_ids=bad_words,
                priority=priority,
                flush_interval_s=flush_interval_s,
                cache_salt=prompt.cache_salt,
            )
            for index, seq_id in enumerate(seq_ids)
        ]

    def _seed(self, params: SamplingParams, index: int, seq_id: int) -> int:
        if params.seed is not None:
            return (params.seed + index) & MAX_SEED
        # an odd multiplier spreads consecutive seq_ids over all seeds, so that none is a neighbour's
        return (self._config.model.seed + 0x9E3779B97F4A7C15 * (seq_id + 1)) & MAX_SEED

    def _check_rank(self, dp_rank: int | None) -> None:
        """Raises InvalidRequest when the engine has no such rank. With the lock held."""
        given: Any = dp_rank  # users may pass anything
        if given is not None and (type(given) is not int or given not in self._dp_ranks):
            known = ", ".join(map(str, sorted(self._dp_ranks)))
            raise InvalidRequest(f"data_parallel_rank={dp_rank!r} is not one of this engine's ranks: {known}")

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


def _request_failed(request_id: str, request: _Underway, error: EngineDeadError) -> RequestFailed:
    failed = RequestFailed(
        f"request {request_id}: {request.num_failures} ranks failed while they had it, so it is not tried again. "
        f"The last failure: {error}"
    )
    failed.__cause__ = error
    return failed
