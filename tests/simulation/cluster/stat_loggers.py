"""A user's classes that get an engine's figures: a sound one, old ones, and such as raise.

What one of them does is no business of the others: each is told of every batch, in whatever way it has failed before.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from raycore.metrics.stat_loggers import AggregateStatLoggerBase
from raycore.metrics.step_stats import IterationStats, SchedulerStats

_SHARE_OF_OTHERS = 0.5
"""Of the engines with a sound class, those that have others besides."""
_RAISING_SHARE = 0.3
"""Of the times that a class which raises is asked for something."""


class Tally:
    """What a class of the user's was told, by all its objects."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_batches = 0
        self.counted: Counter[str] = Counter()

    def add(self, figures: IterationStats | None) -> None:
        assert figures is not None
        self.num_batches += 1
        self.counted["output tokens"] += figures.num_generation_tokens
        self.counted["prompt tokens"] += figures.num_prompt_tokens
        self.counted["requests"] += len(figures.n_params_iter)
        self.counted.update(f"ends by {each.finish_reason}" for each in figures.finished_requests)


class UsersClasses:
    """The classes that one engine has."""

    def __init__(self, draw: random.Random) -> None:
        self._sound = Tally("a sound class")
        self._others: list[Tally] = []
        self.factories: list[Any] = [_sound(self._sound)]
        if draw.random() < _SHARE_OF_OTHERS:
            for make in draw.sample(_OTHERS, draw.randint(1, len(_OTHERS))):
                tally = Tally(make.__name__.strip("_").replace("_", " "))
                self._others.append(tally)
                self.factories.append(make(tally, draw))

    def problems(self, counted: dict[str, int]) -> Iterator[str]:
        """What differs from the metrics. The ends that the client itself makes are not told."""
        for name in ("output tokens", "prompt tokens", "requests", "ends by stop", "ends by length"):
            if self._sound.counted[name] != counted[name]:
                yield f"stat loggers were told of {self._sound.counted[name]} {name}, and metrics count {counted[name]}"
        for each in self._others:
            if each.num_batches != self._sound.num_batches:
                yield f"{each.name} was told of {each.num_batches} batches, and others of {self._sound.num_batches}"
            elif each.counted and each.counted != self._sound.counted:
                yield f"{each.name} was told of {dict(each.counted)}, and others of {dict(self._sound.counted)}"


def _sound(tally: Tally) -> type[AggregateStatLoggerBase]:
    class Sound(AggregateStatLoggerBase):
        def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
            """Needs none of this."""

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: object = None,
            engine_idx: int = 0,
        ) -> None:
            assert scheduler_stats is not None
            tally.add(iteration_stats)

        def log_engine_initialized(self) -> None:
            """Nothing has to be done."""

    return Sound


def _a_class_for_an_older_version(tally: Tally, draw: random.Random) -> type:
    class Old:
        """It lacks the methods that get no figures, and takes fewer arguments."""

        def __init__(self, config: Any, dp_rank: int) -> None:
            pass

        def record(self, scheduler_stats: SchedulerStats, iteration_stats: IterationStats) -> None:
            tally.add(iteration_stats)

    return Old


def _a_class_whose_methods_raise(tally: Tally, draw: random.Random) -> type:
    class Raising:
        def __init__(self, config: Any, dp_rank: int) -> None:
            pass

        def record(self, scheduler_stats: SchedulerStats, iteration_stats: IterationStats, **others: object) -> None:
            tally.add(iteration_stats)
            _raise_perhaps(draw)

        def log_engine_initialized(self) -> None:
            _raise_perhaps(draw)

    return Raising


def _a_class_whose_properties_raise(tally: Tally, draw: random.Random) -> type:
    class Lazy:
        """Its methods are made when they are asked for, which may fail."""

        def __init__(self, config: Any, dp_rank: int) -> None:
            pass

        @property
        def record(self) -> Callable[..., None]:
            tally.num_batches += 1
            _raise_perhaps(draw)
            return lambda scheduler_stats, iteration_stats: None

        @property
        def log_engine_initialized(self) -> Callable[[], None]:
            _raise_perhaps(draw)
            return lambda: None

    return Lazy


def _a_class_without_a_method_for_figures(tally: Tally, draw: random.Random) -> type:
    class Unfinished:
        def __init__(self, config: Any, dp_rank: int) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            tally.num_batches += name == "record"
            raise AttributeError(name)

    return Unfinished


_OTHERS = (
    _a_class_for_an_older_version,
    _a_class_whose_methods_raise,
    _a_class_whose_properties_raise,
    _a_class_without_a_method_for_figures,
)


def _raise_perhaps(draw: random.Random) -> None:
    if draw.random() < _RAISING_SHARE:
        raise draw.choice([ValueError, KeyError, OSError])("a fault of the user's")
