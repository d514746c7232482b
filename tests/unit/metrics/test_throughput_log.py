"""The lines that a serving program logs, on a clock of the test's own."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest
from metric_views import make_view
from waiting import LONG_S

from raycore.metrics import throughput_log
from raycore.metrics.throughput_log import ThroughputLog, throughput_logged


class Engine:
    def __init__(self, num_ranks: int = 1) -> None:
        self.view = make_view(num_ranks)
        self.now_s = 0.0
        self.log = ThroughputLog(self.read, clock=lambda: self.now_s)

    def read(self):
        return replace(self.view, counts={rank: counts.copy() for rank, counts in self.view.counts.items()})

    def after(self, seconds: float, **status) -> None:
        """Report, with the first rank's status as given."""
        self.now_s += seconds
        self.view = replace(self.view, ranks=[replace(self.view.ranks[0], **status), *self.view.ranks[1:]])
        self.log.report()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, throughput_log.__name__)
    return lambda: caplog.messages


def test_a_throughput_line_shows_the_counts_since_the_line_before(lines):
    engine = Engine()
    counts = engine.view.counts[0]
    for _ in range(2):
        counts.num_prompt_tokens += 50
        counts.num_cached_prompt_tokens += 10
        counts.num_output_tokens += 123
        engine.after(10.0, num_running=3, num_waiting=1, kv_usage=0.125)
    assert (
        lines()
        == [
            "Engine 000: Avg prompt throughput: 4.0 tokens/s, Avg generation throughput: 12.3 tokens/s, "
            "Running: 3 reqs, Waiting: 1 reqs, KV cache usage: 12.5%"
        ]
        * 2
    )


def test_a_throughput_line_leaves_out_counts_that_did_not_change(lines):
    engine = Engine()
    counts = engine.view.counts[0]
    counts.num_prefix_queries, counts.num_prefix_hits, counts.num_preemptions = 100, 25, 2
    engine.after(10.0, num_running=1)
    engine.after(10.0, num_running=1)
    counts.num_prefix_queries += 10
    engine.after(10.0, num_running=1)
    assert ["Preemptions: 2" in line for line in lines()] == [True, False, False]
    assert [line.rpartition("rate: ")[2] for line in lines()] == ["25.0%", "25.0%", "0.0%"]


def test_an_idle_engine_logs_one_throughput_line(lines):
    engine = Engine()
    engine.after(10.0)
    assert lines() == []
    engine.after(10.0, num_running=1)
    for _ in range(3):
        engine.after(10.0, num_running=0)
    assert ["Running: 1" in line for line in lines()] == [True, False]


def test_each_busy_rank_logs_a_throughput_line(lines):
    engine = Engine(3)
    engine.view.counts[0].num_output_tokens = engine.view.counts[2].num_output_tokens = 10
    engine.after(5.0)
    assert [line.partition(":")[0] for line in lines()] == ["Engine 000", "Engine 002"]
    assert "generation throughput: 2.0 tokens/s" in lines()[0]


def test_a_throughput_line_shows_drafts_only_if_there_were_some(lines):
    engine = Engine()
    counts = engine.view.counts[0]
    for num_drafted, num_accepted in ((8, 6), (0, 0)):
        counts.num_output_tokens += 1
        counts.num_draft_tokens += num_drafted
        counts.num_accepted_per_position = [num_accepted + counts.num_accepted_tokens]
        engine.after(10.0, num_running=1)
    assert lines()[0].endswith("Avg draft acceptance rate: 75.0%")
    assert "acceptance" not in lines()[1]


def test_the_throughput_log_runs_on_a_thread_that_ends_with_its_block(monkeypatch, lines):
    monkeypatch.setattr(throughput_log, "INTERVAL_S", 0.01)
    engine, logged = Engine(), threading.Event()
    monkeypatch.setattr(throughput_log.logger, "info", lambda *_: logged.set())
    engine.view.counts[0].num_output_tokens = 1
    with throughput_logged(engine.read, is_wanted=False):
        assert not logged.wait(0.1)
    with throughput_logged(engine.read):
        assert logged.wait(LONG_S)
    assert not [thread for thread in threading.enumerate() if "throughput" in thread.name and not _ends(thread)]


def _ends(thread: threading.Thread) -> bool:
    thread.join(LONG_S)
    return not thread.is_alive()


def test_a_throughput_line_says_how_fast_decodes_read_the_weights_of_a_cpu(lines):
    engine = Engine()
    engine.view.counts[0].num_output_tokens = 5
    engine.after(10.0, num_running=1, decode_rate=21.3e9, memory_rate=29.5e9)
    engine.after(10.0, num_running=1)
    assert ["Weights that decodes read: 21.3 of 29.5 GB/s" in line for line in lines()] == [True, False]
