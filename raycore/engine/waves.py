"""Decides when engines that share experts run steps together, and when they rest. A pure state machine for each engine.

Such engines run in *waves*. During a wave, every engine runs every step, even without requests. Between waves, all of
them rest. All engines end a wave at the same step, because each step's exchange tells all of them whether any engine
had a token to compute.

Waves are numbered consecutively. A resting engine that gets a request starts the next wave and tells its peers. That
message may arrive late, twice, or after the wave is over. It is enough to remember the latest wave that any engine has
started: an engine runs steps while there is a started wave that it hasn't completed. If a peer saw the end of a wave
first and has already started the next one, the engine continues with that one without a rest.
"""

from __future__ import annotations


class Waves:
    """One engine's view of the waves. All engines start together, with no wave completed."""

    def __init__(self, sync_interval: int = 1) -> None:
        """`sync_interval`: in steps. A wave may only end after a multiple of this number."""
        self.num_completed = 0
        self._latest_started = 0
        self._sync_interval = sync_interval
        self._num_steps = 0

    @property
    def is_running(self) -> bool:
        """Whether a wave is running, so that this engine has to step, with requests or without."""
        return self._latest_started > self.num_completed

    def has_work(self) -> int | None:
        """Note that this engine has requests. If no wave is running, start one and return its number for the peers."""
        if self.is_running:
            return None
        self._latest_started = self.num_completed + 1
        return self._latest_started

    def start_wave(self, wave: int) -> None:
        """Note that a peer has started `wave`. No effect if that wave is running here or is over."""
        assert wave <= self.num_completed + 2, f"wave {wave} can't begin: {self.num_completed} are completed here"
        self._latest_started = max(self._latest_started, wave)

    def step_done(self, is_anyone_busy: bool) -> None:
        """Note the end of a step. `is_anyone_busy`: whether any engine had a token, from the step's first exchange."""
        assert self.is_running, "engines at rest run no steps"
        self._num_steps += 1
        if self._num_steps % self._sync_interval == 0 and not is_anyone_busy:
            self.num_completed += 1
            self._num_steps = 0
