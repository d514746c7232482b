"""Takes the place of Ray's dashboard agent on a local Ray. Run with the agent's own arguments.

A node daemon (raylet) needs a dashboard agent to start. Without a dashboard, Ray's agent does nothing, but takes two
CPU seconds to start and holds 120 MB. This script imports only a little of the standard library. It tells the daemon
that it listens on no port, and waits for the daemon's end.
"""

from __future__ import annotations

import os
import sys
import time

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""The daemon waits for a file in the session's directory for each of these ports."""

_NO_PORT = "-1"
_POLL_INTERVAL_S = 1.0


def main(arguments: list[str]) -> None:
    """Write the files of the ports, and wait until the daemon has ended."""
    daemon = int(os.environ["RAY_RAYLET_PID"])
    flags = dict(argument[2:].split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument)
    for name in PORTS:
        path = os.path.join(flags["session-dir"], f"{name}_{flags['node-id']}")
        with open(f"{path}.new", "w") as file:
            file.write(_NO_PORT)
        os.replace(f"{path}.new", path)
    while os.getppid() == daemon:
        time.sleep(_POLL_INTERVAL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
