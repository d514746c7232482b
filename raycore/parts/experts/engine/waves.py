"""Decides when engines that share experts run steps together, and when they rest.

Each engine has its own state machine, `Waves`. During a *wave*, every engine runs every step, even without requests.
Between waves, all engines rest. In each step, the engines' workers exchange numbers of tokens, so every engine learns
whether any engine had a token to compute. If none had, the wave ends, on all engines at the same step. (With a
`sync_interval`, a wave can only end after a multiple of that many steps.)

Several steps may be in flight, as many on every engine. When a step in which no engine had a token ends, later ones
have begun. So no engine begins another, and the wave ends with the last of those in flight. If an engine has a token in
one of them, the wave goes on. All engines decide this from the same steps, so each begins the same number of steps.

Waves are numbered from 1. A resting engine that gets a request starts the next wave and tells the other engines. Such a
message may arrive late, twice, or after the wave is over. So each engine remembers only two numbers: the latest wave
that any engine has started, and how many waves it has completed itself. While the first number is greater, the engine
runs steps. If another engine sees the end of a wave earlier and has already started the next wave, this engine
continues with that next wave without a rest.
"""

from __future__ import annotations


class Waves:
    """One engine's knowledge of the waves of one group. All engines start at the same time, before the first wave."""

    def __init__(self, sync_interval: int = 1, generation: int = 0) -> None:
        """
        Args:
            sync_interval: a wave can end only after a multiple of this many steps.
            generation: the number of the group that these engines are.
        """
        self.generation = generation
        self.num_completed = 0
        self._latest_started = 0
        self._sync_interval = sync_interval
        self._num_steps = 0
        self._is_ending = False

    @property
    def is_running(self) -> bool:
        """Whether a wave is running. During a wave, this engine must run steps, with or without requests."""
        return self._latest_started > self.num_completed

    @property
    def may_start(self) -> bool:
        """Whether this engine must start another step. If not, it finishes those in flight."""
        return self.is_running and not self._is_ending

    def has_work(self) -> int | None:
        """Note that this engine has requests. If no wave is running, this starts the next wave.

        Returns the number of the started wave, for the caller to tell the other engines; None if a wave was running.
        """
        if self.is_running:
            return None
        self._latest_started = self.num_completed + 1
        return self._latest_started

    def start_wave(self, wave: int) -> None:
        """Note that another engine has started `wave`. No effect if this engine already knows of that wave."""
        assert wave <= self.num_completed + 2, f"wave {wave} can't begin: {self.num_completed} are completed here"
        self._latest_started = max(self._latest_started, wave)

    def step_done(self, is_anyone_busy: bool, num_in_flight: int = 0) -> None:
        """Note that a step has ended.

        Args:
            is_anyone_busy: whether any engine had a token to compute in that step.
            num_in_flight: how many steps of this engine have begun and not ended.
        """
        assert self.is_running, "engines at rest run no steps"
        self._num_steps += 1
        if is_anyone_busy:
            self._is_ending = False
        elif self._num_steps % self._sync_interval == 0:
            self._is_ending = True
        if self._is_ending and not num_in_flight:
            self.num_completed += 1
            self._num_steps, self._is_ending = 0, False
