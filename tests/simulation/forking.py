"""Runs programs of the simulated world as forks of a process that has imported what they need.

A program takes seconds of CPU to import, and a seed less than half of one. See `conftest.py`.
"""

from __future__ import annotations

import gc
import io
import os
import runpy
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

_LIMIT_S = 1500.0
"""Real seconds that a program may take."""
_GRACE_S = 60.0
"""And so many more to say that it has taken too long."""
_IMPORTED = ("bereft", "budgets", "engine.faults", "engine.scenario", "exits", "forks", "owners", "places", "shrinking")
"""What programs need besides the control plane and a cluster."""


class Programs:
    """A process that runs programs, in this project's folder or a link to it, with one seed for hashes."""

    def __init__(self, root: Path, hash_seed: str) -> None:
        self._connection, theirs = Pipe()
        paths = [str(root / name) for name in ("", "tests", "tests/support")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "simulation.forking", str(theirs.fileno())],
            cwd=root.parent,  # a process would take the working directory's real path
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": hash_seed},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Return the exit status of a module that runs as a program with these arguments, and what it prints.

        Raises:
            TimeoutError: it hasn't ended in time.
            EOFError: the process that runs programs has ended.
        """
        self._connection.send((module, arguments))
        if not self._connection.poll(_LIMIT_S + _GRACE_S):
            raise TimeoutError(f"{module} {' '.join(arguments)} hasn't ended within {_LIMIT_S:g} s")
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.kill()  # it may be in a program that nobody waits for any more
        self._process.wait(_GRACE_S)


def _serve(connection: Connection) -> None:
    """Run programs, one after the other, until the other side closes the connection."""
    from simulation.apart import Died, run_apart
    from simulation.installation import install

    install()
    for name in _IMPORTED:
        import_module(f"simulation.{name}")
    gc.collect()
    gc.freeze()  # forks don't touch, and so don't copy, what is there already
    while True:
        try:
            module, arguments = connection.recv()
        except EOFError:
            return
        ended = run_apart(partial(_run, module, arguments), _LIMIT_S)
        if isinstance(ended, Died):
            ended = subprocess.CompletedProcess([module, *arguments], 1, "", ended.reason)
        connection.send(ended)


def _run(module: str, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    printed, said = io.StringIO(), io.StringIO()
    sys.argv, status = [module, *arguments], 0
    with redirect_stdout(printed), redirect_stderr(said):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            status = 1
    return subprocess.CompletedProcess([module, *arguments], status, printed.getvalue(), said.getvalue())


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
