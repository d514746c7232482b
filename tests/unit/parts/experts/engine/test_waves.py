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


def test_a_wave_ends_when_no_step_in_flight_had_a_token() -> None:
    waves = Waves()
    waves.start_wave(1)
    waves.step_done(True, 2)
    assert waves.may_start
    waves.step_done(False, 2)
    assert waves.is_running
    assert not waves.may_start
    waves.step_done(True, 1)
    assert waves.may_start, "an engine had a token in a later step"
    for num_in_flight in (2, 1, 0):
        assert waves.is_running
        waves.step_done(False, num_in_flight)
    assert (waves.is_running, waves.may_start, waves.num_completed) == (False, False, 1)


class Engine:
    """One simulated engine: `work` steps are left to do for its requests."""

    def __init__(self, sync_interval: int):
        self.waves = Waves(sync_interval)
        self.work = 0
        self.inbox: deque[int] = deque()
        self.steps: list[bool] = []
        """Of all its steps, whether it had a token."""
        self.num_done = 0
        self.is_waiting = False
        """Whether it waits for the others' part in the oldest step in flight."""

    @property
    def num_in_flight(self) -> int:
        return len(self.steps) - self.num_done


class Simulation:
    """Engines whose loops, messages and arrivals interleave at random. A step is over once all have come to it."""

    def __init__(self, num_engines: int, sync_interval: int, rng: random.Random, depth: int = 1):
        self.engines = [Engine(sync_interval) for _ in range(num_engines)]
        self.rng = rng
        self.depth = depth
        self.delayed: list[tuple[Engine, int]] = []

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
        """One round of an engine's loop, up to its wait for others, or the rest. Whether it could do anything."""
        if engine.is_waiting:
            return self.finish(engine)
        while engine.inbox:
            engine.waves.start_wave(engine.inbox.popleft())
        if engine.work:
            wave = engine.waves.has_work()
            if wave is not None:
                self.delayed += [(peer, wave) for peer in self.engines if peer is not engine]
        if not engine.waves.is_running:
            return False
        if engine.waves.may_start:
            engine.steps.append(engine.work > 0)
            engine.work = max(0, engine.work - 1)
            if engine.num_in_flight < self.depth:
                return True
        engine.is_waiting = True
        return True

    def finish(self, engine: Engine) -> bool:
        number = engine.num_done
        if any(len(other.steps) <= number for other in self.engines):
            return False
        engine.num_done += 1
        engine.waves.step_done(any(other.steps[number] for other in self.engines), engine.num_in_flight)
        engine.is_waiting = False
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
        assert len({len(engine.steps) for engine in self.engines}) == 1
        assert not any(engine.num_in_flight for engine in self.engines)


@pytest.mark.parametrize("sync_interval", [1, 3])
@pytest.mark.parametrize(("num_engines", "depth"), [(2, 1), (2, 2), (3, 1), (3, 3), (4, 2)])
def test_hundreds_of_random_waves_run_without_a_deadlock(num_engines, depth, sync_interval):
    rng = random.Random(num_engines)
    simulation = Simulation(num_engines, sync_interval, rng, depth)
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
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 6), max_size=60),
    st.randoms(use_true_random=False),
)
def test_every_interleaving_of_wave_messages_comes_to_rest(num_engines, sync_interval, depth, actions, rng):
    simulation = Simulation(num_engines, sync_interval, rng, depth)
    for action in actions:
        if action == 0:
            simulation.arrive()
        elif action == 1:
            simulation.deliver()
        else:
            simulation.turn(simulation.engines[action % num_engines])
    simulation.settle()
