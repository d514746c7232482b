"""A deployment in virtual time: ranks, the client that divides requests among them, failures and autoscaling.

The client's table of requests and its router are the product's. There is one client, as with one API server. Messages
take no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from raycore.cache_layout import KVCacheConfig
from raycore.client.ask import Ask, CheckedAsk
from raycore.client.inputs import ParsedPrompt
from raycore.client.output_processor import ProcessedOutputs
from raycore.client.recorder import Recorder
from raycore.client.request_table import RequestTable, Submissions
from raycore.client.updates import Update
from raycore.config import EngineConfig
from raycore.errors import EngineDeadError
from raycore.messages import NO_LOAD, EngineRequest, LoadView, OutputBatch
from raycore.outputs import RequestOutput
from raycore.sampling_params import SamplingParams
from raycore.scheduler.outputs import StepOutputs
from raycore.simulation.autoscaling import TICK_S, Autoscaling, AutoscalingOptions
from raycore.simulation.outcome import KilledRank, Outcome, RequestOutcome
from raycore.simulation.rank import SimulatedRank, Told
from raycore.simulation.step_times import StepTimes
from raycore.simulation.traces import BLOCK_TOKENS, TracedRequest
from raycore.text.no_tokenizer import NoTokenizer

_OWN = 1 << 48
"""Numbers of blocks that only one request has begin here."""


class Kill(NamedTuple):
    """A failure of a rank."""

    rank: int
    at_s: float


@dataclass(frozen=True)
class Plan:
    """What is simulated, besides the engine's configuration."""

    cache: KVCacheConfig
    times: StepTimes
    kills: Sequence[Kill] = ()
    detection_s: float = 0.5
    """From a rank's death until its requests continue elsewhere."""
    replacement_s: float = 30.0
    """From a rank's death until its replacement serves."""
    autoscaling: AutoscalingOptions | None = None
    """None: there are `data_parallel_size` ranks."""
    start_s: float = 60.0
    """How long the start of another replica takes, with autoscaling."""
    takes_runs: bool = True
    """Whether steps in which nothing changes are taken at once. The result is the same."""


_Event = tuple[float, int, int, Callable[[float], None]]
"""When it comes, its turn among those at the same time, its number, and what it does."""
_OTHER, _STEP, _WAKE = 0, 1, 2


@dataclass(slots=True)
class _Serving:
    """A rank, and what is scheduled for it."""

    rank: SimulatedRank
    since_s: float
    load: LoadView = NO_LOAD
    """What the rank has said last of its load."""
    untold: list[tuple[StepOutputs, float]] = field(default_factory=list[tuple[StepOutputs, float]])
    """Outputs, and when they came, that the client takes in with later ones."""
    event: int = -1
    """The number of the event in which it goes on. Others of it are void."""
    is_awake: bool = False
    """Whether it is going to look for new requests at this time."""
    is_leaving: bool = False
    is_dead: bool = False


class _NoCounts(Recorder):
    """Counts nothing: nobody asks for metrics."""

    def take(self, dp_rank: int, before: LoadView, load: LoadView, step: ProcessedOutputs) -> None:
        """See `Recorder`."""

    def drop(self, dp_rank: int | None, seq_ids: list[int], output: RequestOutput, reason: str) -> None:
        """See `Recorder`."""


