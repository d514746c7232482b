"""The interface of logits processors that users write. Names and meanings are vLLM's.

A processor changes the logits of all running requests, or of those that ask for it by `SamplingParams.extra_args`. It
sees requests by their index in a *batch*. The index of a request may change between steps, of which `update_state`
learns by a `BatchUpdate`. Importing this module doesn't import torch.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

from raycore.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from raycore.sampling.processor_config import LogitsProcessorConfig

RequestLogitsProcessor = Callable[..., Any]
"""Changes the logits of one request, float32[V]. Called with the output's token ids and the logits, or with those of
the prompt, of the output, and the logits. Returns the logits, which it may change in place."""

RemovedRequest = int
"""The index that no request has any more."""
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""Index, parameters, the prompt's token ids, and the output's. The last list is the request's own: each step appends
new tokens to it."""


class MoveDirectionality(Enum):
    """What a move does with the request at its second index."""

    UNIDIRECTIONAL = auto()
    """Nothing: there was none, or it has been removed."""
    SWAP = auto()
    """It gets the first index."""


MovedRequest = tuple[int, int, MoveDirectionality]
"""A request's old index and its new one."""


@dataclass(frozen=True)
class BatchUpdate:
    """What has happened to the batch since the last step: first requests were removed, then added, then moved.

    An added or moved request may get the index of another one that is gone. That one isn't among the removed ones then.
    """

    batch_size: int
    """Number of requests after the update."""
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes logits before tokens are picked from them. Each worker that samples has its own, for all its requests.

    What it does has to depend only on the logits and on what `update_state` tells, so that workers that sample the same
    tokens agree, and a request that starts again on another rank goes on as it would have.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check a request's parameters, in the process that submits it.

        Raises:
            ValueError: they are invalid. The caller gets it as InvalidRequest.
        """
        return

    @abstractmethod
    def __init__(self, vllm_config: LogitsProcessorConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Start without requests. `is_pin_memory`: whether to pin memory that is copied to the device."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return the changed logits, float32[batch size, V], with a row for each index. They may be changed in place.

        A row of a request that gets no token in this step has no meaning.
        """
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the largest logit of each row stays the largest. Then greedy requests don't need the processor.

        Such a processor gets logits after the temperature and min-p, and before top-k and top-p. Others get them before
        penalties.
        """
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take note of changes of the batch, and of new tokens. Called before `apply`, in each step that samples.

        `batch_update`: None if the batch is as it was.
        """
        raise NotImplementedError


class AdapterLogitsProcessor(LogitsProcessor):
    """Gives each request a logits processor of its own, which `new_req_logits_processor` makes."""

    def __init__(self, vllm_config: LogitsProcessorConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Start without requests. Subclasses with a constructor of their own have to call this one."""
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}
        """By index: the request's own processor, which takes the logits alone."""
        self.failures: dict[int, Exception] = {}
        """By index: what the request's own processor raised. The request fails, and others go on."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return what changes the logits of a request with these parameters. None: nothing does."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Make processors for added requests, and drop those of removed ones."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.req_info.pop(index, None)
        for index, params, prompt_ids, output_ids in batch_update.added:
            self.req_info.pop(index, None)
            try:
                own = self._own(params, prompt_ids, output_ids)
            except Exception as error:  # users' code may raise anything
                self.failures[index] = error
                continue
            if own is not None:
                self.req_info[index] = own
        for table in (self.req_info, self.failures):
            _move(table, batch_update.moved)

    def apply(self, logits: Tensor) -> Tensor:
        """Change the rows of requests that have a processor, in place."""
        for index, own in self.req_info.items():
            row = logits[index]
            try:
                changed = own(row)
                if changed is not row:
                    logits[index] = changed
            except Exception as error:  # users' code may raise anything
                self.failures[index] = error
        return logits

    def _own(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        made = self.new_req_logits_processor(params)
        if made is None:
            return None
        takes_prompt = len(inspect.signature(made).parameters) == 3
        return partial(made, prompt_ids, output_ids) if takes_prompt else partial(made, output_ids)


def _move(table: dict[int, Any], moves: Sequence[MovedRequest]) -> None:
    """Move the entries of a table as requests were moved, in place."""
    for source, target, direction in moves:
        moved, replaced = table.pop(source, None), table.pop(target, None)
        if moved is not None:
            table[target] = moved
        if replaced is not None and direction is MoveDirectionality.SWAP:
            table[source] = replaced
