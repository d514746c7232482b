"""What the raylet of a test session starts for each worker: has the job's fork server start it. See `fork_server`."""

import array
import importlib.util
import json
import os
import socket
import sys


def main() -> None:
    """Pass everything on to the server and end. Without a server, become Ray's own worker script."""
    path = os.path.join(os.environ["RAYCORE_TEST_FORK_SERVERS"], os.environ.get("RAY_JOB_ID", ""))
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError:
            (ray,) = importlib.util.find_spec("ray").submodule_search_locations
            script = os.path.join(ray, "_private", "workers", "default_worker.py")
            os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])
        request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd()}
        text = json.dumps(request).encode()
        streams = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", range(3)))
        sent = connection.sendmsg([text], [streams])
        connection.sendall(text[sent:])


main()
