"""Interrupts of the simulated world: where they strike, and what they may not break."""

from __future__ import annotations

import signal

import pytest

from simulation.world import system, threads
from simulation.world.interrupts import Interrupt, come_to_statement
from simulation.world.kernel import Pace, World

CALM = Pace(mean_pauses=200.0, cost_s=1e-5, by_priority=False, collections=0.0)


def interrupt() -> Interrupt:
    """Of the process that runs."""
    system.signal.signal(signal.SIGINT, system.signal.default_int_handler)
    here = threads.world()
    assert here.current is not None
    return Interrupt(here, here.current.process)


@pytest.mark.parametrize("number", [1, 3])
def test_it_strikes_before_a_statement_of_the_main_thread(number: int):
    def main() -> int:
        interrupt().after_statements(number)
        other = threads.Thread(target=come_to_statement)
        other.start()
        other.join()
        for count in range(1, 10):
            try:
                come_to_statement()
            except KeyboardInterrupt:
                return count
        return 0

    assert World(0, CALM).run(main) == number


def test_it_strikes_while_the_main_thread_waits_and_not_after_it_was_cancelled():
    def main() -> float:
        first = interrupt()
        first.after_s(2.0)
        with pytest.raises(KeyboardInterrupt):
            system.time.sleep(5.0)
        at_s = system.time.monotonic()
        assert first.has_struck
        second = interrupt()
        second.after_s(1.0)
        second.cancel()
        system.time.sleep(5.0)
        return at_s

    assert World(0, CALM).run(main) == pytest.approx(2.0, abs=0.01)


def test_a_call_of_cpp_ends_before_its_caller_is_interrupted():
    def main() -> float:
        interrupt().after_s(1.0)
        here = threads.world()
        with pytest.raises(KeyboardInterrupt), here.signals_deferred():
            here.park("something", 3.0)
        return here.now_s

    assert World(0, CALM).run(main) == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_a_lock_goes_to_another_thread_if_the_one_that_was_to_have_it_is_interrupted(seed: int):
    def main() -> None:
        lock, has_it = threads.Lock(), threads.Event()

        def hold() -> None:
            with lock:
                has_it.set()
                system.time.sleep(1.0)

        def wait() -> None:
            with lock:
                pass

        others = [threads.Thread(target=hold), threads.Thread(target=wait)]
        others[0].start()
        has_it.wait()
        others[1].start()
        interrupt().after_s(1.0)
        try:
            with lock:
                system.time.sleep(0.5)
        except KeyboardInterrupt:
            pass
        for other in others:
            other.join(10.0)
            assert not other.is_alive()

    World(seed).run(main)
