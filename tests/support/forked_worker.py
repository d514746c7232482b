"""What the raylet of a test starts for each worker: has the fork server start it. See `fork_server`."""

import importlib.util
import json
import os
import socket
import sys


def main() -> None:
    """Pass everything on to the server and end. Without a server, become Ray's own worker script."""
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            server.connect(os.environ["RAYCORE_TEST_FORK_SERVER"])
            socket.send_fds(server, [json.dumps(request).encode()], range(3))
        except OSError:
            (ray,) = importlib.util.find_spec("ray").submodule_search_locations
            script = os.path.join(ray, "_private", "workers", "default_worker.py")
            os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])


main()
