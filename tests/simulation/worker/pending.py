"""A step that the simulated device computes while the engine plans others. Implements `Pending`."""

from __future__ import annotations

from collections.abc import Callable

from raycore.messages import StepResult
from raycore.system import time


class Launched:
    """The result is there at a certain time."""

    def __init__(self, result: StepResult | None, ready_s: float, receive: Callable[[], object]) -> None:
        """`receive`: called when the host takes the result."""
        self._result = result
        self._receive = receive
        self.ready_s = ready_s

    def done(self) -> bool:
        """Whether the device has finished the step."""
        return time.monotonic() >= self.ready_s

    def result(self, timeout: float | None = None) -> StepResult | None:
        """Wait for the result. Raises TimeoutError if it takes longer than `timeout` seconds."""
        left_s = self.ready_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s if timeout is None else min(left_s, timeout))
        if not self.done():
            raise TimeoutError(f"the step takes longer than {timeout} s")
        self._receive()
        return self._result
