"""Notices at once that the Ray node of this process has ended.

Ray takes the end of a node's daemon, the raylet, for the end of the node and of all processes on it. It ends what they
have started elsewhere, and starts nothing for them any more. There is no way back: a new raylet is a new node.
"""

from __future__ import annotations

from raycore.system import select, socket, time

_CONNECT_TIMEOUT_S = 1.0
"""A raylet that is stopped or very busy takes connections later, but has not ended."""


class OwnNode:
    """A connection to the raylet, over which nothing is sent. It breaks when the raylet's process ends, and only then:
    a raylet that is slow or stopped keeps it.
    """

    def __init__(self, raylet_socket: str) -> None:
        """`raylet_socket`: the path of the Unix socket of this node's raylet."""
        self._path = raylet_socket
        self._connection: socket.socket | None = None

    def wait(self, timeout_s: float) -> bool:
        """Wait until the node has ended, at most `timeout_s` seconds. Returns whether it has."""
        deadline_s = time.monotonic() + timeout_s
        if self._connection is None:
            try:
                self._connection = _connect(self._path, min(timeout_s, _CONNECT_TIMEOUT_S))
            except (ConnectionRefusedError, FileNotFoundError):
                return True
            except OSError:  # a time-out, or this process has no file descriptor left
                time.sleep(max(0.0, deadline_s - time.monotonic()))
                return False
        poll = select.poll()  # unlike select(), it takes descriptors of any number
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, deadline_s - time.monotonic())))

    def close(self) -> None:
        """Stop watching."""
        if self._connection is not None:
            self._connection.close()


def _connect(path: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection
