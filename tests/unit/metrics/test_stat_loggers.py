"""Objects of the user's that get an engine's figures."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
from waiting import eventually

from raycore.errors import InvalidConfig
from raycore.metrics.stat_loggers import (
    AggregateStatLoggerBase,
    StatLoggerBase,
    StatLoggers,
    check_stat_loggers,
    tell_figures,
)
from raycore.metrics.step_stats import IterationStats, SchedulerStats


class Kept(StatLoggerBase):
    """Keeps what it gets."""

    made: list

    def __init__(self, vllm_config, engine_index=0):
        self.config, self.engine_index, self.came = vllm_config, engine_index, []
        self.made.append(self)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.came.append((iteration_stats.num_generation_tokens, engine_idx))

    def log_engine_initialized(self):
        self.came.append("started")

    def log(self):
        self.came.append("log")


@pytest.fixture
def kept():
    return type("KeptHere", (Kept,), {"made": []})


@pytest.fixture
def ended():
    event = threading.Event()
    yield event
    event.set()


def figures(num_tokens):
    return SchedulerStats(), IterationStats(num_generation_tokens=num_tokens)


def test_each_rank_has_an_object_that_gets_its_figures(kept, ended):
    loggers = StatLoggers([kept], "config", 2, first_rank=4)
    loggers.start(ended.is_set)
    loggers.put(1, *figures(7))
    loggers.put(0, *figures(8))
    eventually(lambda: len(kept.made[0].came) == 2)
    loggers.log()
    eventually(lambda: [each.came for each in kept.made] == [["started", (8, 4), "log"], ["started", (7, 5), "log"]])
    assert [(each.config, each.engine_index) for each in kept.made] == [("config", 4), ("config", 5)]


def test_a_clients_figures_are_told_until_it_has_failed(kept):
    client = SimpleNamespace(failure=None, tell_figures=lambda put: told.append(put))
    told, before = [], set(threading.enumerate())
    loggers = tell_figures(client, [kept], "config", 1, 4)
    (thread,) = set(threading.enumerate()) - before
    told[0](0, *figures(7))
    loggers.log()
    client.failure = ValueError("the ranks have died")
    thread.join(30)
    assert not thread.is_alive()
    assert kept.made[0].came == ["started", (7, 4), "log"]


def test_a_rank_that_comes_later_gets_an_object_of_its_own(kept, ended):
    loggers = StatLoggers([kept], "config", 1)
    loggers.start(ended.is_set)
    loggers.put(3, *figures(7))
    eventually(lambda: len(kept.made) == 2 and kept.made[1].came)
    assert (kept.made[1].engine_index, kept.made[1].came) == (3, [(7, 3)])


def test_an_object_for_all_ranks_gets_their_numbers_and_all_figures(ended):
    class All(AggregateStatLoggerBase):
        def __init__(self, vllm_config, engine_indexes):
            self.engine_indexes, self.came = engine_indexes, []
            made.append(self)

        def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
            self.came.append(engine_idx)

        def log_engine_initialized(self): ...

    made = []
    loggers = StatLoggers([All], "config", 2)
    loggers.start(ended.is_set)
    loggers.put(0, *figures(1))
    loggers.put(1, *figures(1))
    eventually(lambda: made[0].came == [0, 1])
    assert made[0].engine_indexes == [0, 1]


def test_functions_and_plain_classes_of_older_versions_do_too(ended):
    class Plain:
        def record(self, stats, step):
            came.append((type(stats), step.num_generation_tokens))

    came = []
    loggers = StatLoggers([lambda config, index: Plain()], "config", 1)
    loggers.start(ended.is_set)
    loggers.log()
    loggers.put(0, *figures(3))
    eventually(lambda: came == [(SchedulerStats, 3)])


def test_one_that_fails_is_logged_once_and_keeps_nothing_from_the_others(kept, ended, caplog):
    class Failing(kept):
        def record(self, *args, **kwargs):
            raise ValueError("mine")

    loggers = StatLoggers([Failing, kept], "config", 1)
    loggers.start(ended.is_set)
    with caplog.at_level(logging.ERROR):
        loggers.put(0, *figures(1))
        loggers.put(0, *figures(2))
        eventually(lambda: kept.made[1].came == ["started", (1, 0), (2, 0)])
    assert [record.getMessage() for record in caplog.records] == ["Failing.record() failed"]


@pytest.mark.parametrize("method", ["record", "log", "log_engine_initialized"])
def test_a_method_that_cannot_be_looked_up_is_logged_and_keeps_nothing_from_the_others(kept, ended, caplog, method):
    class Unusable:
        def __init__(self, *args): ...

        def record(self, *args): ...

        def fail(self):
            raise ValueError("mine")

    setattr(Unusable, method, property(Unusable.fail))
    loggers = StatLoggers([Unusable, kept], "config", 1)
    with caplog.at_level(logging.ERROR):
        loggers.start(ended.is_set)
        for num_tokens in (1, 2):
            loggers.put(0, *figures(num_tokens))
            loggers.log()
        eventually(lambda: kept.made[0].came == ["started", (1, 0), "log", (2, 0), "log"])
    assert [record.getMessage() for record in caplog.records] == [f"Unusable.{method}() failed"]


def test_a_class_that_takes_no_figures_is_logged_once(kept, ended, caplog):
    loggers = StatLoggers([lambda *args: "mine", kept], "config", 1)
    with caplog.at_level(logging.ERROR):
        loggers.start(ended.is_set)
        loggers.put(0, *figures(1))
        loggers.put(0, *figures(2))
        eventually(lambda: kept.made[0].came == ["started", (1, 0), (2, 0)])
    assert [record.getMessage() for record in caplog.records] == ["str.record() failed"]


def test_a_constructor_that_fails_for_a_later_rank_is_logged_once_and_the_others_go_on(kept, ended, caplog):
    def failing(config, dp_rank):
        if dp_rank:
            raise ValueError("mine")
        return kept(config, dp_rank)

    loggers = StatLoggers([failing, kept], "config", 1)
    loggers.start(ended.is_set)
    with caplog.at_level(logging.ERROR):
        for dp_rank in (3, 3, 0):
            loggers.put(dp_rank, *figures(1))
        eventually(lambda: (1, 0) in kept.made[1].came)
    assert [each.came for each in kept.made] == [["started", (1, 0)], ["started", (1, 0)], [(1, 3), (1, 3)]]
    assert len(caplog.records) == 1
    assert "has made no object for rank 3" in caplog.text


def test_one_thread_makes_all_calls_in_order(kept, ended):
    began, goes_on = threading.Event(), threading.Event()
    threads = set()

    class Slow(kept):
        def record(self, *args, **kwargs):
            threads.add(threading.current_thread())
            began.set()
            assert goes_on.wait(60)
            super().record(*args, **kwargs)

        def log(self):
            threads.add(threading.current_thread())
            super().log()

    loggers = StatLoggers([Slow], "config", 1)
    loggers.start(ended.is_set)
    loggers.put(0, *figures(1))
    assert began.wait(60)
    loggers.log()
    loggers.put(0, *figures(2))
    goes_on.set()
    eventually(lambda: kept.made[0].came == ["started", (1, 0), "log", (2, 0)])
    assert len(threads) == 1


def test_the_oldest_figures_are_dropped_if_objects_are_too_slow(kept, ended, caplog, monkeypatch):
    monkeypatch.setattr("raycore.metrics.stat_loggers._MAX_CALLS", 3)
    loggers = StatLoggers([kept], "config", 1)
    for num_tokens in range(10):
        loggers.put(0, *figures(num_tokens))
    loggers.start(ended.is_set)
    eventually(lambda: kept.made[0].came == ["started", (7, 0), (8, 0), (9, 0)])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "slower than the engine" in caplog.text


def test_the_thread_ends_with_the_engine_after_it_has_passed_on_what_came(kept):
    ended = threading.Event()
    loggers = StatLoggers([kept], "config", 1)
    before = set(threading.enumerate())
    loggers.start(ended.is_set)
    (thread,) = set(threading.enumerate()) - before
    ended.set()
    loggers.put(0, *figures(1))
    thread.join(30)
    assert not thread.is_alive()
    assert kept.made[0].came == ["started", (1, 0)]


def test_what_makes_no_objects_is_refused_by_name():
    with pytest.raises(InvalidConfig, match="stat_loggers has 'Kept': give classes"):
        check_stat_loggers([Kept, "Kept"])
