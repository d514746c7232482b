"""Which rows of a step a worker computes: all of them, unless workers divide them (`DividedRows`)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from raycore.step.batch import Ints, StepInputs


class StepRows(Protocol):
    """The rows of one step at a time: call `begin` before each step's layers."""

    @property
    def is_divided(self) -> bool:
        """Whether other workers compute some of the step's rows."""
        ...

    def begin(self, step: StepInputs) -> None:
        """Divide the rows of `step`, if there are enough."""
        ...

    def count(self, step: StepInputs) -> int:
        """Return how many of the step's rows are this worker's."""
        ...

    def of_numbers(self, numbers_T: Ints) -> Ints:
        """Return this worker's of the numbers of all rows, on the host."""
        ...

    def own(self, x_TX: Tensor) -> Tensor:
        """Return this worker's rows of all."""
        ...

    def gather(self, own_TX: Tensor) -> Tensor:
        """Return the rows of all workers, in the order of the step."""
        ...

    def of_first(self, x: Tensor) -> Tensor:
        """Return the `x` of the first of the workers. They compute the same, but may round differently."""
        ...

    def leave(self) -> None:
        """Disconnect from the other workers. Idempotent."""
        ...


class AllRows:
    """This worker computes all rows. Implements `StepRows`."""

    is_divided = False

    def begin(self, step: StepInputs) -> None:
        """Do nothing: there is nothing to divide."""

    def count(self, step: StepInputs) -> int:
        return len(step.positions)

    def of_numbers(self, numbers_T: Ints) -> Ints:
        return numbers_T

    def own(self, x_TX: Tensor) -> Tensor:
        return x_TX

    def gather(self, own_TX: Tensor) -> Tensor:
        return own_TX

    def of_first(self, x: Tensor) -> Tensor:
        return x

    def leave(self) -> None:
        """Do nothing: there are no others."""


ALL_ROWS = AllRows()
