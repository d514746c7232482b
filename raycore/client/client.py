"""A client of the engine: hands requests to ranks and turns what comes back into text.

Owns the requests that are under way: which rank has which, and what each still waits for. Knows Ray only as
the way to reach a rank. One thread for each rank receives; callers' threads submit and abort.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raycore.client.assembly import OutputAssembler
from raycore.client.inputs import ParsedPrompt, check_request
from raycore.client.routing import Router
from raycore.client.tokenizer import Tokenizer
from raycore.config import EngineConfig
from raycore.errors import EngineDeadError, InvalidRequest
from raycore.messages import HANDLE_CLIENT_SHIFT, EngineInfo, EngineRequest, OutputBatch
from raycore.outputs import RequestOutput
from raycore.sampling_params import MAX_SEED, SamplingParams
from raycore.worker.quiet import Ringer

logger = logging.getLogger(__name__)

UTILITY_TIMEOUT_S = 300.0

CAUSE_GRACE_S = 2.0
"""A rank's broken output stream waits this long for its run ref to say why it broke."""


@dataclass(slots=True)
class Update:
    """News of one request: an output, or the error that ended it."""

    request_id: str
    output: RequestOutput | None = None
    error: BaseException | None = None


Sink = Callable[[list[Update]], object]
"""Gets a batch of updates, on one of the client's threads; must not block."""


@dataclass(slots=True)
class _Underway:
    """A request that isn't finished."""

    sink: Sink
    dp_rank: int
    handles: list[int]


