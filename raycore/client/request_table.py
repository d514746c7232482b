"""The requests of one client that aren't finished: which rank has which, and what another rank needs to go on with one.

Bookkeeping alone: methods return what has to be sent to ranks and callers. Not thread-safe; knows no Ray.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from raycore.client.inputs import ParsedPrompt
from raycore.client.output_processor import OutputProcessor
from raycore.client.recorder import Recorder
from raycore.client.routing import Router
from raycore.client.updates import Sink, Update
from raycore.config import ModelConfig
from raycore.errors import EngineDeadError, InvalidRequest, RequestFailed
from raycore.messages import EngineRequest, LoadView, OutputBatch, first_seq_id
from raycore.metrics.counts import RankCounts
from raycore.sampling_params import MAX_SEED, SamplingParams, checked_int
from raycore.text.tokenizer import Tokenizer

Submissions = Mapping[int, Sequence[EngineRequest]]
"""By dp_rank: the sequences that the rank is to be given."""

Aborts = Mapping[int, Sequence[int]]
"""By dp_rank: the seq_ids that the rank needn't go on with."""

News = list[tuple[Sink, Update]]
"""What callers have to be told."""


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
    """The rank that has it; None while none has."""
    num_failures: int = 0
    """How many ranks failed with it."""

    @property
    def seq_ids(self) -> list[int]:
        """By which its rank knows its sequences, finished ones included."""
        return [sequence.seq_id for sequence in self.sequences]


