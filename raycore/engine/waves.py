"""When engines that share experts run steps together, and when they rest: a pure state machine, one for each engine.

Such engines run in *waves*. In a wave every engine runs every step, those without requests included; between waves all
rest. A wave ends for all at the same step: each step's exchange tells all of them alike whether anyone had a token.

A wave has a number, one more than the wave before. Whoever gets a request while at rest starts the next wave and
tells its peers; what it tells them may come late, twice, or when the wave is over. It is enough to remember the
latest wave that anyone has started: an engine is in a wave as long as there is one that it hasn't completed. So an
engine whose peer is already a wave ahead, because it saw the end of the last one first, goes straight on to that.
"""

from __future__ import annotations


class Waves:
    """One engine's view of the waves. All engines begin at the same time, with no wave completed."""

    def __init__(self, sync_interval: int = 1) -> None:
        """`sync_interval`: a wave may only end after a multiple of so many of its steps."""
        self.num_completed = 0
        self._latest_started = 0
        self._sync_interval = sync_interval
        self._num_steps = 0

    @property
    def is_running(self) -> bool:
        """Whether this engine has a step to run, with requests or without."""
        return self._latest_started > self.num_completed

    def has_work(self) -> int | None:
        """There is a request here. Returns the number of the wave to tell the peers of, if it begins one."""
        if self.is_running:
            return None
        self._latest_started = self.num_completed + 1
        return self._latest_started

    def start_wave(self, wave: int) -> None:
        """A peer has started `wave`. Nothing new if that is running here or over."""
        assert wave <= self.num_completed + 2, f"wave {wave} can't begin: {self.num_completed} are completed here"
        self._latest_started = max(self._latest_started, wave)

    def step_done(self, is_anyone_busy: bool) -> None:
        """A step of the running wave is over. `is_anyone_busy` is what all engines' exchange at its beginning said."""
        assert self.is_running, "engines at rest run no steps"
        self._num_steps += 1
        if self._num_steps % self._sync_interval == 0 and not is_anyone_busy:
            self.num_completed += 1
            self._num_steps = 0
