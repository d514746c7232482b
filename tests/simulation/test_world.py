"""The simulated world's threads, queues, futures, loops and processes, beside Python's own."""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycore.errors import InvalidInput, RaycoreError
from simulation import mistakes
from simulation.heard import heard
from simulation.world import futures as simulated_futures
from simulation.world import kernel, loops, queues, system, threads
from simulation.world.kernel import Deadlock, OutOfTime, Pace, World

REAL = SimpleNamespace(threading=threading, queue=queue, futures=futures, asyncio=asyncio, time=time)
SIMULATED = SimpleNamespace(
    threading=threads, queue=queues, futures=simulated_futures, asyncio=loops.module(), time=system.time
)
SEEDS = range(40)


def outcomes(main: Callable[[Any], Any], seeds: range = SEEDS) -> set[str]:
    return {repr(World(seed).run(lambda: main(SIMULATED))) for seed in seeds}


# ---- programs whose result doesn't depend on the order: here and in Python itself


def counts_under_a_lock(py: Any) -> object:
    lock, count = py.threading.Lock(), [0]

    def work() -> None:
        for _ in range(10):
            with lock:
                before = count[0]
                py.time.sleep(0)
                count[0] = before + 1

    workers = [py.threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return count[0]


def passes_items_through_a_bounded_queue(py: Any) -> object:
    items, got = py.queue.Queue(maxsize=2), []

    def produce() -> None:
        for item in range(20):
            items.put(item)
        items.put(None)

    py.threading.Thread(target=produce).start()
    while (item := items.get(timeout=10)) is not None:
        got.append(item)
    return got


def waits_for_a_condition(py: Any) -> object:
    condition, values = py.threading.Condition(), []

    def add() -> None:
        for value in range(5):
            with condition:
                values.append(value)
                condition.notify_all()

    thread = py.threading.Thread(target=add)
    with condition:
        thread.start()
        arrived = condition.wait_for(lambda: len(values) == 5, timeout=10)
    thread.join(10)
    return arrived, values, thread.is_alive()


def gives_up_after_a_timeout(py: Any) -> object:
    event, lock, items = py.threading.Event(), py.threading.Lock(), py.queue.SimpleQueue()
    lock.acquire()
    said: list[object] = [event.wait(0.01), lock.acquire(timeout=0.01), lock.acquire(blocking=False)]
    try:
        items.get(timeout=0.01)
    except py.queue.Empty:
        said.append("empty")
    condition = py.threading.Condition()
    with condition:
        said.append(condition.wait(0.01))
    return said


def runs_calls_in_a_pool(py: Any) -> object:
    with py.futures.ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(divmod, 7, number) for number in (2, 0, 3)]
        done, not_done = py.futures.wait(calls, timeout=10)
        return (
            len(done),
            len(not_done),
            [repr(call.exception()) if call.exception() else call.result() for call in calls],
        )


def keeps_values_of_threads_apart(py: Any) -> object:
    own = py.threading.local()
    own.value = "first"
    seen: list[object] = []

    def look() -> None:
        seen.append(hasattr(own, "value"))
        own.value = "second"

    thread = py.threading.Thread(target=look)
    thread.start()
    thread.join()
    return own.value, seen


def runs_an_event_loop(py: Any) -> object:
    async def main() -> object:
        loop = py.asyncio.get_running_loop()
        order: list[object] = []
        loop.call_later(0.02, order.append, "later")
        loop.call_later(0.01, order.append, "sooner")
        loop.call_soon(order.append, "soon")
        answer = await py.asyncio.to_thread(lambda: "from a thread")
        event = py.asyncio.Event()
        py.threading.Thread(target=lambda: loop.call_soon_threadsafe(event.set)).start()
        await py.asyncio.wait_for(event.wait(), 10)
        try:
            await py.asyncio.wait_for(py.asyncio.Event().wait(), 0.05)
        except (TimeoutError, py.asyncio.TimeoutError):
            order.append("timeout")
        task = py.asyncio.create_task(py.asyncio.sleep(100))
        await py.asyncio.sleep(0)
        task.cancel()
        results = await py.asyncio.gather(task, py.asyncio.sleep(0, "slept"), return_exceptions=True)
        done, pending = await py.asyncio.wait([py.asyncio.ensure_future(py.asyncio.sleep(0))], timeout=10)
        return answer, order, [repr(result) for result in results], len(done), len(pending)

    return py.asyncio.run(main())