class Deployment:
    """Ranks that serve a trace."""

    def __init__(self, config: EngineConfig, plan: Plan) -> None:
        self._config, self._plan = config, plan
        self._now_s = 0.0
        self._table = RequestTable(
            config.model,
            NoTokenizer(config.model.spec.vocab_size),
            0,
            config.recovery.max_request_replays,
            clock=lambda: self._now_s,
            make_recorder=_NoCounts,
        )
        self._events: list[_Event] = []
        self._num_events = 0
        self._ranks: dict[int, _Serving] = {}
        self._outcome = Outcome()
        self._stalled: dict[int, KilledRank] = {}
        """By seq_id: the losses because of which sequences have moved, until they get their next token."""
        self._scaling: Autoscaling | None = None
        if plan.autoscaling is not None:
            self._scaling = Autoscaling(plan.autoscaling, config.scheduler.max_num_seqs)
        self._target = config.parallel.data_parallel_size if self._scaling is None else self._scaling.num_at_first
        self._num_starting = 0
        self._next_rank = 0
        self._params: dict[int, SamplingParams] = {}

    def run(self, trace: Sequence[TracedRequest]) -> Outcome:
        """Serve all requests of a trace, and return what has become of them."""
        for _ in range(self._target):
            self._add_rank(0.0)
        for kill in self._plan.kills:
            self._at(kill.at_s, _OTHER, partial(self._kill, kill.rank))
        if self._scaling is not None:
            self._at(TICK_S, _OTHER, self._scale)
        prompts = Prompts(self._config.model.spec.vocab_size)
        for index, request in enumerate(trace):
            self._run_events(request.arrival_s)
            self._now_s = request.arrival_s
            self._add(index, request, prompts)
        self._run_events(float("inf"))
        assert not len(self._table), "every request has ended"
        outcome = self._outcome
        happened = {(loss.rank, loss.at_s) for loss in outcome.losses}
        outcome.losses += [KilledRank(*kill, did_happen=False) for kill in self._plan.kills if kill not in happened]
        outcome.num_output_tokens = self._table.num_output_tokens
        for number in list(self._ranks):
            self._retire(number, outcome.last_s)
        return outcome

    # ---- events

    def _at(self, time_s: float, turn: int, action: Callable[[float], None]) -> int:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, turn, self._num_events, action))
        return self._num_events

    def _run_events(self, until_s: float) -> None:
        """Run what comes before a time."""
        while self._events and self._events[0][0] < until_s:
            if until_s == float("inf") and not len(self._table):
                return  # what is left changes nothing
            time_s, _, _, action = heapq.heappop(self._events)
            self._now_s = time_s
            action(time_s)

    def _schedule(self, number: int, serving: _Serving) -> None:
        """See to it that the rank goes on at its next time."""
        next_s = serving.rank.next_s
        serving.event = -1
        if next_s is not None:
            serving.event = self._num_events + 1
            self._at(next_s, _STEP, partial(self._go_on, number, serving, serving.event))

    def _go_on(self, number: int, serving: _Serving, event: int, now_s: float) -> None:
        if serving.event != event or serving.is_dead:
            return
        self._take(number, serving, serving.rank.go_on(now_s))
        self._schedule(number, serving)
        if serving.is_leaving and serving.rank.next_s is None and not serving.rank.scheduler.has_work():
            self._retire(number, now_s)

    def _wake(self, number: int, serving: _Serving, now_s: float) -> None:
        serving.is_awake = False
        if not serving.is_dead:
            serving.rank.wake(now_s)
            self._schedule(number, serving)

    # ---- requests

    def _add(self, index: int, request: TracedRequest, prompts: Prompts) -> None:
        params = self._params.get(request.num_output)
        if params is None:
            params = SamplingParams(max_tokens=request.num_output, temperature=0.0, ignore_eos=True, detokenize=False)
            self._params[request.num_output] = params
        request_id = str(index)
        self._outcome.requests[index] = RequestOutcome(request.arrival_s, request.num_prompt)
        ask = Ask(ParsedPrompt(None, prompts.tokens(index, request)), params, request_id)
        self._table.add(CheckedAsk(ask, request_id, ask.priority, ask.data_parallel_rank, params, []), _no_sink)
        self._send(self._table.dispatch([request_id]))

    def _send(self, submissions: Submissions, loss: KilledRank | None = None) -> None:
        """Send requests to their ranks. `loss`: because of which they move."""
        for number, requests in submissions.items():
            if loss is not None:
                self._note_moved(loss, requests)
            serving = self._ranks.get(number)
            if serving is None or serving.is_dead:
                continue  # nobody knows yet that it is dead
            self._take(number, serving, serving.rank.settle(self._now_s))
            self._take(number, serving, serving.rank.submit(requests, self._now_s))
            if not serving.is_awake:
                serving.is_awake = True
                # at the same time, but after all requests of that time
                self._at(self._now_s, _WAKE, partial(self._wake, number, serving))

    def _take(self, number: int, serving: _Serving, told: Told | None) -> None:
        """Take in what a rank tells. The client gets it once that makes a difference, because that costs time."""
        if told is None:
            return
        serving.load = told.load
        serving.untold += told.steps
        # requests that end or wait change where the next one goes
        is_news = told.load.num_waiting != serving.rank.told_load.num_waiting
        if is_news or self._stalled or any(outputs.finished for outputs, _ in told.steps):
            self._tell(number, serving)

    def _tell(self, number: int, serving: _Serving) -> None:
        """Have the client take in what a rank has told."""
        if not serving.untold:
            return
        steps, serving.untold = serving.untold, []
        now_s, self._now_s = self._now_s, steps[-1][1]
        batch = StepOutputs.merge(steps, self._now_s)
        batch.load = serving.load
        if self._stalled:
            self._note_next_tokens(batch)
        self._outcome.note_load(serving.rank.told_load, batch.load)
        by_sink, _ = self._table.take(number, serving.rank.told_load, batch)
        serving.rank.told_load = batch.load
        for updates in by_sink.values():
            for update in updates:
                self._end(update)
        self._now_s = now_s

    def _end(self, update: Update) -> None:
        outcome = self._outcome.requests[int(update.request_id)]
        if update.output is None:
            outcome.error = str(update.error)
            return
        metrics = update.output.metrics
        assert metrics is not None
        outcome.first_token_s, outcome.last_token_s = metrics.first_token_s, metrics.last_token_s
        outcome.queue_s = metrics.queue_s
        outcome.num_output = metrics.num_generation_tokens
        outcome.num_cached = update.output.num_cached_tokens or 0

    # ---- ranks

    def _add_rank(self, now_s: float, number: int | None = None, *, start_s: float = 0.0) -> None:
        """Let a rank serve. `start_s`: how long its start has taken."""
        if number is None:
            number, self._next_rank = self._next_rank, self._next_rank + 1
        plan = self._plan
        rank = SimulatedRank(self._config, plan.cache, plan.times, takes_runs=plan.takes_runs)
        self._ranks[number] = _Serving(rank, now_s - start_s)
        self._outcome.note_ranks(now_s, self._num_serving)
        self._send(self._table.add_rank(number))

    @property
    def _num_serving(self) -> int:
        return sum(not (serving.is_dead or serving.is_leaving) for serving in self._ranks.values())

    def _retire(self, number: int, now_s: float) -> None:
        serving = self._ranks.pop(number)
        self._outcome.note_rank(serving.rank, now_s - serving.since_s)

    def _kill(self, number: int, now_s: float) -> None:
        serving = self._ranks.get(number)
        if serving is None or serving.is_dead:
            self._outcome.losses.append(KilledRank(number, now_s, did_happen=False))
            return
        self._take(number, serving, serving.rank.settle(now_s))
        self._tell(number, serving)
        serving.is_dead = True
        loss = KilledRank(number, now_s)
        self._outcome.losses.append(loss)
        self._outcome.note_ranks(now_s, self._num_serving)
        self._at(now_s + self._plan.detection_s, _OTHER, partial(self._lose, number, loss))
        self._at(now_s + self._plan.replacement_s, _OTHER, partial(self._replace, number))

    def _lose(self, number: int, loss: KilledRank, now_s: float) -> None:
        """Let the client know that a rank has died."""
        index = len(self._outcome.losses)
        self._table.close_ranks([number])
        loss.num_moved = len(self._table.by_rank.on([number]))
        self._send(self._table.lose_ranks([number], index), loss)
        for _, update in self._table.explain_loss(index, EngineDeadError(f"rank {number} was killed")):
            loss.num_moved -= 1
            self._end(update)
        self._retire(number, loss.at_s)

    def _replace(self, number: int, now_s: float) -> None:
        if number in self._ranks:  # it isn't known as dead yet
            self._at(now_s + self._plan.detection_s, _OTHER, partial(self._replace, number))
        else:
            self._add_rank(now_s, number, start_s=self._plan.replacement_s)

    def _note_moved(self, loss: KilledRank, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            loss.num_tokens_again += len(request.prompt_token_ids) + len(request.output_token_ids)
            self._stalled[request.seq_id] = loss

    def _note_next_tokens(self, batch: OutputBatch) -> None:
        for seq_id in self._stalled.keys() & set(np.frombuffer(batch.seq_ids, np.int64).tolist()):
            loss = self._stalled.pop(seq_id)
            loss.stalls_s.append(self._now_s - loss.at_s)

    # ---- autoscaling

    def _scale(self, now_s: float) -> None:
        assert self._scaling is not None
        for number, serving in self._ranks.items():
            self._tell(number, serving)
        self._scaling.report(now_s, len(self._table), self._table.num_queued_tokens)
        target = self._scaling.decide(now_s, self._num_serving, self._target)
        present = self._num_serving + self._num_starting
        self._target = target
        for _ in range(target - present):
            self._num_starting += 1
            self._at(now_s + self._plan.start_s, _OTHER, self._join)
        if target < present:
            self._leave(present - target, now_s)
        self._at(now_s + TICK_S, _OTHER, self._scale)

    def _join(self, now_s: float) -> None:
        self._num_starting -= 1
        if self._num_serving + self._num_starting < self._target:
            self._add_rank(now_s, start_s=self._plan.start_s)

    def _leave(self, count: int, now_s: float) -> None:
        """Let the ranks with the fewest requests finish them, and end."""
        loads: Mapping[int, int] = self._table.by_rank.counts()
        serving = [number for number, each in self._ranks.items() if not (each.is_dead or each.is_leaving)]
        for number in sorted(serving, key=lambda each: loads.get(each, 0))[: min(count, len(serving) - 1)]:
            self._table.close_ranks([number], for_good=True)
            self._ranks[number].is_leaving = True
            if not self._ranks[number].rank.scheduler.has_work():
                self._retire(number, now_s)
        self._outcome.note_ranks(now_s, self._num_serving)


def _no_sink(updates: list[Update]) -> None:
    """Stands for a caller."""


class Prompts:
    """Makes the tokens of a trace's prompts: equal where the trace says so, and different elsewhere."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: at least 2."""
        self._vocab_size = vocab_size
        self._filling = [token % vocab_size for token in range(BLOCK_TOKENS)]

    def tokens(self, index: int, request: TracedRequest) -> list[int]:
        """The token ids of a prompt. `index`: the request's place in the trace."""
        tokens: list[int] = []
        for block_id in request.hash_ids or (_OWN + index,):
            tokens += self._block(block_id)
        missing = request.num_prompt - len(tokens)
        if missing > 0:
            tokens += self._filling * -(-missing // BLOCK_TOKENS)
        return tokens[: request.num_prompt]

    def _block(self, block_id: int) -> list[int]:
        """A block that begins with its number. Digests of blocks depend on all before them, so that this is enough."""
        digits = list(self._digits(block_id))
        return [*digits, *self._filling[len(digits) :]]

    def _digits(self, number: int) -> Iterator[int]:
        while True:
            yield number % self._vocab_size
            number //= self._vocab_size
            if not number:
                return
