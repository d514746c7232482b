"""The running requests on a worker's device: their tokens and block tables, by slot.

The host knows everything about a step from its plan, except which tokens earlier steps have sampled. So tokens stay on
the device: a step reads its input there, and appends there what it samples. The next step can therefore start before
the host has seen this step's tokens. On a CPU, host and device share the memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.messages import StepPlan
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts
from raycore.step.batch import Ints, SlotBatch, StepInputs, ids_by_group
from raycore.step.copies import DeviceInputs, to_device, to_device_together


@dataclass(slots=True)
class StepTensors:
    """A step's inputs on the device. G groups of the KV cache, S slots, M blocks of a slot, T tokens, R rows from which
    a token is sampled."""

    block_tables_SM: Tensor
    """int32[S, M]: the blocks of each slot, of the only group or of the first one."""
    slots_T: Tensor
    """int32[T]: each token's slot. -1: the row is padding."""
    positions_T: Tensor
    """int64[T]: each token's position in its sequence."""
    indices_T: Tensor
    """int64[T]: each token's index in the flat table of tokens."""
    next_indices_R: Tensor
    """int64[R]: the index in the flat table of tokens that each sampled token gets."""
    sampled_rows_R: Tensor | None
    """int64[R]: the rows, among the T tokens, from which a token is sampled. None: the first R."""
    is_padded: bool = False
    """Whether the tensors are those of every step of decodes of this size, for graphs. The rows after the first R are
    padding."""
    group_tables_GSM: Tensor | None = None
    """int32[G, S, M]: the blocks of each slot, by group. None: there is only one group."""
    axes_T3: Tensor | None = None
    """int64[T, 3]: each token's frame, row and column, if these rotate it. None: its position does."""
    ends_T: Tensor | None = None
    """int32[T]: how many of its sequence's first tokens each token sees. None: all up to itself."""

    @property
    def turning_positions(self) -> Tensor:
        """What rotates each token: its position [T], or three of them [T, 3]."""
        return self.positions_T if self.axes_T3 is None else self.axes_T3

    def first(self, num_tokens: int) -> StepTensors:
        """Return the tensors without the padding after the first `num_tokens` tokens."""
        if len(self.slots_T) == num_tokens:
            return self
        by_token = self.slots_T, self.positions_T, self.indices_T
        slots_T, positions_T, indices_T = (each[:num_tokens] for each in by_token)
        return StepTensors(
            self.block_tables_SM,
            slots_T,
            positions_T,
            indices_T,
            self.next_indices_R,
            None,
            group_tables_GSM=self.group_tables_GSM,
            axes_T3=None if self.axes_T3 is None else self.axes_T3[:num_tokens],
            ends_T=self.ends_T,
        )


class DeviceBatch:
    """The running requests' tokens and block tables, on the device and on the host."""

    def __init__(
        self,
        host: SlotBatch,
        device: torch.device,
        *,
        decode_sizes: Sequence[int] = (),
        is_shared: bool | None = None,
    ) -> None:
        """
        Args:
            decode_sizes: numbers of rows, ascending, to which steps that only decode are padded.
            is_shared: whether host and device have the same memory, as they have on a CPU by default.
        """
        self.host = host
        self.device = device
        self._decode_sizes: Sequence[int] = decode_sizes
        self._decode_inputs: dict[int, tuple[DeviceInputs, StepTensors]] = {}
        """The inputs of steps that only decode, by their padded number of rows."""
        self.is_shared = device.type == "cpu" if is_shared is None else is_shared
        """Whether host and device have the same memory."""
        self.token_ids_SM = torch.as_tensor(host.token_ids)
        """int32[S, max_model_len + 1]: prompt, then output, with all tokens sampled so far."""
        self._group_tables_GSM = torch.as_tensor(host.group_tables)
        if not self.is_shared:
            self.token_ids_SM = torch.zeros_like(self.token_ids_SM, device=device)
            self._group_tables_GSM = torch.zeros_like(self._group_tables_GSM, device=device)
        self._block_tables_SM = self._group_tables_GSM[0]
        self._token_ids = self.token_ids_SM.view(-1)

    def pad_no_more(self) -> None:
        """Pad no steps from now on."""
        self._decode_sizes = ()
        self._decode_inputs = {}

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The host's copy of `token_ids_SM`, in which a GPU's newest tokens may be missing."""
        return self.host.token_ids

    @property
    def num_prompt(self) -> Ints:
        """[S]: number of tokens in each slot's prompt."""
        return self.host.num_prompt

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's freed slots, new requests and new blocks."""
        indices = self.host.apply(plan)
        if self.is_shared:
            return
        tables_GSM, num_groups = self._group_tables_GSM, len(self._group_tables_GSM)
        for request in plan.new_requests:
            token_ids = np.array(np.frombuffer(request.token_ids, np.int32))
            block_ids = ids_by_group(request.block_ids, num_groups)
            self.token_ids_SM[request.slot, : len(token_ids)] = to_device(token_ids, self.device)
            tables_GSM[:, request.slot, : block_ids.shape[1]] = to_device(block_ids, self.device)
        if len(indices):
            block_ids = ids_by_group(plan.new_block_ids, num_groups)
            indices_B, block_ids_GB = to_device_together([indices, block_ids], self.device)
            tables_GSM.view(num_groups, -1).index_copy_(1, indices_B, block_ids_GB)

    def advance(self, plan: StepPlan, drafts: Drafts = NO_DRAFTS) -> tuple[StepInputs, StepTensors]:
        """Return the tokens that the plan computes, and count them as computed. `drafts`: as in `SlotBatch.advance`."""
        row_length = self.host.token_ids.shape[1]
        if len(drafts) and not self.is_shared:
            slots, positions = self.host.places_of(drafts)
            self.write(*to_device_together([slots * row_length + positions, drafts.token_ids], self.device))
        step = self.host.advance(plan, drafts)
        indices = step.token_slots * row_length + step.positions
        if plan.tokens is not None and not self.is_shared:
            token_ids = np.array(np.frombuffer(plan.tokens.token_ids, np.int32))
            indices_T, token_ids_T = to_device_together([indices, token_ids], self.device)
            self._token_ids.index_copy_(0, indices_T, token_ids_T)
        arrays: list[NDArray[Any]] = [
            step.token_slots.astype(np.int32),
            step.positions,
            indices,
            step.sampled_slots * row_length + step.next_positions,
        ]
        features = step.features
        axes = None if features is None else features.axes
        if axes is not None:
            arrays.append(axes)
        is_plain = features is None or not features.rows
        if step.is_decoding:
            index = bisect_left(self._decode_sizes, len(step.positions))
            if is_plain and index < len(self._decode_sizes):
                return step, self._padded(arrays, self._decode_sizes[index])
        else:
            arrays.append(step.sampled_rows)
        if features is not None and features.ends is not None:
            arrays.append(features.ends)
        slots_T, positions_T, indices_T, next_indices_R, *others = to_device_together(arrays, self.device)
        axes_T3 = None if axes is None else others.pop(0)
        sampled_rows_R = None if step.is_decoding else others.pop(0)
        return step, StepTensors(
            self._block_tables_SM,
            slots_T,
            positions_T,
            indices_T,
            next_indices_R,
            sampled_rows_R,
            group_tables_GSM=self._group_tables_GSM,
            axes_T3=axes_T3,
            ends_T=others[0] if others else None,
        )

    def _padded(self, arrays: list[NDArray[Any]], size: int) -> StepTensors:
        """Return the inputs of a step of decodes, padded to `size` rows. They are valid until the next such step."""
        num_rows = len(arrays[0])
        if size not in self._decode_inputs:
            inputs = DeviceInputs([np.empty((size, *array.shape[1:]), array.dtype) for array in arrays], self.device)
            slots_T, positions_T, indices_T, next_indices_R, *axes = inputs.tensors
            self._decode_inputs[size] = (
                inputs,
                StepTensors(
                    self._block_tables_SM,
                    slots_T,
                    positions_T,
                    indices_T,
                    next_indices_R,
                    None,
                    is_padded=True,
                    group_tables_GSM=self._group_tables_GSM,
                    axes_T3=axes[0] if axes else None,
                ),
            )
        inputs, tensors = self._decode_inputs[size]
        for own, array in zip(inputs.arrays, arrays, strict=True):
            own[:num_rows] = array
        slots, positions, indices, _, *axes = inputs.arrays
        slots[num_rows:] = -1
        for each in (positions, indices, *axes):
            each[num_rows:] = 0
        inputs.send()
        return replace(tensors, next_indices_R=tensors.next_indices_R[:num_rows])

    def token_ids_of(self, tensors: StepTensors) -> Tensor:
        """Return int32[T]: the tokens that the step computes."""
        return self.token_ids_at(tensors.indices_T)

    def token_ids_at(self, indices: Tensor) -> Tensor:
        """Return the tokens at these indexes in the flat table of tokens, int32."""
        return self._token_ids.index_select(0, indices)

    def append(self, tensors: StepTensors, token_ids_R: Tensor) -> None:
        """Append the sampled tokens to their sequences, on the device."""
        self.write(tensors.next_indices_R, token_ids_R)

    def write(self, indices: Tensor, token_ids: Tensor) -> None:
        """Set the tokens at these indexes in the flat table of tokens, on the device."""
        if self.is_shared:
            # with few numbers, numpy's call takes a fraction of torch's
            self.host.token_ids.ravel()[indices.numpy()] = token_ids.numpy()
        else:
            self._token_ids.index_copy_(0, indices, token_ids.to(torch.int32))

    def append_later(self, step: StepInputs, indices_R: Tensor, token_ids_R: Tensor) -> None:
        """Append tokens that another worker has sampled, except for requests that have lost their slots since.

        Args:
            indices_R: the step's `StepTensors.next_indices_R`.
        """
        is_current = self.host.is_current(step)
        if not is_current.all():
            rows = to_device(np.flatnonzero(is_current), self.device)
            indices_R, token_ids_R = indices_R[rows], token_ids_R[rows]
        self.write(indices_R, token_ids_R)

    def receive(self, step: StepInputs, token_ids: NDArray[np.generic]) -> None:
        """Append a step's sampled tokens, which have arrived from the device, to the host's copy."""
        if not self.is_shared:
            self.host.receive(step, token_ids)