def a_future_hears_of_its_end(py: Any) -> object:
    future, heard = py.futures.Future(), []
    future.add_done_callback(lambda each: heard.append(each.result()))
    py.threading.Thread(target=lambda: future.set_result(3)).start()
    value = future.result(timeout=10)
    cancelled = py.futures.Future()
    return value, cancelled.cancel(), cancelled.cancelled(), cancelled.done()


PROGRAMS = [
    counts_under_a_lock,
    passes_items_through_a_bounded_queue,
    waits_for_a_condition,
    gives_up_after_a_timeout,
    runs_calls_in_a_pool,
    keeps_values_of_threads_apart,
    runs_an_event_loop,
    a_future_hears_of_its_end,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_does_the_same_here_and_in_python_in_any_order(program: Callable[[Any], object]):
    assert outcomes(program) == {repr(program(REAL))}


# ---- what only this world shows


def test_a_missing_lock_is_found_by_some_seeds_only():
    def main(py: Any) -> int:
        count = [0]

        def work() -> None:
            before = count[0]
            py.time.sleep(0)
            count[0] = before + 1

        workers = [py.threading.Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return count[0]

    assert outcomes(main) == {"1", "2"}


def test_two_locks_in_two_orders_are_a_deadlock_that_names_both_threads():
    def main() -> None:
        first, second = threads.Lock(), threads.Lock()

        def take(one: threads.Lock, other: threads.Lock) -> None:
            with one, other:
                pass

        workers = [
            threads.Thread(target=take, args=each, name=name)
            for name, each in (("there", (first, second)), ("back", (second, first)))
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    found: list[str] = []
    for seed in SEEDS:
        try:
            World(seed).run(main)
        except Deadlock as error:
            found.append(str(error))
    assert 0 < len(found) < len(SEEDS)
    assert "driver/there waits for a lock that driver/back has" in found[0]
    assert "driver/back waits for a lock that driver/there has" in found[0]


@pytest.mark.parametrize("pace", [None, Pace(1, 1e-5, True, 0.0), Pace(1, 1e-5, False, 0.01)])
def test_a_seed_gives_the_same_story_again(pace: Pace | None):
    def run(seed: int) -> str:
        world = World(seed, pace)

        def work() -> None:
            for _ in range(5):
                system.time.sleep(system.random.random())
                world.tell(system.secrets.token_hex(4))

        def main() -> None:
            workers = [threads.Thread(target=work, name=f"worker{number}") for number in range(3)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

        world.run(main)
        assert len(world.story) == 15
        return world.digest

    assert [run(seed) for seed in SEEDS] == [run(seed) for seed in SEEDS]
    assert len({run(seed) for seed in SEEDS}) == len(SEEDS)


def test_hours_of_waiting_take_no_time():
    def main() -> float:
        threads.Event().wait(3600.0)
        system.time.sleep(3600.0)
        return system.time.monotonic()

    assert 7200.0 <= World(1).run(main) < 7201.0


def test_a_killed_process_runs_nothing_more_and_a_stopped_one_goes_on_later():
    world = World(3)
    ran: list[Any] = []

    def child(name: str) -> None:
        try:
            for number in range(10):
                system.time.sleep(1.0)
                ran.append((name, number))
        finally:
            ran.append((name, "finally"))

    def main() -> None:
        processes = {name: world.process(name, {"NAME": name}) for name in ("killed", "stopped")}
        for name, process in processes.items():
            world.start(process, "main", lambda name=name: child(name))
        system.time.sleep(2.5)
        system.os.kill(processes["killed"].pid, system.signal.SIGKILL)
        system.os.kill(processes["stopped"].pid, system.signal.SIGSTOP)
        system.time.sleep(100.0)
        ran.append("much later")
        system.os.kill(processes["stopped"].pid, system.signal.SIGCONT)
        system.time.sleep(100.0)
        with pytest.raises(ProcessLookupError):
            system.os.kill(processes["killed"].pid, 0)

    world.run(main)
    assert [each for each in ran if each[0] == "killed"] == [("killed", 0), ("killed", 1)]
    assert ran.index("much later") == 4
    assert ran[-1] == ("stopped", "finally")
    assert len(ran) == 2 + 11 + 1


def test_a_signals_handler_runs_in_the_main_thread_while_it_waits():
    world = World(5)
    heard: list[object] = []

    def child() -> None:
        system.signal.signal(system.signal.SIGTERM, lambda number, frame: heard.append(int(number)))
        heard.append(threads.Event().wait(50.0))
        heard.append(system.os.environ["NAME"])

    def main() -> None:
        process = world.process("child", {"NAME": "its own"})
        world.start(process, "main", child)
        system.time.sleep(10.0)
        system.os.kill(process.pid, system.signal.SIGTERM)
        system.time.sleep(10.0)
        heard.append("the wait goes on")
        system.time.sleep(100.0)

    world.run(main)
    assert heard == [15, "the wait goes on", False, "its own"]


def test_os_exit_ends_the_process_of_the_thread():
    world = World(2)

    def child() -> None:
        try:
            system.os._exit(1)
        finally:
            world.tell("unreachable in a real process")

    def main() -> object:
        process = world.process("child")
        world.start(process, "main", child)
        other = world.start(process, "other", lambda: system.time.sleep(1000.0))
        system.time.sleep(1.0)
        return process.has_ended, other.is_over

    assert world.run(main) == (True, False)


def test_a_failure_in_a_thread_is_kept_with_its_thread():
    world = World(2)

    def main() -> None:
        thread = threads.Thread(target=lambda: 1 / 0, name="divides")
        thread.start()
        thread.join()

    world.run(main)
    ((thread, error),) = world.failures
    assert (repr(thread), type(error)) == ("driver/divides", ZeroDivisionError)


def test_what_never_ends_is_out_of_time():
    def main() -> None:
        while True:
            system.time.sleep(1.0)

    with pytest.raises(OutOfTime, match="driver/main waits for its sleep to end"):
        World(1, last_s=50.0).run(main)
    with pytest.raises(OutOfTime, match="101 changes of threads"):
        World(1, max_changes=100).run(main)


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """Python doesn't collect by itself."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
def test_garbage_is_collected_when_the_seed_says_so_and_finalizers_run_in_a_thread():
    class Cyclic:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            ended.append(repr(world.current))

    def main() -> None:
        Cyclic()
        for _ in range(10):
            system.time.sleep(0)
            threads.pause()

    ended: list[str] = []
    world = World(1, Pace(1.0, 1e-6, False, 0.0))
    world.run(main)
    assert ended == []
    world = World(1, Pace(1.0, 1e-6, False, 0.5))
    world.run(main)
    assert ended == ["driver/main"] * 2


def test_nothing_here_works_outside_of_a_world():
    lock = threads.Lock()
    with lock:
        assert not lock.acquire(blocking=False)
    assert kernel.the_world is None
    with pytest.raises(AssertionError, match="no world runs"):
        threads.Event().wait(1.0)


def test_a_name_that_the_world_lacks_is_named():
    with pytest.raises(AttributeError, match=r"the simulated world has no time\.clock_gettime"):
        _ = system.time.clock_gettime


def test_a_wait_with_a_timeout_makes_no_task_of_its_own_in_any_version_of_python():
    """It did until 3.11, so that threads changed at other places than in later versions."""

    def main(py: Any) -> object:
        async def inner() -> object:
            return py.asyncio.current_task()

        async def outer() -> bool:
            return await py.asyncio.wait_for(inner(), 10) is py.asyncio.current_task()

        return py.asyncio.run(outer())

    assert outcomes(main, range(2)) == {"True"}


# ---- calls that come between


def comes_between(place: int) -> list[str]:
    """What two threads do, and a third one in between."""
    world, lock, done = World(1, Pace(1.0, 1e-5, by_priority=False, collections=0.0)), threads.Lock(), []

    def work(name: str) -> None:
        system.time.sleep(0.1)
        for _ in range(3):
            with lock:
                done.append(name)

    def main() -> None:
        workers = [threads.Thread(target=work, args=[name]) for name in "ab"]
        for worker in workers:
            worker.start()
        world.come_between(place, 1.0)
        for _ in range(3):
            with threads.Lock():
                done.append("between")
        for worker in workers:
            worker.join()

    world.run(main)
    return done


def test_a_thread_comes_between_at_the_place_that_is_named_and_runs_alone():
    begins = []
    for place in range(1, 30):
        done = comes_between(place)
        begins.append(done.index("between"))
        assert done[begins[-1] : begins[-1] + 3] == ["between"] * 3
        before = done[: begins[-1]]
        assert "".join(before) in ("aaabbb"[: len(before)], "bbbaaa"[: len(before)]), "nobody is left before"
    assert begins == sorted(begins)
    assert set(begins) == set(range(7))


def test_a_thread_goes_on_though_nobody_comes_to_its_place():
    world = World(1)
    assert world.run(lambda: (world.come_between(5, 1.0), world.now_s >= 1.0)) == (None, True)


# ---- what fails a seed though nobody hears of it

_MADE_UP = """
def wait_for_events(self, seconds):
    with self.condition:
        if not self.events:
            self.condition.wait(seconds)
        return bool(self.events)


def wait_until(self, clock, until_s):
    with self.condition:
        while not self.events and clock.monotonic() < until_s:
            self.condition.wait(until_s - clock.monotonic())


def wait_by_predicate(self, seconds):
    with self.condition:
        return self.condition.wait_for(lambda: self.events, seconds)


def put(self, notifies):
    with self.condition:
        self.events.append(1)
        if notifies:
            self.condition.notify()
"""


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Functions as those of a module of the product."""
    path = tmp_path_factory.mktemp("made") / "up.py"
    path.write_text(_MADE_UP)
    module: dict[str, Any] = {"__name__": "raycore.made.up"}
    exec(compile(_MADE_UP, str(path), "exec"), module)
    return SimpleNamespace(**module)


def failures_of(main: Callable[[], object], seed: int = 0) -> list[str]:
    """What fails when a thread runs `main`."""
    world = World(seed)

    def run() -> None:
        thread = threads.Thread(target=main)
        thread.start()
        thread.join()

    world.run(run)
    return [str(error) for _, error in world.failures]


@pytest.mark.parametrize("how", ["wait_for_events", "wait_by_predicate"])
@pytest.mark.parametrize("notifies", [True, False])
def test_a_wait_that_lasts_though_what_it_waits_for_has_come_is_a_failure(product, how: str, notifies: bool):
    def main() -> object:
        own = SimpleNamespace(condition=threads.Condition(), events=[])
        putting = threads.Thread(target=lambda: (system.time.sleep(1), product.put(own, notifies)))
        putting.start()
        return getattr(product, how)(own, 5.0)

    for seed in range(5):
        said = failures_of(main, seed)
        assert len(said) == (not notifies)
        assert all(f"in {how} (up.py:" in each and "got no notice of it" in each for each in said)


def test_a_wait_for_something_that_does_not_come_is_none(product):
    def main() -> None:
        own = SimpleNamespace(condition=threads.Condition(), events=[])
        assert not product.wait_for_events(own, 2.0)
        assert not product.wait_by_predicate(own, 2.0)
        product.wait_until(own, system.time, system.time.monotonic() + 2.0)  # its deadline is no event

    assert not failures_of(main)


def test_what_the_callback_of_a_future_raises_is_a_failure():
    def main() -> None:
        future = simulated_futures.Future()
        future.add_done_callback(lambda _: [][0])
        future.set_result(None)

    assert failures_of(main) == ["list index out of range"]


def test_a_log_that_has_a_line_twice_is_a_failure():
    log = logging.getLogger("raycore.made.up")

    def main() -> None:
        log.info("one\ntwo")
        log.error("one\none")
        log.info("one\ntwo\none")

    with heard() as logged:
        failures = failures_of(main)
    assert failures == ["a log has a line twice: one\ntwo\none"]
    assert len(logged) == 1


_MISTAKES = """
def completes_twice(future):
    future.set_result(1)
    future.set_result(2)


def looks_up():
    return {}["red"]


def refuses(error):
    try:
        looks_up()
    except KeyError as lacks:
        raise error("red isn't there") from lacks
"""


def test_errors_that_show_a_mistake_are_told_from_those_that_name_a_users():
    module: dict[str, Any] = {}
    exec(compile(_MISTAKES, str(Path(__file__).parents[2] / "raycore" / "made_up.py"), "exec"), module)

    def main() -> list[str]:
        for number, make in enumerate(
            (
                lambda: module["completes_twice"](simulated_futures.Future()),
                lambda: module["refuses"](InvalidInput),
                lambda: module["refuses"](RaycoreError),
                lambda: {}["red"],
            )
        ):
            try:
                make()
            except Exception as error:
                mistakes.note(error, str(number))
        return list(mistakes.of(threads.world()))

    assert World(0).run(main) == [
        "0: InvalidStateError in completes_twice(): FINISHED: <Future FINISHED>",
        "2: KeyError in looks_up(): 'red'",
    ]
