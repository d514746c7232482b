"""Engines that share experts start, run and leave waves together, whatever order their messages come in."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycore.parts.experts.engine.waves import Waves


def test_a_wave_runs_from_the_first_work_to_the_step_without_work():
    waves = Waves()
    assert not waves.is_running
    assert waves.has_work() == 1
    assert waves.is_running
    assert waves.has_work() is None, "it is in the wave already"
    waves.step_done(True)
    waves.step_done(False)
    assert (waves.is_running, waves.num_completed) == (False, 1)
    assert waves.has_work() == 2


def test_a_wave_started_by_a_peer_is_joined_once():
    waves = Waves()
    waves.start_wave(1)
    waves.start_wave(1)
    assert waves.is_running
    assert waves.has_work() is None
    waves.step_done(False)
    waves.start_wave(1)
    assert not waves.is_running, "that one is over"


def test_a_peer_may_be_a_wave_ahead():
    waves = Waves()
    waves.start_wave(1)
    waves.start_wave(2)
    waves.step_done(False)
    assert (waves.is_running, waves.num_completed) == (True, 1)
    waves.step_done(False)
    assert not waves.is_running
    with pytest.raises(AssertionError, match="wave 5"):
        waves.start_wave(5)


def test_the_end_of_a_wave_is_checked_every_sync_interval_steps():
    waves = Waves(sync_interval=3)
    for _ in range(2):
        waves.start_wave(waves.num_completed + 1)
        for is_anyone_busy in (False, False, True, False, False, False):
            assert waves.is_running
            waves.step_done(is_anyone_busy)
        assert not waves.is_running


class Engine:
    """One simulated engine: `work` steps are left to do for its requests."""

    def __init__(self, sync_interval: int):
        self.waves = Waves(sync_interval)
        self.work = 0
        self.inbox: deque[int] = deque()
        self.in_step: bool | None = None
        """Whether it came to the present exchange with tokens; None: it hasn't come yet."""


class Simulation:
    """Engines whose loops, messages and arrivals interleave at random. A step is over once all have come to it."""

    def __init__(self, num_engines: int, sync_interval: int, rng: random.Random):
        self.engines = [Engine(sync_interval) for _ in range(num_engines)]
        self.rng = rng
        self.delayed: list[tuple[Engine, int]] = []
        self.results: dict[Engine, bool] = {}
        """Of engines that haven't seen the result of the exchange yet."""

    def arrive(self) -> None:
        self.rng.choice(self.engines).work += self.rng.randint(1, 4)

    def deliver(self) -> None:
        """Some message, not in the order of sending; sometimes it comes again later."""
        if self.delayed:
            index = self.rng.randrange(len(self.delayed))
            engine, wave = self.delayed[index]
            engine.inbox.append(wave)
            if self.rng.random() < 0.7:
                self.delayed.pop(index)

    def turn(self, engine: Engine) -> bool:
        """One round of an engine's loop, up to its exchange. Whether it could do anything."""
        if engine in self.results:
            engine.waves.step_done(self.results.pop(engine))
            engine.in_step = None
            return True
        if engine.in_step is not None:
            return False  # it waits for the others
        while engine.inbox:
            engine.waves.start_wave(engine.inbox.popleft())
        if engine.work:
            wave = engine.waves.has_work()
            if wave is not None:
                self.delayed += [(peer, wave) for peer in self.engines if peer is not engine]
        if not engine.waves.is_running:
            return False
        engine.in_step = engine.work > 0
        engine.work = max(0, engine.work - 1)
        if all(other.in_step is not None and other not in self.results for other in self.engines):
            is_anyone_busy = any(other.in_step for other in self.engines)
            self.results = dict.fromkeys(self.engines, is_anyone_busy)
        return True

    def settle(self) -> None:
        """Without further arrivals, everything is served and all come to rest."""
        for _ in range(10_000):
            moved = [self.turn(engine) for engine in self.engines]
            if not any(moved):
                if not self.delayed:
                    break
                # every message comes at last
                engine, wave = self.delayed.pop()
                engine.inbox.append(wave)
        assert not any(engine.work or engine.waves.is_running or engine.inbox for engine in self.engines)
        assert len({engine.waves.num_completed for engine in self.engines}) == 1


@pytest.mark.parametrize("sync_interval", [1, 3])
@pytest.mark.parametrize("num_engines", [2, 3, 4])
def test_hundreds_of_random_waves_run_without_a_deadlock(num_engines, sync_interval):
    rng = random.Random(num_engines)
    simulation = Simulation(num_engines, sync_interval, rng)
    while simulation.engines[0].waves.num_completed < 250:
        for _ in range(rng.randint(1, 40)):
            chance = rng.random()
            if chance < 0.05:
                simulation.arrive()
            elif chance < 0.3:
                simulation.deliver()
            else:
                simulation.turn(rng.choice(simulation.engines))
        if rng.random() < 0.3:
            simulation.settle()
            simulation.arrive()
    simulation.settle()


@settings(max_examples=40)
@given(
    st.integers(2, 4), st.integers(1, 3), st.lists(st.integers(0, 6), max_size=60), st.randoms(use_true_random=False)
)
def test_every_interleaving_of_wave_messages_comes_to_rest(num_engines, sync_interval, actions, rng):
    simulation = Simulation(num_engines, sync_interval, rng)
    for action in actions:
        if action == 0:
            simulation.arrive()
        elif action == 1:
            simulation.deliver()
        else:
            simulation.turn(simulation.engines[action % num_engines])
    simulation.settle()
