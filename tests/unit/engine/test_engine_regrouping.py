"""Engines that share experts pause, become another group, and go on; a barrier stands for their workers."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest
from fake_executor import request
from sharing_executor import Exchange, SharingExecutor, config_of
from waiting import LONG_S

from raycore.activity import RUNNING
from raycore.config import EngineConfig
from raycore.engine.core import EngineCore
from raycore.engine.loop import run_loop
from raycore.engine.mailbox import Mailbox, PauseForRegrouping, Regroup, SetActivity, StartWave, Submit
from raycore.errors import EngineDeadError
from raycore.messages import OutputBatch, client_of, first_seq_id
from raycore.parts.experts.engine.lockstep import run_lockstep_loop
from raycore.parts.experts.engine.waves import Waves
from raycore.worker.rank import Regrouping


class MovingExecutor(SharingExecutor):
    """A fake worker that can join others: those that share the next exchange. They meet for that."""

    def __init__(self, rank: int, group: Group) -> None:
        super().__init__(group.exchanges[group.generation], rank)
        self.group = group
        self.is_new = False
        self.calls: list[str] = []

    def initialize(self, rendezvous=None, *, is_new=False):
        self.is_new = is_new

    def regroup(self, regrouping: Regrouping, config: EngineConfig) -> None:
        assert not self.in_flight
        assert config.parallel.data_parallel_size == regrouping.num_ranks
        self.max_concurrent_batches = config.max_steps_in_flight
        self.group.gates[regrouping.generation].wait(LONG_S)
        self.exchange = self.group.exchanges[regrouping.generation]

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append(getattr(method, "__name__", method))
        return []


class Engine:
    """One rank: what its actor does."""

    def __init__(self, group: Group, rank: int, num_ranks: int, num_blocks: int | None) -> None:
        self.group, self.rank = group, rank
        self.executor = MovingExecutor(rank, group)
        self.core = EngineCore(config_of(num_ranks), self.executor, num_blocks=num_blocks)
        self.mailbox = Mailbox()
        self.ended = group.pool.submit(self._run)

    def _run(self) -> None:
        try:
            while not self.mailbox.stopping:
                if self.core.is_in_lockstep:
                    waves = Waves(generation=self.core.generation)
                    tell = lambda wave, now=waves: self.group.tell_peers(self.rank, StartWave(wave, now.generation))  # noqa: E731
                    run_lockstep_loop(self.core, self.mailbox, waves, tell)
                else:
                    run_loop(self.core, self.mailbox)
        finally:
            self.mailbox.close()


class Group:
    def __init__(self, num_ranks: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = ThreadPoolExecutor(32)
        self.generation = 0
        self.exchanges = {0: Exchange(num_ranks)}
        self.gates: dict[int, threading.Barrier] = {}
        self.engines: list[Engine] = []
        self.timers: list[threading.Timer] = []
        self.engines = [Engine(self, rank, num_ranks, None) for rank in range(num_ranks)]

    def tell_peers(self, rank: int, command: StartWave) -> None:
        for engine in list(self.engines):
            if engine.rank != rank:
                self.timers.append(threading.Timer(self.rng.random() * 2e-3, engine.mailbox.put, [command]))
                self.timers[-1].start()

    def serve(self, rank: int, client: int, max_tokens: int) -> int:
        """Submit two requests and wait for their end. Returns the number of their tokens."""
        seq_ids = [first_seq_id(client), first_seq_id(client) + 1]
        mailbox = self.engines[rank].mailbox
        mailbox.put(Submit([request(seq_id, max_tokens=max_tokens) for seq_id in seq_ids]))
        missing, num_tokens = set(seq_ids), 0
        for data in mailbox.outputs(client_of(seq_ids[0])):
            batch = msgspec.msgpack.decode(data, type=OutputBatch)
            num_tokens += len(batch.token_ids) // 4
            missing -= {finished.seq_id for finished in batch.finished}
            if not missing:
                return num_tokens
        raise AssertionError(f"{missing} weren't finished")

    def change(self, num_ranks: int) -> None:
        before = len(self.engines)
        num_blocks = self.engines[0].core.cache.num_blocks
        added = [Engine(self, rank, num_ranks, num_blocks) for rank in range(before, num_ranks)]
        self._ask([PauseForRegrouping() for _ in self.engines], self.engines)
        self.generation += 1
        self.exchanges[self.generation] = Exchange(num_ranks)
        self.gates[self.generation] = threading.Barrier(max(before, num_ranks))
        regrouping = Regrouping(before, num_ranks, "tcp://nowhere:1", self.generation)
        involved = [*self.engines, *added]
        self.engines = involved[:num_ranks]
        self._ask([Regroup(regrouping, stays=rank < num_ranks) for rank in range(len(involved))], involved)
        for engine in involved[num_ranks:]:
            engine.mailbox.stop()
            engine.ended.result(LONG_S)

    def _ask(self, commands: list[PauseForRegrouping] | list[Regroup], engines: list[Engine]) -> None:
        for engine, command in zip(engines, commands, strict=True):
            threading.Event().wait(self.rng.random() * 2e-3)
            engine.mailbox.put(command)
        for command in commands:
            command.reply.result(LONG_S)

    def stop(self) -> None:
        for engine in self.engines:
            engine.mailbox.stop()
        for engine in self.engines:
            engine.ended.result(LONG_S)
        for timer in self.timers:
            timer.cancel()
        self.pool.shutdown()


@pytest.mark.parametrize("seed", range(3))
def test_requests_continue_through_changes_of_the_expert_group(seed: int):
    group = Group(2, seed)
    served: dict[int, Future[int]] = {}
    for client, num_ranks in enumerate([3, 2, 1, 2, 4, 1], start=1):
        # rank 0 stays, and so do its requests
        served[client] = group.pool.submit(group.serve, 0, client, 100 + client)
        if num_ranks > 2:
            group.serve(1, 10 + client, 5)
        group.change(num_ranks)
        assert {engine.core.is_in_lockstep for engine in group.engines} == {num_ranks > 1}
    for client, waiting in served.items():
        assert waiting.result(LONG_S) == 2 * (100 + client)
    assert not group.engines[0].executor.is_new
    group.stop()


def test_new_ranks_allocate_their_cache_and_warm_up_with_the_others():
    group = Group(1, seed=0)
    group.change(3)
    old, *new = (engine.executor for engine in group.engines)
    assert old.calls == ["accompany_warm_up"]
    assert all(executor.is_new for executor in new)
    assert all(executor.memory_calls == [("initialize_cache", old.num_blocks)] for executor in new)
    group.stop()


def test_a_paused_engine_stays_paused_through_a_regrouping():
    group = Group(2, seed=1)
    pauses = [SetActivity(RUNNING.paused()) for _ in group.engines]
    for engine, pause in zip(group.engines, pauses, strict=True):
        engine.mailbox.put(pause)
        pause.reply.result(LONG_S)
    group.change(1)
    (engine,) = group.engines
    engine.mailbox.put(Submit([request(1, max_tokens=3)]))
    group.change(2)
    assert not any(engine.executor.plans for engine in group.engines)
    for each in group.engines:
        each.mailbox.put(SetActivity(RUNNING))
    assert group.serve(1, 5, 4) == 8
    group.stop()


def test_a_waiting_regrouping_fails_when_the_engine_stops():
    mailbox, pause = Mailbox(), PauseForRegrouping()
    mailbox.put(pause)
    mailbox.close()
    with pytest.raises(EngineDeadError, match="stopped"):
        pause.reply.result(0)
