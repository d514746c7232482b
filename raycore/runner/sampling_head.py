"""Samples tokens from final hidden states, with what requests ask for besides: log probabilities and hidden states.

Shape suffixes: T tokens of a step, R those from which a token is sampled, D hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raycore.decoder.network import Network
from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.parallel.links import Link
from raycore.parts.hidden_states.runner import ReturnedStates
from raycore.profile_session import ProfiledParts
from raycore.runner.heads import Head
from raycore.runner.launched_step import LaunchedStep
from raycore.runner.rows import ALL_ROWS, StepRows
from raycore.sampling.logprobs import TokenLogprobsDownload
from raycore.sampling.sampler import SampledTokens, Sampler, rows_at_a_time
from raycore.step.batch import StepInputs
from raycore.step.copies import Download
from raycore.step.device_batch import DeviceBatch, StepTensors

_NO_LOGITS = torch.empty(0)

Agree = Callable[[Tensor], Tensor]
"""Takes the tokens that this worker has sampled, int64[R], and returns those that all go on with."""


def also_sent(links: Sequence[Link], agree: Agree) -> Agree:
    """Return what also sends the tokens to earlier stages, which compute them next."""

    def send(token_ids_R: Tensor) -> Tensor:
        token_ids_R = agree(token_ids_R)
        sent_R = token_ids_R.to(torch.int32)
        for link in links:
            link.send(sent_R)
        return token_ids_R

    return send


class SamplingHead(Head):
    """On the last stage of a model that generates."""

    def __init__(
        self,
        network: Network,
        batch: DeviceBatch,
        sampler: Sampler,
        rows: StepRows = ALL_ROWS,
        *,
        reports: bool = True,
        agree: Agree = ALL_ROWS.of_first,
    ) -> None:
        """
        Args:
            rows: which rows this worker computes. All workers that divide them sample the same tokens.
            reports: whether this worker reports prompt logprobs and hidden states. One worker of an engine does.
        """
        self._network = network
        self._batch = batch
        self._sampler = sampler
        self._rows = rows
        self._reports = reports
        self._agree = agree
        self._returned_states = ReturnedStates()
        self._logits_RV = _NO_LOGITS
        """Of the step from which nothing has been sampled yet."""
        self._prompt_logprobs: dict[int, int] = {}
        """For requests with prompt logprobs, by slot: how many of the most likely tokens to report at each position."""

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            self._sampler.remove(slot)
            self._prompt_logprobs.pop(slot, None)
        self._returned_states.apply(plan)
        for new in plan.new_requests:
            self._sampler.add(new.slot, new.params, new.seed, new.eos_token_ids, new.bad_words_token_ids, new.thinking)
            if new.params.prompt_logprobs is not None:
                self._prompt_logprobs[new.slot] = new.params.prompt_logprobs

    def wants_all_rows(self, step: StepInputs) -> bool:
        """Whether a request in the step asked for prompt logprobs, or for its prompt's hidden states."""
        has_logprobs = self._prompt_logprobs and not self._prompt_logprobs.keys().isdisjoint(step.slots.tolist())
        return bool(has_logprobs) or self._returned_states.wants_prompts(step.slots)

    def take(
        self, step: StepInputs, tensors: StepTensors, hidden: Tensor, launched: LaunchedStep, *, has_all: bool
    ) -> None:
        """Compute logits. Adds log probabilities of prompts, and returned states, to `launched`."""
        hidden_TD = None
        if has_all:
            hidden = self._rows.gather(hidden)
            hidden_TD = hidden if self.wants_all_rows(step) else None
            if tensors.sampled_rows_R is not None:
                hidden = hidden.index_select(0, tensors.sampled_rows_R)
        if hidden_TD is not None:
            self._start_prompt_logprobs(step, hidden_TD, launched)
        if self._reports:
            states = self._returned_states.start(step, self._batch.num_prompt, hidden_TD, hidden)
            if states is not None:
                launched.extras.append(states)
        self._logits_RV = self._network.vocabulary.logits(hidden)

    def sample(
        self, step: StepInputs, tensors: StepTensors, launched: LaunchedStep, grammar: GrammarOutput | None
    ) -> None:
        """Sample a token for each slot that gets one, and append it to the slot's tokens. Adds both to `launched`."""
        logits_RV, self._logits_RV = self._logits_RV, _NO_LOGITS
        if not len(step.sampled):
            return
        slots = step.sampled_slots
        if self._sampler.is_plain_greedy(slots):
            token_ids_R = self._sampler.kernels.most_likely(logits_RV)
        else:
            sampled = self._sampler.sample(logits_RV, slots, step.next_positions, self._batch, grammar)
            token_ids_R = sampled.token_ids_R
            if sampled.logprobs or sampled.failed:
                launched.extras.append(_SampledExtras(sampled, self._sampler))
        token_ids_R = self._agree(token_ids_R)
        self._batch.append(tensors, token_ids_R)
        launched.token_ids = Download([token_ids_R])

    def parts(self) -> ProfiledParts:
        yield self, {"sample": "sample"}

    def _start_prompt_logprobs(self, step: StepInputs, hidden_TD: Tensor, launched: LaunchedStep) -> None:
        """Start to compute the logprobs of those prompt tokens that follow a token computed in this step."""
        first_rows = step.first_rows
        for index, slot in enumerate(step.slots.tolist()):
            first = int(step.starts[index]) + 1
            end = min(first + int(step.counts[index]), int(self._batch.num_prompt[slot]))
            if slot not in self._prompt_logprobs or first >= end:
                continue
            row = int(first_rows[index])
            downloads = self._prompt_logprobs_of(slot, first, hidden_TD[row : row + end - first])
            if self._reports:
                launched.extras.append(_PromptLogprobs(index, first, downloads))

    def _prompt_logprobs_of(self, slot: int, first: int, hidden_TD: Tensor) -> list[TokenLogprobsDownload]:
        """Start to compute the logprobs of a prompt's tokens from position `first` on, one for each row of `hidden_TD`.

        A few rows are computed at a time. Empty if this worker doesn't report: it then only takes part in computing the
        logits.
        """
        downloads: list[TokenLogprobsDownload] = []
        size = rows_at_a_time(self._network.vocab_size)
        for start in range(0, len(hidden_TD), size):
            logits_TV = self._network.vocabulary.logits(hidden_TD[start : start + size])
            if self._reports:
                next_ids_T = self._batch.token_ids_SM[slot, first + start : first + start + len(logits_TV)].long()
                downloads.append(self._sampler.prompt_logprobs(logits_TV, next_ids_T, self._prompt_logprobs[slot]))
        return downloads


@dataclass(slots=True)
class _SampledExtras:
    """Log probabilities of new tokens, and why some requests can't continue. Implements `StepExtra`."""

    sampled: SampledTokens
    sampler: Sampler

    def add_to(self, result: StepResult, step: StepInputs, kept: Container[int]) -> None:
        indexes = step.sampled
        for rows, download in self.sampled.logprobs:
            pairs = zip(rows, download.entries(), strict=True)
            result.logprobs.extend((int(indexes[row]), entry) for row, entry in pairs if row in kept)
        for row, why in self.sampled.failed:
            if row in kept:
                result.failed.append((int(indexes[row]), why))
            else:
                self.sampler.take_back_failure(int(step.sampled_slots[row]))


@dataclass(slots=True)
class _PromptLogprobs:
    """Log probabilities of some of a prompt's tokens. Implements `StepExtra`."""

    slot_index: int
    """Index in `StepInputs.slots`."""
    first: int
    """The position of the first token."""
    downloads: list[TokenLogprobsDownload]

    def add_to(self, result: StepResult, step: StepInputs, kept: Container[int]) -> None:
        entries = [entry for download in self.downloads for entry in download.entries()]
        result.prompt_logprobs.append((self.slot_index, self.first, entries))
