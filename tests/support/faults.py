"""Faults that strike a running engine in a step of the test's choice, whatever the speed of the machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from raycore import LLM


def signal_in_step(llm: LLM, dp_rank: int, pid: int, num_steps: int, number: int = signal.SIGKILL) -> None:
    """Have a rank's first worker send a signal to a process when the rank's `num_steps`th step from now begins."""

    def send() -> None:
        os.kill(pid, number)

    _call_in_step(llm, dp_rank, num_steps, send)


def raise_in_step(llm: LLM, dp_rank: int, num_steps: int) -> None:
    """Have the `num_steps`th step from now raise in a rank's first worker."""

    def fail() -> None:
        raise RuntimeError("a fault was injected")

    _call_in_step(llm, dp_rank, num_steps, fail)


def _call_in_step(llm: LLM, dp_rank: int, num_steps: int, fault: Callable[[], None]) -> None:
    """`fault` must be a nested function, which is pickled by value: workers can't import this module."""
    struck = next(info.worker_pids[0] for info in llm.engine_infos if info.dp_rank == dp_rank)

    def count_steps(worker) -> None:
        if os.getpid() != struck:
            return
        execute, num_left = worker.execute_model, num_steps

        def execute_model(plan):
            nonlocal num_left
            num_left -= 1
            if num_left == 0:
                fault()
            return execute(plan)

        worker.execute_model = execute_model

    llm.collective_rpc(count_steps)
