"""Bytes and descriptors that go over simulated sockets."""

from __future__ import annotations

import os
import tempfile

import pytest

from simulation.world import system, threads
from simulation.world.kernel import World

SEEDS = range(20)
socket, time = system.socket, system.time
DATA = bytes(range(256)) * 4


def served(world: World, serve, family: str = "AF_INET"):
    """Start a process that listens and calls `serve` with each connection. Returns it, and its address."""
    process, address = world.process("server"), []

    def main() -> None:
        if family == "AF_UNIX":
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind("\0name")
            address.append("\0name")
        else:
            listener = socket.create_server(("10.0.0.1", 0))
            address.append(listener.getsockname())
        listener.listen()
        while True:
            connection, _ = listener.accept()
            threads.Thread(target=serve, args=[connection]).start()

    world.start(process, "main", main)
    while not address:
        time.sleep(0.01)
    time.sleep(0.1)
    return process, address[0]


def connected(address) -> socket.socket:
    if isinstance(address, str):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.connect(address)
        return made
    return socket.create_connection(address, 1.0)


def all_of(connection) -> tuple[bytes, int]:
    """All bytes until the end, and in how many pieces they have come."""
    found, count = b"", 0
    while piece := connection.recv(4096):
        found, count = found + piece, count + 1
    return found, count


@pytest.mark.parametrize("family", ["AF_INET", "AF_UNIX"])
def test_bytes_come_in_order_in_any_number_of_pieces_and_then_the_end(family: str):
    counts: set[int] = set()

    def main(world: World) -> None:
        def serve(connection) -> None:
            connection.sendall(DATA)
            connection.sendall(b"the last")
            connection.close()

        _, address = served(world, serve, family)
        found, count = all_of(connected(address))
        counts.add(count)
        assert found == DATA + b"the last"

    for seed in SEEDS:
        world = World(seed)
        world.run(lambda world=world: main(world))
    assert len(counts) > 1


def test_a_process_that_is_killed_sends_no_more_and_its_connections_end():
    lengths: set[int] = set()

    def main(world: World) -> None:
        def serve(connection) -> None:
            for start in range(0, len(DATA), 64):
                connection.sendall(DATA[start : start + 64])
                time.sleep(0.001)

        process, address = served(world, serve)
        connection = connected(address)
        world.call_later(0.008, lambda: world.kill(process))
        found, _ = all_of(connection)
        lengths.add(len(found))
        assert DATA.startswith(found)
        with pytest.raises(BrokenPipeError):
            connection.sendall(b".")

    for seed in SEEDS:
        world = World(seed)
        world.run(lambda world=world: main(world))
    assert len(lengths) > 1
    assert max(lengths) < len(DATA)


def test_who_waits_for_too_long_hears_so_and_a_listener_that_is_shut_down_accepts_nothing():
    def main(world: World) -> None:
        _, address = served(world, lambda connection: connection.sendall(b"ab"))
        connection = connected(address)
        connection.settimeout(0.5)
        out = bytearray(2)
        assert sum(connection.recv_into(memoryview(out)[index : index + 1]) for index in range(2)) == 2
        assert out == b"ab"
        with pytest.raises(TimeoutError):
            connection.recv(1)
        listener = socket.create_server(("10.0.0.1", 0))
        listener.listen()
        threads.Timer(0.1, lambda: listener.shutdown(socket.SHUT_RDWR)).start()
        with pytest.raises(OSError, match="Invalid argument"):
            listener.accept()

    for seed in SEEDS:
        world = World(seed)
        world.run(lambda world=world: main(world))


def test_a_descriptor_goes_with_the_first_byte():
    def main(world: World) -> None:
        told: list[bytes] = []

        def serve(connection) -> None:
            data, fds, _, _ = socket.recv_fds(connection, 1, 1)
            assert data == b"x"
            with os.fdopen(fds[0], "rb") as file:
                file.seek(0)
                told.append(file.read())

        _, address = served(world, serve, "AF_UNIX")
        with tempfile.TemporaryFile() as file, connected(address) as connection:
            file.write(b"content")
            file.flush()
            socket.send_fds(connection, [b"x"], [file.fileno()])
            time.sleep(1.0)
        assert told == [b"content"]

    for seed in SEEDS:
        world = World(seed)
        world.run(lambda world=world: main(world))
        assert not world.failures
