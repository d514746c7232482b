"""Pauses an engine, or puts it to sleep, and lets it continue, again and again."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from raycore import AsyncLLM
from raycore.activity import TAGS, PauseMode

Phase = Literal["running", "stopping", "still", "starting"]
"""What an engine does: it runs, is being interrupted, is interrupted, or is being made to run again."""
PHASES: tuple[Phase, ...] = ("running", "stopping", "still", "starting")


class Interruption(NamedTuple):
    """A kind of interruption."""

    mode: PauseMode
    level: int | None = None
    """The level of the sleep. None: a pause."""

    def __str__(self) -> str:
        return f"pause {self.mode}" if self.level is None else f"sleep {self.level}"

    async def begin(self, llm: AsyncLLM, rnd: random.Random) -> None:
        """Interrupt the engine. Half of the pauses drop the cache, as every sleep does."""
        if self.level is None:
            await llm.pause_generation(mode=self.mode, clear_cache=rnd.random() < 0.5)
        else:
            await llm.sleep(self.level, mode=self.mode)

    async def end(self, llm: AsyncLLM, rnd: random.Random) -> None:
        """Let the engine continue. Half of the sleeps end in two parts."""
        if self.level is None:
            await llm.resume_generation()
        elif rnd.random() < 0.5:
            await llm.wake_up()
        else:
            for tag in rnd.sample(TAGS, len(TAGS)):
                await llm.wake_up([tag])


PAUSES = [Interruption("keep"), Interruption("wait"), Interruption("abort")]
SLEEPS = [Interruption("keep", 1), Interruption("keep", 2)]


class Interrupter:
    """Interrupts an engine again and again, by each kind of interruption in turn. Without kinds, it never does."""

    def __init__(self, llm: AsyncLLM, kinds: Sequence[Interruption], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        """How many interruptions are over, by kind."""
        self.stills_s: list[tuple[float, float]] = []
        """When each call that interrupted the engine returned, and when the one that ended the interruption began."""
        self.phase: Phase = "running"
        self._llm = llm
        self._kinds = kinds
        self._rnd = random.Random(seed)
        self._begins = {phase: asyncio.Event() for phase in PHASES}
        """Set while the engine is in that phase."""

    @property
    def is_active(self) -> bool:
        """Whether it ever interrupts the engine."""
        return bool(self._kinds)

    @property
    def num_done(self) -> int:
        """How many interruptions are over."""
        return self.counts.total()

    def still_times(self, times_s: Iterable[float]) -> list[float]:
        """Those of `times_s` at which the engine had to be still."""
        return [time_s for time_s in times_s if any(begin < time_s < end for begin, end in self.stills_s)]

    async def wait_for(self, phase: Phase) -> None:
        """Wait until the engine is in this phase."""
        await self._begins[phase].wait()

    async def run(self, interval_s: float, still_s: float, is_over: asyncio.Event) -> None:
        """Interrupt the engine until `is_over`. When this returns, the engine runs.

        Args:
            interval_s: the mean time from one interruption to the next, in seconds.
            still_s: the mean time of an interruption.
        """
        while self.is_active and not is_over.is_set():
            for kind in self._rnd.sample(self._kinds, len(self._kinds)):
                await _wait(is_over, self._rnd.expovariate(1 / interval_s))
                if is_over.is_set():
                    return
                await self._interrupt(kind, self._rnd.expovariate(1 / still_s), is_over)

    async def _interrupt(self, kind: Interruption, still_s: float, is_over: asyncio.Event) -> None:
        self._enter("stopping")
        await kind.begin(self._llm, self._rnd)
        begin_s = time.monotonic()
        self._enter("still")
        await _wait(is_over, still_s)
        self._enter("starting")
        self.stills_s.append((begin_s, time.monotonic()))
        await kind.end(self._llm, self._rnd)
        self._enter("running")
        self.counts[str(kind)] += 1

    def _enter(self, phase: Phase) -> None:
        self._begins[self.phase].clear()
        self.phase = phase
        self._begins[phase].set()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for the event, but not longer than `timeout_s` seconds."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
