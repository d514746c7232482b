"""Pipes, pidfds, sockets and signals of the simulated world."""

from __future__ import annotations

import pytest

from simulation.world import descriptors, sockets, system, threads
from simulation.world.kernel import World
from simulation.world.sockets import Listener, listen

SEEDS = range(20)
os, select, signal, socket, time = system.os, system.select, system.signal, system.socket, system.time


def test_a_pipe_wakes_who_waits_for_it():
    def main() -> None:
        reader, writer = os.pipe2(0)
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        assert poll.poll(100) == []
        assert time.monotonic() == pytest.approx(0.1, abs=0.05)
        threads.Thread(target=lambda: (time.sleep(1.0), os.write(writer, b"."))).start()
        assert poll.poll(10_000) == [(reader, select.POLLIN)]
        assert os.read(reader, 10) == b"."
        assert poll.poll(0) == []
        os.close(reader)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.close(reader)

    for seed in SEEDS:
        World(seed).run(main)


def test_a_pidfd_shows_the_end_of_a_process_of_this_machine():
    def main(world: World) -> None:
        other, elsewhere = world.process("other"), world.process("elsewhere")
        elsewhere.machine = "another"
        pidfd = os.pidfd_open(other.pid)
        with pytest.raises(ProcessLookupError):
            os.pidfd_open(elsewhere.pid)
        poll = select.poll()
        poll.register(pidfd)
        world.call_later(1.0, lambda: world.kill(other))
        assert poll.poll(900) == []
        assert poll.poll(1000) == [(pidfd, select.POLLIN)]
        assert 1.0 < time.monotonic() < 1.1 + descriptors.LATEST_S
        with pytest.raises(ProcessLookupError):
            os.kill(other.pid, 0)

    for seed in SEEDS:
        world = World(seed)
        world.run(lambda world=world: main(world))


def test_connections_show_who_is_there():
    def main(world: World) -> None:
        there, silent = world.process("there"), [False]
        listen(world.systems, ("n1", 1), Listener(lambda: there, lambda: silent[0]))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("n1", 2), 1.0)
        with pytest.raises(FileNotFoundError):
            sockets.Socket().connect("/nowhere")
        world.stop(there)
        connection = socket.create_connection(("n1", 1), 1.0)
        poll = select.poll()
        poll.register(connection)
        assert poll.poll(100) == [], "the kernel takes connections for a stopped process"
        world.kill(there)
        assert len(poll.poll(100)) == 1
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("n1", 1), 1.0)
        silent[0], begun_s = True, time.monotonic()
        with pytest.raises(TimeoutError):
            socket.create_connection(("n1", 1), 1.0)
        assert time.monotonic() - begun_s == pytest.approx(1.0, abs=0.1)

    for seed in SEEDS:
        world = World(seed)
        world.run(lambda world=world: main(world))


def test_a_thread_that_is_woken_while_it_handles_a_signal_goes_on():
    def main(world: World) -> None:
        event = threads.Event()
        signal.signal(signal.SIGUSR1, lambda *_: event.set())
        own = os.getpid()
        threads.Thread(target=lambda: os.kill(own, signal.SIGUSR1)).start()
        assert event.wait(10.0)
        assert time.monotonic() < 5.0

    for seed in SEEDS:
        world = World(seed)
        world.run(lambda world=world: main(world))
