"""A notebook's kernel for tests: the interpreter that runs the tests, whatever kernels are installed on the machine."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import forked_ray
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

TIMEOUT_S = 120
"""For one cell."""


class _ThisInterpreter(KernelSpecManager):
    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        launcher = find_spec("ipykernel_launcher")
        assert launcher is not None
        command = [sys.executable, forked_ray.__file__, launcher.origin, "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


class Kernel:
    """Runs cells, one after the other, and keeps them with their outputs in `notebook`."""

    def __init__(self, client: NotebookClient) -> None:
        self.notebook = client.nb
        self._client = client

    def run(self, source: str, *, interrupted_after: str | None = None) -> Any:
        """Run a cell. Returns it, with its outputs.

        Args:
            interrupted_after: press the stop button once the cell has printed this.

        Raises:
            CellExecutionError: the cell raised; the message has its traceback.
        """
        cell = new_code_cell(source)
        self.notebook.cells.append(cell)
        presser = threading.Thread(target=self._press_stop, args=(cell, interrupted_after))
        if interrupted_after is not None:
            presser.start()
        try:
            return self._client.execute_cell(cell, len(self.notebook.cells) - 1)
        finally:
            if interrupted_after is not None:
                presser.join()

    def _press_stop(self, cell: Any, after: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S / 2
        while after not in text_of(cell) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        asyncio.run(self._client.km.interrupt_kernel())


@contextmanager
def running_kernel(directory: str, environment: Mapping[str, str]) -> Generator[Kernel, None, None]:
    """A kernel in that working directory; it is shut down as a notebook's server does it."""
    with TemporaryDirectory(prefix="rk", dir="/tmp") as sockets:
        # ports would be chosen now and taken later, perhaps by another process
        manager = AsyncKernelManager(
            kernel_spec_manager=_ThisInterpreter(), transport="ipc", ip=os.path.join(sockets, "kernel")
        )
        client = NotebookClient(new_notebook(), km=manager, timeout=TIMEOUT_S, coalesce_streams=True)
        client.owns_km = True
        with client.setup_kernel(cwd=directory, env=dict(environment)):
            yield Kernel(client)


def text_of(cell: Any, with_stderr: bool = True) -> str:
    """What a cell shows as text: printed, and the plain form of its results."""
    outputs = [output for output in cell.get("outputs", []) if with_stderr or output.get("name") != "stderr"]
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def html_of(cell: Any) -> str:
    """What a cell shows as HTML."""
    return "".join(output["data"].get("text/html", "") for output in cell.outputs if "data" in output)