class EngineClient:
    """Submits to the ranks of one engine, streams back, aborts. Thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        actors: Sequence[Any],
        infos: Sequence[EngineInfo],
        tokenizer: Tokenizer,
        client_index: int = 0,
    ) -> None:
        """Open one output stream to each of `actors`, the ranks' `DPEngineCoreActor` handles, in rank order."""
        self.tokenizer = tokenizer
        self._config = config
        self._actors = list(actors)
        node: str = ray.get_runtime_context().get_node_id()
        self._ringer = Ringer()
        self._bells = [info.bell if info.node_id == node else "" for info in infos]
        """By rank; empty on other nodes, where a ring isn't heard."""
        self._tightest = min(infos, key=lambda info: info.num_kv_tokens)
        self._lock = threading.Lock()
        self._assembler = OutputAssembler(tokenizer)
        self._router = Router(len(self._actors))
        self._underway: dict[str, _Underway] = {}
        self._handles = itertools.count(client_index << HANDLE_CLIENT_SHIFT)
        self._failure: BaseException | None = None
        self.num_output_tokens = 0
        """Tokens received since the start, of all requests."""
        self._receivers = [
            threading.Thread(
                target=self._receive, args=(rank, client_index), name=f"raycore-outputs-dp{rank}", daemon=True
            )
            for rank in range(len(self._actors))
        ]
        for receiver in self._receivers:
            receiver.start()

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
    ) -> list[str]:
        """Check requests, route them, and hand them to their ranks, one message a rank.

        Args:
            sink: gets an update for each step of a request with `stream`, else one at its end.
            flush_interval_s: tokens may wait this long for company before they are sent here.

        Returns: the request ids, in order.

        Raises:
            InvalidRequest: naming what is wrong with which request; then none was submitted.
            EngineDeadError: the engine is gone.
        """
        vocab_size = self._config.model.spec.vocab_size
        for prompt, param in zip(prompts, params, strict=True):
            check_request(prompt, param, vocab_size, self._tightest)
        ids = list(request_ids) if request_ids is not None else [uuid.uuid4().hex for _ in prompts]
        by_rank: dict[int, list[EngineRequest]] = defaultdict(list)
        with self._lock:
            self._raise_if_failed()
            for request_id in ids:
                if request_id in self._underway:
                    raise InvalidRequest(f"request_id={request_id!r} is already under way")
            ranks = self._router.assign([prompt.token_ids for prompt in prompts])
            for i, (request_id, prompt, param, rank) in enumerate(zip(ids, prompts, params, ranks, strict=True)):
                requests = self._expand(request_id, prompt, param, flush_interval_s, priorities[i] if priorities else 0)
                handles = [request.handle for request in requests]
                self._assembler.add(request_id, prompt.text, prompt.token_ids, param, handles, stream)
                self._underway[request_id] = _Underway(sink, rank, handles)
                by_rank[rank] += requests
            for rank, requests in by_rank.items():
                self._awake(rank).submit.remote(msgspec.msgpack.encode(requests))
        return ids

    def abort(self, request_ids: Sequence[str], notify: bool = False) -> None:
        """Drop requests; those that have finished are ignored. With `notify` their sinks get a last, aborted output."""
        with self._lock:
            by_rank: dict[int, list[int]] = defaultdict(list)
            aborted: list[tuple[Sink, Update]] = []
            for request_id in request_ids:
                request = self._underway.pop(request_id, None)
                if request is None:
                    continue
                by_rank[request.dp_rank] += request.handles
                self._router.finish(request.dp_rank)
                output = self._assembler.abort(request_id)
                aborted.append((request.sink, Update(request_id, output)))
            self._send_aborts(by_rank)
        if notify:
            for sink, update in aborted:
                sink([update])

    def utility(self, method: str, args: tuple[Any, ...], timeout_s: float = UTILITY_TIMEOUT_S) -> list[Any]:
        """Call a utility on every rank. Returns the results in rank order.

        Raises: what any rank raised; EngineDeadError when one is gone.
        """
        self._raise_if_failed()
        refs = [self._awake(rank).utility.remote(method, args, {}, timeout_s) for rank in range(len(self._actors))]
        try:
            return ray.get(refs, timeout=timeout_s + 1.0)
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            self._raise_if_failed()
            raise EngineDeadError(str(error)) from error

    def fail(self, error: BaseException) -> None:
        """Have every waiting caller, and every later one, get `error`. The first one stands."""
        with self._lock:
            self._failure = self._failure or error
            failed = [
                (request.sink, Update(request_id, error=self._failure))
                for request_id, request in self._underway.items()
            ]
            for request_id in self._underway:
                self._assembler.abort(request_id)
            self._underway.clear()
        for sink, update in failed:
            sink([update])

    def close(self, reason: BaseException) -> None:
        """Fail what is under way with `reason`. The ranks' streams end when the ranks do."""
        self.fail(reason)

    # ---- receiving

    def _receive(self, rank: int, client_index: int) -> None:
        outputs = self._awake(rank).outputs.options(num_returns="streaming")
        stream = outputs.remote(client_index, bool(self._bells[rank]))
        decoder = msgspec.msgpack.Decoder(OutputBatch)
        try:
            for ref in stream:
                self._deliver(rank, decoder.decode(ray.get(ref)))
        except RayError as error:
            self._on_stream_lost(rank, error)

    def _on_stream_lost(self, rank: int, error: Exception) -> None:
        """The rank's run ref says why it died, a moment before or after its stream breaks: prefer that."""
        deadline_s = time.monotonic() + CAUSE_GRACE_S
        while self._failure is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self.fail(EngineDeadError(f"{error}\nthe output stream of rank dp{rank} broke"))

    def _deliver(self, rank: int, batch: OutputBatch) -> None:
        by_sink: dict[Sink, list[Update]] = defaultdict(list)
        with self._lock:
            self._router.observe(rank, batch.load)
            self.num_output_tokens += len(batch.token_ids) // 4
            step = self._assembler.process(batch)
            for request_id, output, error in step.updates:
                request = self._underway.get(request_id)
                if request is None:
                    continue
                if error is not None or (output is not None and output.finished):
                    del self._underway[request_id]
                    self._router.finish(rank)
                by_sink[request.sink].append(Update(request_id, output, error))
            self._send_aborts({rank: step.aborts})
        for sink, updates in by_sink.items():
            sink(updates)

    # ---- details

    def _expand(
        self, request_id: str, prompt: ParsedPrompt, params: SamplingParams, flush_interval_s: float, priority: int
    ) -> list[EngineRequest]:
        """One engine request for each of `params.n` sequences, which differ in their seeds."""
        handles = [next(self._handles) for _ in range(params.n)]
        bad_words = self.tokenizer.bad_words_token_ids(params.bad_words) if params.bad_words else []
        return [
            EngineRequest(
                handle=handle,
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                params=params,
                seed=self._seed(params, index, handle),
                eos_token_ids=self._config.model.spec.eos_token_ids,
                bad_words_token_ids=bad_words,
                priority=priority,
                flush_interval_s=flush_interval_s,
            )
            for index, handle in enumerate(handles)
        ]

    def _seed(self, params: SamplingParams, index: int, handle: int) -> int:
        if params.seed is not None:
            return (params.seed + index) & MAX_SEED
        # an odd multiplier spreads consecutive handles over all seeds, so that none is a neighbour's
        return (self._config.model.seed + 0x9E3779B97F4A7C15 * (handle + 1)) & MAX_SEED

    def _awake(self, rank: int) -> Any:
        """The rank's actor, about to be called."""
        if self._bells[rank]:
            self._ringer.ring(self._bells[rank])
        return self._actors[rank]

    def _send_aborts(self, by_rank: dict[int, list[int]]) -> None:
        for rank, handles in by_rank.items():
            if handles and self._failure is None:
                self._awake(rank).abort.remote(handles)

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure
