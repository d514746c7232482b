"""Drafts tokens for running requests, one after the other, for all requests together.

That is done between two steps, or when a step begins that was planned before the tokens of the last one were known. A
draft's token is drawn as the request's next token will be: with its sampling parameters, its rules and its random
number for that position, only from other logits. The more alike the logits are, the more drafts are right.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raycore.decoder.network import Taps
from raycore.messages import StepPlan
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts
from raycore.parts.drafts.runner.rows import DraftRows
from raycore.parts.drafts.runner.shared_drafts import ShareDrafts, own_drafts
from raycore.profile_session import ProfiledParts
from raycore.runner.part import PendingStep, RunnerPart, StepExtra
from raycore.sampling.sampler import Sampler
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import Download
from raycore.step.device_batch import DeviceBatch, StepTensors


class DraftNetwork(Protocol):
    """Computes the logits from which drafts are drawn, with keys and values of its own."""

    taps: Taps
    """What reads the target's hidden states in its steps."""
    wants_all_rows: bool
    """Whether it reads the final ones of all tokens."""

    def parts(self) -> ProfiledParts:
        """The parts of drafting, for profiles."""
        ...

    def apply(self, plan: StepPlan) -> None:
        """Note a plan's new requests and blocks."""
        ...

    def sync(self, step: StepInputs, tensors: StepTensors) -> None:
        """Come level with what the target has computed in a step, after its tokens have been sampled."""
        ...

    def accept(self, step: StepInputs, rows: Ints) -> None:
        """Note that of the step's tokens, those in `rows` are the last ones before their slots' newest tokens."""
        ...

    def begin(self, rows: DraftRows) -> Tensor:
        """Return the logits [n, V] after each row's last known token."""
        ...

    def extend(self, rows: DraftRows, num_rows: int, offset: int) -> Tensor:
        """Return the logits [num_rows, V] after token `offset` of the drafts of the first rows."""
        ...

    def end(self, rows: DraftRows, drafts: list[list[int]]) -> None:
        """Note the drafts. All tokens but the last of each have been computed."""
        ...


class Drafting(RunnerPart):
    """Drafts tokens. This one drafts none."""

    def draft(self, slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        """Return a draft of `num_tokens[i]` tokens, at least 1, for each slot. Waits for the device."""
        return []

    def for_step(self, plan: StepPlan) -> Drafts:
        """Return drafts for a step, as its plan's `max_drafts` asks, after applying it. Waits for the device."""
        return NO_DRAFTS

    def store(self, slots: Ints, drafts: NDArray[np.int32]) -> None:
        """Take drafts of another stage, for the next step of these slots: int32[n, 1 + k], the length and the tokens
        of each."""


NO_DRAFTER = Drafting()


class StepDrafting(Drafting):
    """Drafts tokens when all that were sampled have arrived."""

    _last: PendingStep | None = None

    def launched(self, step: PendingStep) -> None:
        self._last = step

    def catch_up(self) -> None:
        """Wait for the result of the last step: drafts follow its tokens, and it says which drafts were right."""
        if self._last is not None:
            self._last.result()
            self._last = None

    def for_step(self, plan: StepPlan) -> Drafts:
        max_drafts = np.frombuffer(plan.max_drafts, np.int32).astype(np.int64)
        slots = np.frombuffer(plan.slots, np.int32).astype(np.int64)
        return self.propose(slots[max_drafts > 0], max_drafts[max_drafts > 0])

    @abstractmethod
    def propose(self, slots: Ints, limits: Ints) -> Drafts:
        """Return drafts for some of these slots, which are ascending, of at most `limits` tokens."""


class Drafter(StepDrafting):
    """Drafts tokens on one worker."""

    def __init__(
        self,
        network: DraftNetwork,
        batch: DeviceBatch,
        sampler: Sampler,
        *,
        max_tokens: int,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        share: ShareDrafts = own_drafts,
    ) -> None:
        """
        Args:
            max_tokens: maximum length of a draft.
            num_blocks: the number of blocks before the scratch blocks.
            max_model_len: longer sequences have no drafts when a step begins.
            share: tells other workers of the drafts.
        """
        self.network = network
        self._batch = batch
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self._share = share
        self._num_calls = 0

    def apply(self, plan: StepPlan) -> None:
        self.network.apply(plan)

    def wants_all_rows(self, step: StepInputs) -> bool:
        return self.network.wants_all_rows

    def taps(self, step: StepInputs) -> Taps:
        return self.network.taps

    def end_forward(self, step: StepInputs, tensors: StepTensors, extras: list[StepExtra]) -> None:
        self.network.sync(step, tensors)

    def received(self, step: StepInputs, rows: Ints) -> None:
        self.network.accept(step, rows)

    def parts(self) -> ProfiledParts:
        yield self, {"draft": "draft"}
        yield from self.network.parts()

    def propose(self, slots: Ints, limits: Ints) -> Drafts:
        counts = np.minimum(limits, self._max_model_len - self._batch.host.num_known[slots])
        asked = slots[counts > 0].tolist()
        drafts = self.draft(asked, counts[counts > 0].tolist()) if asked else []
        return self._share(Drafts.of(asked, drafts), slots, limits)

    def draft(self, slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        self._num_calls += 1
        counts = np.array(num_tokens)
        longest_first = np.argsort(-counts, kind="stable")
        counts = counts[longest_first]
        rows = DraftRows(
            self._batch,
            np.array(slots)[longest_first],
            self._max_tokens,
            self._block_size,
            self._num_blocks,
            self._num_calls,
        )
        downloads: list[Download] = []
        logits_RV = self.network.begin(rows)
        for offset in range(int(counts[0])):
            num_rows = int((counts > offset).sum())
            if offset:
                logits_RV = self.network.extend(rows, num_rows, offset - 1)
            downloads.append(self._draw(rows, num_rows, offset, logits_RV))
        drafts: list[list[int]] = [[] for _ in slots]
        for download in downloads:
            (token_ids,) = download.arrays()
            for row, token_id in enumerate(token_ids.tolist()):
                drafts[row].append(token_id)
        self.network.end(rows, drafts)
        return [drafts[row] for row in np.argsort(longest_first).tolist()]

    def _draw(self, rows: DraftRows, num_rows: int, offset: int, logits_RV: Tensor) -> Download:
        """Draw token `offset` of the first rows' drafts, and store it in the table of tokens."""
        slots, positions = rows.slots[:num_rows], rows.known[:num_rows] + offset
        token_ids_R = self._sampler.draft(logits_RV, slots, positions, self._batch)
        self._batch.write(rows.draft_indices(num_rows, offset), token_ids_R)
        download = Download([token_ids_R])
        if not self._batch.is_shared and self._sampler.changes_logits(slots):
            self._batch.host.token_ids[slots, positions] = download.arrays()[0]
        return download
