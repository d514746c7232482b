"""Takes the place of one of Ray's agents on a local Ray. Run as `python -I -S idle_agent.py KIND COMMAND...`.

`KIND` is the kind of agent, and `COMMAND` is the command line of Ray's agent.

A node daemon (raylet) starts two agents and waits until they have written the ports on which they listen. Ray's
dashboard agent takes three CPU seconds to start and holds 80 MB, but does nothing without a dashboard. Its runtime
environment agent takes one CPU second and holds 50 MB, but does nothing unless a program uses a `runtime_env`. This
script imports only a little of the standard library. Instead of the dashboard agent, it writes that it listens on no
port, and waits for the daemon's end. Instead of the runtime environment agent, it listens, and becomes Ray's agent as
soon as a client connects.
"""

from __future__ import annotations

import os
import sys
import time

DASHBOARD = "dashboard"
RUNTIME_ENV = "runtime_env"

DASHBOARD_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
RUNTIME_ENV_PORT = "runtime_env_agent_port"
"""The daemon waits for a file in the session's directory for each of these ports."""

_PORT_FLAG = "runtime-env-agent-port"
_NO_PORT = -1
_POLL_INTERVAL_S = 1.0
_LISTENER_VARIABLE = "RAYCORE_IDLE_AGENT_LISTENER"


def main(kind: str, command: list[str]) -> None:
    """Return when the daemon has ended, or become Ray's agent."""
    daemon = int(os.environ["RAY_RAYLET_PID"])
    flags = dict(argument[2:].split("=", 1) for argument in command if argument.startswith("--") and "=" in argument)
    if kind == DASHBOARD:
        for name in DASHBOARD_PORTS:
            _write_port(name, _NO_PORT, flags)
        while os.getppid() == daemon:
            time.sleep(_POLL_INTERVAL_S)
    elif _LISTENER_VARIABLE in os.environ:
        _become(command, int(os.environ.pop(_LISTENER_VARIABLE)))
    else:
        _listen(command, flags, daemon)


def _listen(command: list[str], flags: dict[str, str], daemon: int) -> None:
    # not `socket`, which takes longer to import than all else
    import _socket
    from select import select

    address = flags["node-ip-address"]
    listener = _socket.socket(_socket.AF_INET6 if ":" in address else _socket.AF_INET)
    listener.bind((address, int(flags[_PORT_FLAG])))
    listener.listen()
    port = listener.getsockname()[1]
    _write_port(RUNTIME_ENV_PORT, port, flags)
    while os.getppid() == daemon:
        if select([listener], [], [], _POLL_INTERVAL_S)[0]:
            os.set_inheritable(listener.fileno(), True)
            os.environ[_LISTENER_VARIABLE] = str(listener.fileno())
            # of two values for a flag, Ray's agent takes the last
            os.execv(sys.executable, [sys.executable, "-u", __file__, RUNTIME_ENV, *command, f"--{_PORT_FLAG}={port}"])


def _become(command: list[str], listener: int) -> None:
    """Run Ray's agent, with `listener` in the place of the socket that it binds to the port.

    This replaces `socket.bind`, in this process alone.

    Why: the raylet knows the port already, and its first request is waiting at `listener`. A socket that was closed and
    bound again would lose it. Ray's agent has no option to take over a socket.

    Goes when: Ray's agent takes a listening socket, or there is no idle agent in its place: see
    `replacements.command_of_idle_agent`.
    """
    import runpy
    from socket import socket

    port = int(command[-1].partition("=")[2])
    bind = socket.bind

    def bind_or_inherit(self: socket, address: tuple[str, int] | str) -> None:
        if isinstance(address, tuple) and address[1] == port:
            os.dup2(listener, self.fileno())
            os.close(listener)
        else:
            bind(self, address)

    socket.bind = bind_or_inherit  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    runpy.run_path(command[0], run_name="__main__")


def _write_port(name: str, port: int, flags: dict[str, str]) -> None:
    path = os.path.join(flags["session-dir"], f"{name}_{flags['node-id']}")
    with open(f"{path}.new", "w") as file:
        file.write(str(port))
    os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
