"""What the raylet of a test starts for each worker: has the fork server start it. See `fork_server`.

It imports little, to take little time.
"""

import marshal
import posix
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_SEQPACKET, SOL_SOCKET, socket

SOCKET_VARIABLE = "RAYCORE_TEST_FORK_SERVER"
"""Environment variable with the path of the server's Unix socket."""


def request(kind: str, arguments: list[str]) -> socket:
    """Have the server start a process with the environment, directory and streams of this one."""
    server = socket(AF_UNIX, SOCK_SEQPACKET)
    server.connect(posix.environ[SOCKET_VARIABLE.encode()])
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
    message = marshal.dumps((kind, arguments, posix.environ, posix.getcwd()))
    server.sendmsg([message], [(SOL_SOCKET, SCM_RIGHTS, streams)])
    return server


if __name__ == "__main__":
    request("worker", sys.argv[1:])
