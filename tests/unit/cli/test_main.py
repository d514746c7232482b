"""How the command line's process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

INTERRUPTED = """
import atexit, ctypes, os, signal, sys
from raycore.cli import main

libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)
atexit.register(print, "an exit function")
main._generate = lambda args: os.kill(os.getpid(), signal.SIGTERM)
sys.argv[1:] = ["generate", "1 + 2 ="]
sys.exit(main.main())
"""


def test_an_interrupted_command_runs_its_exit_functions_and_no_destructors():
    """A destructor of Ray's crashes if Ray was being started: `abort` stands in for it."""
    program = [sys.executable, "-c", INTERRUPTED]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "an exit function\n"), ended.stderr
    assert ended.stderr == "raycore: ended by SIGTERM\n"


PRINTING = """
import sys
from raycore.cli import main

main._generate = lambda args: print("an output") or 0
sys.argv[1:] = ["generate", "1 + 2 ="]
sys.exit(main.main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk_fails_in_one_line(unbuffered):
    program, environment = [sys.executable, "-c", PRINTING], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            program, stdout=full, stderr=subprocess.PIPE, env=environment, text=True, timeout=60, check=False
        )
    assert ended.stderr == "raycore: the output can't be written: No space left on device\n"
    assert ended.returncode == 1