class RequestTable:
    """See the module."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, client_index: int, max_replays: int) -> None:
        """`max_replays`: a request fails when more ranks than these have failed while they had it."""
        self.num_output_tokens = 0
        """Tokens received since the start, of all requests."""
        self.router = Router()
        self._config = config
        self._max_replays = max_replays
        self._outputs = OutputProcessor(tokenizer)
        self._recorder = Recorder(config.max_model_len)
        self._underway: dict[str, _Underway] = {}
        self._parked: dict[str, None] = {}
        """Requests without a rank, in the order in which they came."""
        self._unexplained: dict[int, list[tuple[str, _Underway, int]]] = {}
        """By the number of a loss: (request_id, request, dp_rank) of those that fail when it is explained."""
        self._dp_ranks: set[int] = set()
        """The ranks that serve, and those that have died and may be replaced."""
        self._seq_ids = itertools.count(first_seq_id(client_index))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._underway

    def __len__(self) -> int:
        return len(self._underway)

    def request_ids(self) -> list[str]:
        """Of all requests."""
        return list(self._underway)

    @property
    def num_parked(self) -> int:
        """Requests that no rank has, because there is none."""
        return len(self._parked)

    def on_ranks(self, dp_ranks: Sequence[int]) -> list[str]:
        """The requests that these ranks have."""
        return [request_id for request_id, request in self._underway.items() if request.dp_rank in dp_ranks]

    def num_on_ranks(self) -> dict[int, int]:
        """How many requests each rank has, by dp_rank; ranks without any are left out."""
        return Counter(request.dp_rank for request in self._underway.values() if request.dp_rank is not None)

    def counts(self) -> dict[int, RankCounts]:
        """What has been counted of each rank since the start, by dp_rank; ranks that have gone are among them."""
        return self._recorder.counts()

    def trace_requests(self) -> None:
        """Have the outputs of requests that come from now on say what became of them when."""
        self._outputs.is_tracing = True

    # ---- requests come and go

    def checked_rank(self, dp_rank: int) -> int:
        """`dp_rank` as a plain int. Raises InvalidRequest when the engine has no such rank."""
        rank = checked_int("data_parallel_rank", dp_rank)
        if rank not in self._dp_ranks:
            known = ", ".join(map(str, sorted(self._dp_ranks)))
            raise InvalidRequest(f"data_parallel_rank={rank} is not one of this engine's ranks: {known}")
        return rank

    def add(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        params: SamplingParams,
        sink: Sink,
        *,
        stream: bool,
        bad_words_token_ids: list[list[int]],
        flush_interval_s: float,
        priority: int,
        wanted_rank: int | None,
    ) -> None:
        """Take a request in. `dispatch()` gives it a rank."""
        seq_ids = [next(self._seq_ids) for _ in range(params.n)]
        first = EngineRequest(
            seq_id=seq_ids[0],
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            seed=self._seed(params, 0, seq_ids[0]),
            eos_token_ids=self._config.spec.eos_token_ids,
            bad_words_token_ids=bad_words_token_ids,
            priority=priority,
            flush_interval_s=flush_interval_s,
            cache_salt=prompt.cache_salt,
        )
        # The prompt's log probabilities are the same for all: only the first sequence has them made, and the others can
        # take the prompt from the prefix cache.
        later = params if params.prompt_logprobs is None else msgspec.structs.replace(params, prompt_logprobs=None)
        others = [
            msgspec.structs.replace(first, seq_id=seq_id, params=later, seed=self._seed(params, index, seq_id))
            for index, seq_id in enumerate(seq_ids[1:], start=1)
        ]
        self._underway[request_id] = _Underway(sink, [first, *others], prompt.cache_salt, wanted_rank)
        self._outputs.add(request_id, prompt.text, prompt.token_ids, params, seq_ids, stream)

    def dispatch(self, request_ids: Iterable[str]) -> Submissions:
        """Give requests to ranks, or have them wait for one."""
        submissions: dict[int, list[EngineRequest]] = defaultdict(list)
        for request_id in request_ids:
            request = self._underway[request_id]
            if not self.router.has_ranks:
                self._parked[request_id] = None
                continue
            (request.dp_rank,) = self.router.assign(
                [request.sequences[0].prompt_token_ids], cache_salt=request.cache_salt, rank=request.wanted_rank
            )
            self._parked.pop(request_id, None)
            unfinished = self._outputs.unfinished(request_id)
            submissions[request.dp_rank] += [request.sequences[index] for index in unfinished]
        return submissions

    def abort(self, request_ids: Iterable[str]) -> tuple[News, Aborts]:
        """Drop requests as far as they are under way. The news are their last outputs, for who wants them."""
        news: News = []
        aborts: dict[int, list[int]] = defaultdict(list)
        for request_id in request_ids:
            request = self._underway.get(request_id)
            if request is None:
                continue
            if request.dp_rank is not None:
                aborts[request.dp_rank] += request.seq_ids
            self._drop(request_id)
            output = self._outputs.abort(request_id)
            self._recorder.drop(request.dp_rank, request.seq_ids, output, "abort")
            news.append((request.sink, Update(request_id, output)))
        return news, aborts

    def take(self, dp_rank: int, before: LoadView, batch: OutputBatch) -> tuple[dict[Sink, list[Update]], Aborts]:
        """Take in what a rank has sent. The news come by whom they are for.

        Args:
            before: the load that the same process of the rank told before this one.
        """
        step = self._outputs.process(batch)
        self._recorder.take(dp_rank, before, batch.load, step)
        self.router.observe(dp_rank, batch.load)
        self.num_output_tokens += len(batch.token_ids) // 4
        by_sink: dict[Sink, list[Update]] = defaultdict(list)
        for update in step.updates:
            output = update.output
            request = self._underway.get(update.request_id)
            if request is None:
                continue
            if output is None or output.finished:
                self._drop(update.request_id)
            if output is not None and output.trace is not None:
                output.trace.dp_rank = dp_rank
            by_sink[request.sink].append(update)
        return by_sink, {dp_rank: step.aborts}

    def fail_all(self, error: BaseException) -> News:
        """Nothing will come of any request."""
        news: News = []
        for request_id, request in self._underway.items():
            self._recorder.drop(request.dp_rank, request.seq_ids, self._outputs.abort(request_id), "error")
            news.append((request.sink, Update(request_id, error=error)))
        self._underway.clear()
        self._parked.clear()
        self._unexplained.clear()
        return news

    # ---- ranks come and go

    def add_rank(self, dp_rank: int) -> Submissions:
        """The rank serves, and gets what has waited for one."""
        self._dp_ranks.add(dp_rank)
        self._recorder.add_rank(dp_rank)
        self.router.add(dp_rank)
        return self.dispatch(list(self._parked))

    def close_ranks(self, dp_ranks: Sequence[int], *, for_good: bool = False) -> None:
        """The ranks get no more requests. `for_good`: nor will others by the same numbers."""
        for dp_rank in dp_ranks:
            self.router.remove(dp_rank)
        if for_good:
            self._dp_ranks.difference_update(dp_ranks)

    def lose_ranks(self, dp_ranks: Sequence[int], loss: int) -> Submissions:
        """The closed ranks are gone: others go on with what they had, unless too many have failed with it.

        What goes on nowhere fails with `explain_loss()`.
        """
        failing: list[tuple[str, _Underway, int]] = []
        moving: list[str] = []
        for request_id in self.on_ranks(dp_ranks):
            request = self._underway[request_id]
            request.num_failures += 1
            if request.num_failures > self._max_replays:
                assert request.dp_rank is not None
                failing.append((request_id, request, request.dp_rank))
                request.dp_rank = None
            else:
                moving.append(request_id)
        if failing:
            self._unexplained[loss] = failing
        return self._move(moving)

    def explain_loss(self, loss: int, error: EngineDeadError) -> News:
        """Why ranks are gone: requests that have failed with them fail for that reason."""
        news: News = []
        for request_id, request, dp_rank in self._unexplained.pop(loss, []):
            if self._underway.get(request_id) is request:
                self._drop(request_id)
                self._recorder.drop(dp_rank, request.seq_ids, self._outputs.abort(request_id), "error")
                news.append((request.sink, Update(request_id, error=_request_failed(request_id, request, error))))
        return news

    def take_back(self, dp_ranks: Sequence[int]) -> tuple[Submissions, Aborts]:
        """Have other ranks go on with what the closed ranks still have."""
        left = self.on_ranks(dp_ranks)
        aborts: dict[int, list[int]] = defaultdict(list)
        for request in (self._underway[request_id] for request_id in left):
            assert request.dp_rank is not None
            aborts[request.dp_rank] += request.seq_ids
        return self._move(left), aborts

    # ---- details

    def _move(self, request_ids: Sequence[str]) -> Submissions:
        """Have other ranks go on with requests, from the tokens that their callers have."""
        for request_id in request_ids:
            request = self._underway[request_id]
            request.dp_rank = None
            for index in self._outputs.unfinished(request_id):
                old = request.sequences[index]
                # under a new seq_id, so that what the old rank may still send is recognised, and ignored
                seq_id = next(self._seq_ids)
                tokens = self._outputs.rebind(old.seq_id, seq_id)
                self._recorder.rebind(old.seq_id, seq_id)
                request.sequences[index] = msgspec.structs.replace(old, seq_id=seq_id, output_token_ids=list(tokens))
        return self.dispatch(request_ids)

    def _drop(self, request_id: str) -> None:
        request = self._underway.pop(request_id)
        self._parked.pop(request_id, None)
        if request.dp_rank is not None:
            self.router.finish(request.dp_rank)

    def _seed(self, params: SamplingParams, index: int, seq_id: int) -> int:
        if params.seed is not None:
            return (params.seed + index) & MAX_SEED
        # an odd multiplier spreads consecutive seq_ids over all seeds, so that none is a neighbour's
        return (self._config.seed + 0x9E3779B97F4A7C15 * (seq_id + 1)) & MAX_SEED


def _request_failed(request_id: str, request: _Underway, error: EngineDeadError) -> RequestFailed:
    failed = RequestFailed(
        f"request {request_id}: {request.num_failures} ranks failed while they had it, so it is not tried again. "
        f"The last failure: {error}"
    )
    failed.__cause__ = error
    return failed
