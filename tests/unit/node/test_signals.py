"""Which signals end a program, and which of them are echoes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from raycore.node import signals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now_s = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now_s[0])
    signals.forget_signals()
    yield now_s
    signals.forget_signals()


def test_a_signal_within_half_a_second_of_another_is_an_echo(clock: list[float]):
    assert not signals.is_echo(signal.SIGTERM)
    assert signals.is_echo(signal.SIGTERM)
    clock[0] += 0.4
    assert signals.is_echo(signal.SIGTERM)
    clock[0] += 0.2
    assert not signals.is_echo(signal.SIGINT)


def test_a_terminal_hangs_up_only_once(clock: list[float]):
    assert not signals.is_echo(signal.SIGHUP)
    clock[0] += 60.0
    assert signals.is_echo(signal.SIGHUP)
    assert not signals.is_echo(signal.SIGTERM)


def test_a_signal_after_forget_is_no_echo(clock: list[float]):
    assert not signals.is_echo(signal.SIGTERM)
    signals.forget_signals()
    assert not signals.is_echo(signal.SIGHUP)


def test_an_ignored_hang_up_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signals.ending_signals() == [signal.SIGTERM, signal.SIGINT]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signals.ending_signals() == [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)
