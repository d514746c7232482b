"""Runs steps on one worker, with its part of the model: turns a `StepPlan` into a `StepResult`.

A step applies the plan, runs the decoder, samples tokens, and appends them to their sequences. This module knows
nothing of processes, memory limits, or where the weights come from.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.messages import StepPlan, StepResult, TokenLogprobs
from raycore.model.attention.spec import Attention
from raycore.model.batch import SlotBatch, StepInputs
from raycore.model.compute_threads import ComputeThreads
from raycore.model.decoder import Decoder
from raycore.model.experts import ExpertParallel
from raycore.model.operations import Operations
from raycore.model.rows import TILE_ROWS
from raycore.model.sampling.logprobs import token_logprobs
from raycore.model.sampling.sampler import Sampler, rows_at_a_time

_PromptLogprobs = list[tuple[int, int, list[TokenLogprobs]]]


class ModelRunner:
    """Runs steps on one worker, one after the other."""

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        batch: SlotBatch,
        sampler: Sampler,
        operations: Operations,
        *,
        threads: ComputeThreads | None = None,
        reports: bool = True,
        experts: ExpertParallel | None = None,
    ) -> None:
        """
        Args:
            threads: chooses the number of compute threads on a CPU. None: one.
            reports: whether this worker reports prompt logprobs. One worker of an engine does.
            experts: the ranks of several engines that share experts and therefore run every step together. None: there
                are none.
        """
        self._decoder = decoder
        self._attention = attention
        self._batch = batch
        self._sampler = sampler
        self._operations = operations
        self._threads = threads or ComputeThreads()
        self._reports = reports
        self._experts = experts
        self._prompt_logprobs: dict[int, int] = {}
        """For requests with prompt logprobs, by slot: how many of the most likely tokens to report at each position."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step, as described in `StepPlan`, and return its result."""
        try:
            return self._execute(plan)
        finally:
            self._threads.end_step()

    def _execute(self, plan: StepPlan) -> StepResult:
        self._update_requests(plan)
        self._batch.apply(plan)
        step = self._batch.advance(plan)
        token_ids = np.full(len(step.slots), -1, np.int32)
        result = StepResult(plan.step)
        if self._experts is not None:
            result.is_anyone_busy = self._begin_together(self._experts, step)
        if len(step.slots):
            logits_RV = self._compute(step, result)
            if len(step.sampled):
                token_ids[step.sampled] = self._sample(step, logits_RV, result)
        result.token_ids = token_ids.tobytes()
        return result

    def _begin_together(self, experts: ExpertParallel, step: StepInputs) -> bool:
        """Exchange numbers of tokens with the other engines. Returns whether any engine has a token.

        If only other engines have tokens, runs this rank's experts for them.
        """
        num_kept = len(step.token_ids) if self._wants_all_rows(step) else len(step.sampled)
        is_anyone_busy = experts.begin(len(step.token_ids), num_kept)
        if is_anyone_busy and not len(step.slots):
            self._choose_threads(experts.num_tokens)
            self._decoder.forward_nothing()
        return is_anyone_busy

    def _update_requests(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            self._sampler.remove(slot)
            self._prompt_logprobs.pop(slot, None)
        for new in plan.new_requests:
            self._sampler.add(new.slot, new.params, new.seed, new.eos_token_ids, new.bad_words_token_ids)
            if new.params.prompt_logprobs is not None:
                self._prompt_logprobs[new.slot] = new.params.prompt_logprobs

    def _compute(self, step: StepInputs, result: StepResult) -> Tensor:
        """Run the decoder. Returns logits [R, V] of the rows from which a token is sampled.

        Adds prompt logprobs to `result`.
        """
        num_tokens = len(step.token_ids) if self._experts is None else self._experts.num_tokens
        self._choose_threads(num_tokens, num_keys=int(step.starts.sum() + step.counts.sum()))
        self._attention.begin(step, self._batch.block_tables)
        last_rows = step.last_rows
        wants_all = self._wants_all_rows(step)
        sampled_rows = None
        if len(step.sampled) < len(step.token_ids):
            sampled_rows = self._to_device(last_rows[step.sampled])
        hidden = self._decoder.forward(
            self._to_device(step.token_ids),
            self._attention,
            None if wants_all else sampled_rows,
            self._threads.adapt,
        )
        if wants_all:
            result.prompt_logprobs = self._report_prompts(step, hidden, last_rows)
            if sampled_rows is not None:
                hidden = hidden.index_select(0, sampled_rows)
        return self._decoder.logits(hidden)

    def _wants_all_rows(self, step: StepInputs) -> bool:
        """Whether a request in the step asked for prompt logprobs."""
        return bool(self._prompt_logprobs) and not self._prompt_logprobs.keys().isdisjoint(step.slots.tolist())

    def _choose_threads(self, num_tokens: int, num_keys: int = 0) -> None:
        """`num_keys`: how many tokens' keys and values attention reads in each layer."""
        if self._threads.is_fixed:
            num_tokens, num_keys = TILE_ROWS, 0  # every step uses the same number of threads
        num_cached = num_keys * self._decoder.num_key_value_numbers
        self._threads.begin_step(num_tokens, self._decoder.num_weights, num_cached)

    def _report_prompts(self, step: StepInputs, hidden_TD: Tensor, last_rows: NDArray[np.int64]) -> _PromptLogprobs:
        """Return the logprobs of those prompt tokens that follow a token computed in this step."""
        entries: _PromptLogprobs = []
        for index, slot in enumerate(step.slots.tolist()):
            first = int(step.starts[index]) + 1
            end = min(first + int(step.counts[index]), int(self._batch.num_prompt[slot]))
            if slot not in self._prompt_logprobs or first >= end:
                continue
            row = int(last_rows[index] - step.counts[index] + 1)
            logprobs = self._prompt_logprobs_of(slot, first, hidden_TD[row : row + end - first])
            if self._reports:
                entries.append((index, first, logprobs))
        return entries

    def _prompt_logprobs_of(self, slot: int, first: int, hidden_TD: Tensor) -> list[TokenLogprobs]:
        """Return the logprobs of a prompt's tokens from position `first` on, one for each row of `hidden_TD`.

        A few rows are computed at a time. Empty if this worker doesn't report: it then only takes part in computing the
        logits.
        """
        logprobs: list[TokenLogprobs] = []
        size = rows_at_a_time(self._decoder.vocab_size)
        for start in range(0, len(hidden_TD), size):
            logits_TV = self._decoder.logits(hidden_TD[start : start + size])
            if self._reports:
                next_ids = self._batch.token_ids[slot, first + start : first + start + len(logits_TV)]
                num_likely = [self._prompt_logprobs[slot]] * len(next_ids)
                logprobs += token_logprobs(self._operations.logprobs, logits_TV, next_ids, num_likely)
        return logprobs

    def _sample(self, step: StepInputs, logits_RV: Tensor, result: StepResult) -> NDArray[np.int32]:
        """Sample a token for each slot that gets one, and append it to the slot's known tokens. Returns the tokens."""
        slots = step.slots[step.sampled]
        if self._sampler.is_plain_greedy(slots):
            token_ids = self._operations.most_likely(logits_RV).to("cpu", torch.int32).numpy()
        else:
            positions = step.starts[step.sampled] + step.counts[step.sampled]
            sampled = self._sampler.sample(logits_RV, slots, positions, self._batch)
            token_ids = sampled.token_ids
            result.logprobs = [(int(step.sampled[row]), entry) for row, entry in sampled.logprobs]
            result.failed = [(int(step.sampled[row]), why) for row, why in sampled.failed]
        self._batch.append_tokens(slots, token_ids)
        return token_ids

    def _to_device(self, values: NDArray[np.generic]) -> Tensor:
        return torch.as_tensor(values, device=self._operations.device)
