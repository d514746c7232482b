"""A run of one rank, or of several that share experts, and what is judged when all is over.

Callers, operators and clients are threads.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from raycore.system import threading, time
from simulation import mistakes
from simulation.engine import judge, options
from simulation.engine.client import Client, Record
from simulation.engine.operators import Operators
from simulation.engine.options import CHECKPOINT
from simulation.engine.rank import WAIT_S, Group
from simulation.engine.requests import Requests
from simulation.engine.weights import WeightHistory
from simulation.worker.steps import too_many_drafts
from simulation.world.kernel import Deadlock, OutOfTime, World

_MAX_CHANGES = 400_000
_SHARE_WITH_MASKS = 0.4


@dataclass
class Outcome:
    """What a seed has shown."""

    seed: int
    digest: str = ""
    problems: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    num_changes: int = 0
    story: list[str] = field(default_factory=list)


def run(seed: int) -> Outcome:
    """Run the scenario of a seed."""
    world = World(seed, last_s=10 * WAIT_S, max_changes=_MAX_CHANGES)
    outcome = Outcome(seed)
    try:
        takes_masks = world.generator("masks").random() < _SHARE_WITH_MASKS
        world.run(lambda: Scenario(world.generator("scenario"), takes_masks=takes_masks).run(outcome))
    except (Deadlock, OutOfTime) as error:
        outcome.problems.append(f"{type(error).__name__}: {error}")
    outcome.problems += [f"{thread} raised {error!r}" for thread, error in world.failures]
    outcome.problems += mistakes.of(world)
    outcome.problems += too_many_drafts(world)
    outcome.digest, outcome.num_changes = world.digest, world.num_changes
    outcome.story = [f"{now_s:10.4f} {who}: {what}" for now_s, who, what in world.story]
    return outcome


class Scenario:
    """See the module."""

    def __init__(self, draw: random.Random, *, takes_masks: bool) -> None:
        """`takes_masks`: whether workers are given masks, instead of following constraints themselves."""
        self._draw = draw
        self._options = options.drawn(draw)
        if takes_masks:
            self._options = options.with_masks(self._options)
        self._group = Group(self._options.config)
        self._weights = WeightHistory(CHECKPOINT)
        self._requests = Requests(self._options, draw)
        self._operators = Operators(self._group, self._weights, draw)
        num_clients = draw.choice([1, 1, 2])
        self._clients = [Client(rank, index) for rank in self._group.ranks for index in range(1, 1 + num_clients)]
        self._mean_pause_s = draw.choice([0.001, 0.01, 0.05])

    def run(self, outcome: Outcome) -> None:
        draw = self._draw
        self._group.start()
        for client in self._clients:
            client.connect()
        works = [
            *[(self._call, draw.randrange(2, 8)) for _ in range(draw.randrange(1, 4))],
            (self._operators.change_something, draw.choice([0, 0, 1, 3])),
            (self._operators.ask_something, draw.choice([0, 2, 5])),
        ]
        threads = [
            threading.Thread(target=self._repeat, args=work, name=f"{work[0].__name__.strip('_')}-{index}")
            for index, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._finish(outcome)

    def _repeat(self, work, count: int) -> None:
        for _ in range(count):
            if self._group.failure is not None:
                return
            time.sleep(self._draw.expovariate(1 / self._mean_pause_s))
            work()

    def _call(self) -> None:
        """What a caller does: it submits requests, and maybe leaves them before they have ended."""
        draw, client = self._draw, self._draw.choice(self._clients)
        if client.is_gone:
            return
        records = client.submit(self._requests.some(), without_data=draw.random() < 0.5)
        fate = draw.random()
        if fate < 0.15:
            time.sleep(draw.expovariate(1 / self._mean_pause_s))
            client.abort(records)
        elif fate < 0.5:
            client.wait(records, WAIT_S)
        elif fate < 0.53:
            client.disconnect(is_gone=draw.random() < 0.5)

    def _finish(self, outcome: Outcome) -> None:
        """Wait for all requests, and judge."""
        group = self._group
        for client in self._clients:
            client.wait(list(client.records.values()), WAIT_S)
        if group.failure is None:
            group.call("load")  # aborts are behind the ranks, too
            deadline_s = time.monotonic() + WAIT_S
            while left := [each for rank in group.ranks for each in rank.leftovers()]:
                if time.monotonic() > deadline_s:
                    break
                time.sleep(1.0)
            outcome.problems += [f"when all is over, there are {each}" for each in left]
        group.stop()
        if group.failure is not None:
            outcome.problems.append(f"the loop raised {group.failure!r}")
        records: list[Record] = [record for client in self._clients for record in client.records.values()]
        outcome.num_steps, outcome.num_requests = sum(rank.num_steps for rank in group.ranks), len(records)
        outcome.num_tokens = sum(len(record.tokens) for record in records)
        outcome.problems += [problem for client in self._clients for problem in client.problems]
        for record in records:
            if group.failure is None or record.finish_reason is not None:
                outcome.problems += judge.problems(record, group.ranks[0].shape, self._weights)
