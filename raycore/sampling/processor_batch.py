"""Runs users' logits processors: which request has which index of their batch, and what follows if one raises.

Requests get an index with their first token. An error in a processor fails the requests of the step, or only those that
caused it if that is known. The processors then start anew with the requests that are left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.sampling.logits_processors import (
    AdapterLogitsProcessor,
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
)
from raycore.sampling_params import SamplingParams
from raycore.step.copies import to_device
from raycore.step.device_batch import DeviceBatch

logger = logging.getLogger(__name__)

MakeProcessors = Callable[[], Sequence[LogitsProcessor]]


class _ProcessorError(Exception):
    """A processor has raised an error. The message names its class."""


class ProcessorBatch:
    """The running requests of one worker as its logits processors see them."""

    def __init__(self, make: MakeProcessors) -> None:
        """
        Args:
            make: makes the processors, without requests. Called here, and again after an error of theirs.
        """
        self._make = make
        self._params: dict[int, SamplingParams] = {}
        """By slot, of all requests of the worker."""
        self._order: list[int] = []
        """By index of the batch: the slot of its request, or -1 if the request is gone."""
        self._index: dict[int, int] = {}
        """By slot: the index of its request."""
        self._outputs: dict[int, list[int]] = {}
        """By slot: the output, in the list that processors have."""
        self._failures: dict[int, str] = {}
        """By slot: why its request fails in this step."""
        self._slots: list[int] = []
        """Of the current step: each row's slot."""
        self._is_broken = False
        """Whether the processors have to start anew."""
        self._processors = list(make())
        self.changes_draws = any(each.is_argmax_invariant() for each in self._processors)
        """Whether any processor gets logits after the temperature."""

    def add(self, slot: int, params: SamplingParams) -> None:
        """Note the request that gets `slot`, in place of an earlier one."""
        self.remove(slot)
        self._params[slot] = params

    def remove(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self._params.pop(slot, None)
        self._outputs.pop(slot, None)
        index = self._index.pop(slot, None)
        if index is not None:
            self._order[index] = -1

    def begin(self, slots: NDArray[np.integer], positions: NDArray[np.integer], batch: DeviceBatch) -> None:
        """Tell the processors of a step that samples a token for each of these slots, at these positions."""
        self._failures, self._slots = {}, slots.tolist()
        for slot, position in zip(self._slots, positions.tolist(), strict=True):
            output, first = self._outputs.setdefault(slot, []), int(batch.num_prompt[slot])
            output.extend(batch.token_ids[slot, first + len(output) : position].tolist())
        new = [slot for slot in self._slots if slot not in self._index]
        if not self._update(new, batch, blamed=new or self._slots):
            # the new requests may be the cause: go on without them
            others = [slot for slot in self._slots if slot not in self._failures]
            self._update(others, batch, blamed=self._slots)
        self._note_own_failures()

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Return the logits of the step's rows, changed by the processors that may change the most likely token.

        `logits_RV`: float32. May be changed in place.
        """
        return self._apply(logits_RV, are_invariant=False)

    def apply_to_draws(self, logits_RV: Tensor) -> Tensor:
        """The same for processors that don't change the most likely token."""
        return self._apply(logits_RV, are_invariant=True)

    def failed(self, slots: NDArray[np.integer]) -> list[tuple[int, str]]:
        """Return (row, reason) for each row whose request can't continue."""
        if not self._failures:
            return []
        return [(row, self._failures[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._failures]

    def _update(self, new: Sequence[int], batch: DeviceBatch, *, blamed: Sequence[int]) -> bool:
        """Add new requests, and tell the processors of all changes. Returns whether no processor has raised an error.

        Otherwise, the requests in the slots `blamed` fail.
        """
        try:
            if self._is_broken:
                self._processors, self._is_broken = list(self._make()), False
            update = self._changes(new, batch)
            for processor in self._processors:
                with _naming(processor, "update_state"):
                    processor.update_state(update)
        except Exception as error:  # users' code may raise anything
            self._fail(blamed, error)
            return False
        return True

    def _changes(self, new: Iterable[int], batch: DeviceBatch) -> BatchUpdate | None:
        """Give new requests indexes, and move the last ones to where others have left. Returns what has changed."""
        order = self._order
        added: list[AddedRequest] = []
        moved: list[MovedRequest] = []
        removed: list[int] = []
        holes = [index for index, slot in enumerate(order) if slot < 0]
        for slot in new:
            index = holes.pop(0) if holes else len(order)
            order[index : index + 1] = [slot]
            prompt = batch.token_ids[slot, : int(batch.num_prompt[slot])].tolist()
            added.append((index, self._params[slot], prompt, self._outputs[slot]))
        removed += _strip(order)
        for hole in holes:
            if hole >= len(order):
                break
            moved.append((len(order) - 1, hole, MoveDirectionality.UNIDIRECTIONAL))
            order[hole] = order.pop()
            removed += _strip(order)
        if not added and not moved and not removed:
            return None
        self._index = {slot: index for index, slot in enumerate(order)}
        return BatchUpdate(len(order), removed, added, moved)

    def _apply(self, logits_RV: Tensor, *, are_invariant: bool) -> Tensor:
        if self._is_broken:
            return logits_RV
        try:
            processors = [each for each in self._processors if each.is_argmax_invariant() == are_invariant]
            if not processors or not self._order:
                return logits_RV
            rows = np.array([row for row, slot in enumerate(self._slots) if slot in self._index], np.int64)
            indexes = np.array([self._index[self._slots[row]] for row in rows.tolist()], np.int64)
            if len(rows) == len(logits_RV) and np.array_equal(indexes, np.arange(len(self._order))):
                return self._apply_all(processors, logits_RV)
            rows_K, indexes_K = to_device(rows, logits_RV.device), to_device(indexes, logits_RV.device)
            logits_NV = logits_RV.new_zeros(len(self._order), logits_RV.shape[1])
            logits_NV.index_copy_(0, indexes_K, logits_RV.index_select(0, rows_K))
            changed_NV = self._apply_all(processors, logits_NV)
            return logits_RV.index_copy(0, rows_K, changed_NV.index_select(0, indexes_K))
        except Exception as error:  # users' code may raise anything
            self._fail(self._slots, error)
            return logits_RV
        finally:
            self._note_own_failures()

    def _apply_all(self, processors: Iterable[LogitsProcessor], logits_NV: Tensor) -> Tensor:
        for processor in processors:
            with _naming(processor, "apply"):
                logits_NV = _checked(processor.apply(logits_NV), logits_NV)
        return logits_NV

    def _fail(self, slots: Sequence[int], error: Exception) -> None:
        """Let requests fail. The processors start anew with those that are left."""
        logger.error("requests fail, and logits processors start anew: %s", error, exc_info=error)
        self._failures |= dict.fromkeys(slots, str(error))
        self._order, self._index, self._is_broken = [], {}, True

    def _note_own_failures(self) -> None:
        """Let requests fail whose own processors have raised an error."""
        if self._is_broken:
            return
        for processor in self._processors:
            if not isinstance(processor, AdapterLogitsProcessor):
                continue
            for index, error in processor.failures.items():
                processor.req_info.pop(index, None)
                logger.error("a request fails: %s", (reason := _reason(processor, error)), exc_info=error)
                self._failures[self._order[index]] = reason
            processor.failures.clear()


def _checked(changed: object, logits_NV: Tensor) -> Tensor:
    """What a processor has returned for these logits, as float32. Raises TypeError if that isn't their shape."""
    if not isinstance(changed, Tensor) or changed.shape != logits_NV.shape:
        what = f"shape {list(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
        raise TypeError(f"it returned {what} for logits of shape {list(logits_NV.shape)}")
    return changed.to(torch.float32)


def _strip(order: list[int]) -> list[int]:
    """Remove the indexes at the end that have no request. Returns them."""
    removed: list[int] = []
    while order and order[-1] < 0:
        order.pop()
        removed.append(len(order))
    return removed


@contextmanager
def _naming(processor: LogitsProcessor, method: str) -> Generator[None, None, None]:
    """Name the processor in an error that it raises."""
    try:
        yield
    except Exception as error:  # users' code may raise anything
        raise _ProcessorError(_reason(processor, error, method)) from error


def _reason(processor: LogitsProcessor, error: Exception, method: str | None = None) -> str:
    name = f"{type(processor).__module__}.{type(processor).__qualname__}"
    return f"the logits processor {name} failed{f' in {method}()' if method else ''}: {type(error).__name__}: {error}"
