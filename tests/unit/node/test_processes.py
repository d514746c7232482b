"""Processes end with their parents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from raycore.node.processes import is_running, send_signal, wait_until_gone

CHILD = """
import os, signal
from raycore.node.processes import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def test_a_process_that_ends_with_its_parent_does_so_while_it_is_stopped():
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            os.kill(child, signal.SIGSTOP)
            assert is_running(child)
            parent.kill()
            assert wait_until_gone([child], 60.0) == []
        finally:
            parent.kill()
            send_signal([child], signal.SIGKILL)
