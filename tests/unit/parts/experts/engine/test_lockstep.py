"""Loops of engines that share experts, in threads; a barrier stands for the exchange between their workers."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from configs import make_config
from fake_executor import request
from sharing_executor import Exchange, SharingExecutor
from waiting import LONG_S, eventually

from raycore.activity import RUNNING
from raycore.engine.core import EngineCore
from raycore.engine.loop import run_loop
from raycore.engine.mailbox import Mailbox, SetActivity, StartWave, Submit
from raycore.messages import OutputBatch, StepPlan, client_of, first_seq_id
from raycore.parts.experts.engine.lockstep import run_lockstep_loop
from raycore.parts.experts.engine.waves import Waves


class Group:
    """Engines and their loops. Messages between them are delayed and doubled at random."""

    def __init__(self, size: int, seed: int = 0, sync_interval: int = 1, depth: int = 1):
        exchange = Exchange(size)
        self.rng = random.Random(seed)
        self.executors = [SharingExecutor(exchange, rank, depth) for rank in range(size)]
        self.cores = [EngineCore(make_config(), executor) for executor in self.executors]
        self.mailboxes = [Mailbox() for _ in range(size)]
        self.waves = [Waves(sync_interval) for _ in range(size)]
        self.pool = ThreadPoolExecutor(2 * size)
        self.timers: list[threading.Timer] = []
        self.loops = [self.pool.submit(self._run, rank) for rank in range(size)]

    def _run(self, rank: int) -> None:
        tell = lambda wave: self._tell_peers(rank, wave)  # noqa: E731
        run_lockstep_loop(self.cores[rank], self.mailboxes[rank], self.waves[rank], tell)

    def _tell_peers(self, rank: int, wave: int) -> None:
        for peer, mailbox in enumerate(self.mailboxes):
            if peer == rank:
                continue
            for _ in range(self.rng.choice((1, 1, 2))):
                self.timers.append(threading.Timer(self.rng.random() * 2e-3, mailbox.put, [StartWave(wave)]))
                self.timers[-1].start()

    def serve(self, rank: int, seq_ids: list[int], max_tokens: int) -> None:
        """Submit and wait for the end of all; a client of its own for each call."""
        self.mailboxes[rank].put(Submit([request(seq_id, max_tokens=max_tokens) for seq_id in seq_ids]))
        missing = set(seq_ids)
        for data in self.mailboxes[rank].outputs(client_of(seq_ids[0])):
            missing -= {finished.seq_id for finished in msgspec.msgpack.decode(data, type=OutputBatch).finished}
            if not missing:
                return
        raise AssertionError(f"{missing} weren't finished")

    def wait_for_rest(self) -> None:
        eventually(lambda: not any(waves.is_running for waves in self.waves), "a wave never ended")

    def stop(self) -> None:
        for mailbox in self.mailboxes:
            mailbox.stop()
        for loop in self.loops:
            loop.result(LONG_S)
        for timer in self.timers:
            timer.cancel()
        self.pool.shutdown()


@pytest.mark.parametrize(("size", "sync_interval", "depth"), [(2, 1, 1), (3, 2, 1), (2, 1, 2), (3, 2, 3)])
def test_every_request_is_served_on_whichever_lockstep_engine_it_arrives(size, sync_interval, depth):
    group = Group(size, seed=size, sync_interval=sync_interval, depth=depth)
    rng = random.Random(size)
    client = 0
    for _ in range(40):
        served = []
        for _ in range(rng.randint(1, 3)):
            client += 1
            seq_ids = [first_seq_id(client) + i for i in range(rng.randint(1, 3))]
            served.append(group.pool.submit(group.serve, rng.randrange(size), seq_ids, rng.randint(1, 6)))
        for waiting in served:
            waiting.result(LONG_S)
    group.wait_for_rest()
    assert len({waves.num_completed for waves in group.waves}) == 1
    assert group.waves[0].num_completed >= 5
    assert {executor.most_in_flight for executor in group.executors} == {depth}
    group.stop()


def test_engines_without_requests_take_part_and_then_rest():
    group = Group(2)
    group.serve(0, [1], max_tokens=5)
    group.wait_for_rest()
    assert group.executors[0].plans
    assert not group.executors[1].plans
    # as many as the other's steps, and the one that found the end
    num_steps = len(group.executors[0].plans) + group.executors[0].num_dummies
    assert group.executors[1].num_dummies == num_steps
    time.sleep(0.02)
    assert group.executors[1].num_dummies == num_steps, "at rest there are no steps"
    group.stop()


@pytest.mark.parametrize("depth", [1, 2])
def test_engines_that_stop_in_a_wave_leave_together(depth):
    group = Group(2, depth=depth)
    group.mailboxes[0].put(Submit([request(1, max_tokens=200)]))
    eventually(lambda: group.executors[1].num_dummies)
    group.stop()
    assert not any(waves.is_running for waves in group.waves), "one has left the others after its deadline"


def test_an_engine_whose_peers_are_gone_leaves_in_time():
    executor = SharingExecutor(Exchange(2), 0)
    config = make_config()
    config = msgspec.structs.replace(config, executor=msgspec.structs.replace(config.executor, shutdown_timeout_s=0.05))
    core, mailbox, waves = EngineCore(config, executor), Mailbox(), Waves()
    waves.start_wave(1)
    mailbox.stop()
    run_lockstep_loop(core, mailbox, waves, lambda wave: None)
    assert waves.is_running


def test_an_engine_ignores_waves_of_a_group_that_it_has_left():
    core, mailbox = EngineCore(make_config(), SharingExecutor(Exchange(1), 0)), Mailbox()
    mailbox.put(StartWave(7))
    mailbox.stop()
    run_loop(core, mailbox)
    waves = Waves(generation=1)
    mailbox.put(StartWave(7))
    run_lockstep_loop(core, mailbox, waves, lambda wave: None)
    assert not waves.is_running
    mailbox.put(StartWave(1, generation=2))
    with pytest.raises(AssertionError, match="hasn't joined"):
        run_lockstep_loop(core, mailbox, waves, lambda wave: None)


def test_a_lockstep_step_tells_whether_any_engine_was_busy():
    core = EngineCore(make_config(), SharingExecutor(Exchange(1), 0))
    core.submit(request(1, max_tokens=1))
    outputs, is_anyone_busy = core.lockstep_step()
    assert is_anyone_busy
    assert outputs is not None
    assert [finished.seq_id for finished in outputs.finished] == [1]
    assert core.executor.plans[0].step != StepPlan(-1).step
    while core.executor.num_dummies == 0:  # it may have something to tell the workers yet
        outputs, is_anyone_busy = core.lockstep_step()
        assert outputs is None or not len(outputs.token_ids)
    assert not is_anyone_busy


@pytest.mark.parametrize("depth", [1, 2])
def test_engines_pause_together_at_the_end_of_a_wave(depth):
    group = Group(3, seed=5, depth=depth)
    served = [
        group.pool.submit(group.serve, client % 2, [first_seq_id(client), first_seq_id(client) + 1], 40 + client)
        for client in range(1, 3)
    ]
    for number in range(25):
        changes = [SetActivity(RUNNING.paused(), clear_cache=number % 2 == 0) for _ in group.mailboxes]
        for mailbox, change in zip(group.mailboxes, changes, strict=True):
            time.sleep(group.rng.random() * 2e-3)
            mailbox.put(change)
        for change in changes:
            change.reply.result(LONG_S)
        counts = [len(executor.plans) for executor in group.executors]
        group.wait_for_rest()
        time.sleep(2e-3)
        assert [len(executor.plans) for executor in group.executors] == counts
        changes = [SetActivity(RUNNING) for _ in group.mailboxes]
        for mailbox, change in zip(group.mailboxes, changes, strict=True):
            mailbox.put(change)
        for change in changes:
            change.reply.result(LONG_S)
    for waiting in served:
        waiting.result(LONG_S)
    group.wait_for_rest()
    group.stop()
