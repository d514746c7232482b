"""Runs steps on one worker, with its part of the model: turns a `StepPlan` into a `StepResult`.

A step applies the plan, runs the decoder, samples tokens, and appends them to their sequences. In a pipeline, each
stage runs its own layers, and only the last one samples. A GPU does this in the background: `launch` only gives it the
work, and the next step may be launched before the result arrives. On a CPU, a step is over when `launch` returns. This
module knows nothing of processes, memory limits, or where the weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.decoder.network import NO_TAPS, FollowsPlans, Network
from raycore.layers.lora import AdapterRows
from raycore.layers.rows import TILE_ROWS
from raycore.messages import EncoderPlan, StepPlan, StepResult
from raycore.parallel.divided_rows import DividedRows
from raycore.parallel.experts import ExpertParallel
from raycore.parallel.links import Link
from raycore.parallel.returned_tokens import TokenReceiver
from raycore.profile_session import Parts
from raycore.runner.compute_threads import ComputeThreads
from raycore.runner.decode_graphs import DecodeGraphs
from raycore.runner.drafting.drafter import Drafter
from raycore.runner.recorded_layers import RecordedLayers
from raycore.runner.returned_states import ReturnedStates, StatesDownload
from raycore.runner.step_images import StepImages
from raycore.runner.verification import verify
from raycore.sampling.logprobs import Download as LogprobsDownload
from raycore.sampling.logprobs import TokenLogprobsDownload
from raycore.sampling.sampler import Sampler, rows_at_a_time
from raycore.step.batch import Ints, StepInputs
from raycore.step.device_batch import DeviceBatch, StepTensors
from raycore.step.transfers import Download, to_device

if TYPE_CHECKING:
    from raycore.pooling.pooler import PooledDownload, Pooler

_PromptLogprobs = tuple[int, int, list[TokenLogprobsDownload]]


@dataclass(slots=True)
class LaunchedStep:
    """A step that the device has been given. Implements `Pending`."""

    result_so_far: StepResult
    """Without what has to come from the device: tokens and log probabilities."""
    step: StepInputs
    batch: DeviceBatch
    token_ids: Download | None = None
    """The sampled tokens. None: the step samples none."""
    logprobs: list[tuple[list[int], LogprobsDownload]] = field(default_factory=list[tuple[list[int], LogprobsDownload]])
    """(indexes in `step.sampled`, their log probabilities)."""
    prompt_logprobs: list[_PromptLogprobs] = field(default_factory=list[_PromptLogprobs])
    """(index in `step.slots`, first position, log probabilities of the prompt from there on)."""
    states: StatesDownload | None = None
    """None: no hidden states are returned."""
    pooled: PooledDownload | None = None
    """None: the model generates, or this worker doesn't report results."""
    failed: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """(index in `step.sampled`, why its request can't continue if it gets this far)."""
    sampler: Sampler | None = None
    """None: the step samples nothing."""
    drafter: Drafter | None = None
    """None: this worker doesn't draft."""

    def done(self) -> bool:
        """Whether the device has finished the step."""
        return self.token_ids is None or self.token_ids.done()

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the step's result. Call this once, for one step after the other.

        Raises:
            TimeoutError: the device hasn't finished within `timeout` seconds.
        """
        step, result = self.step, self.result_so_far
        if self.token_ids is not None:
            self.token_ids.wait(timeout)
            (sampled_ids,) = self.token_ids.arrays()
            self.batch.receive(step, sampled_ids)
            if step.is_decoding:
                result.token_ids = sampled_ids.astype(np.int32).tobytes()
                self._add_extras(range(len(sampled_ids)))
                self._accept(step.sampled_rows)
            else:
                new = verify(step, sampled_ids)
                if step.draft_ids is not None:
                    self.batch.host.drop_drafts(step, new.counts)
                result.token_ids = sampled_ids[new.rows].astype(np.int32).tobytes()
                result.num_tokens = new.counts.astype(np.int32).tobytes()
                self._add_extras(set(new.rows.tolist()))
                last_of_each = np.cumsum(new.counts[new.counts > 0]) - 1
                self._accept(step.sampled_rows[new.rows[last_of_each]])
        elif len(step.slots):
            result.num_tokens = np.zeros(len(step.slots), np.int32).tobytes()
            self._add_extras(())
        if self.pooled is not None:
            result.pooled = self.pooled.entries()
        for index, first, downloads in self.prompt_logprobs:
            entries = [entry for download in downloads for entry in download.entries()]
            result.prompt_logprobs.append((index, first, entries))
        return result

    def _accept(self, rows: Ints) -> None:
        """`rows`: of the step's tokens, those that come before their slots' newest tokens."""
        if self.drafter is not None:
            with torch.inference_mode():
                self.drafter.network.accept(self.step, rows)

    def _add_extras(self, kept: Container[int]) -> None:
        """Add what comes with the new tokens, rows of `step.sampled`, that are kept to the result."""
        result, indexes = self.result_so_far, self.step.sampled
        if self.states is not None:
            self.states.add_to(result, kept)
        for rows, download in self.logprobs:
            pairs = zip(rows, download.entries(), strict=True)
            result.logprobs.extend((int(indexes[row]), entry) for row, entry in pairs if row in kept)
        for row, why in self.failed:
            if row in kept:
                result.failed.append((int(indexes[row]), why))
            else:
                assert self.sampler is not None
                self.sampler.take_back_failure(int(self.step.sampled_slots[row]))


class ModelRunner:
    """Runs steps on one worker, one after the other."""

    def __init__(
        self,
        decoder: Network,
        attention: Attention,
        batch: DeviceBatch,
        sampler: Sampler | None,
        *,
        threads: ComputeThreads | None = None,
        reports: bool = True,
        experts: ExpertParallel | None = None,
        graphs: DecodeGraphs | None = None,
        recorded: RecordedLayers | None = None,
        source: Link | None = None,
        sink: Link | None = None,
        token_source: TokenReceiver | None = None,
        token_sink: Link | None = None,
        drafter: Drafter | None = None,
        adapter_rows: AdapterRows | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
        rows: DividedRows | None = None,
        states: FollowsPlans | None = None,
        pooler: Pooler | None = None,
        images: StepImages | None = None,
    ) -> None:
        """
        Args:
            sampler: None on a stage that isn't the last one, which samples nothing.
            threads: chooses the number of compute threads on a CPU. None: one.
            reports: whether this worker reports prompt logprobs and hidden states. One worker of an engine does.
            experts: the ranks of several engines that share experts and therefore run every step together. None: there
                are none.
            graphs: runs padded steps of decodes. None: they run like others.
            recorded: computes layers of steps with few rows. None: they are computed like others.
            source: brings hidden states from the stage before. None: there is none.
            sink: takes hidden states to the next stage. None: there is none.
            token_source: on the first stage, brings the tokens that the last one has sampled. None: plans have them, or
                this stage doesn't need them.
            token_sink: on the last stage, takes sampled tokens to the first one. None: nobody needs them.
            drafter: drafts tokens between steps. None: this worker doesn't.
            adapter_rows: where the decoder's layers look which rows are for which LoRA adapter. None: there are none.
            agree: returns what one of the workers that sample the same tokens has sampled. None: their logits are equal
                to the last bit.
            rows: divides steps' rows among workers that sample the same tokens. None: this one computes all rows.
            states: the part of `attention` that plans tell more than steps do: layers that keep states, or an encoder's
                token types. None: there is none.
            pooler: on the last stage of a model that pools, makes the results, and `sampler` is None. None: the model
                generates.
            images: on the first stage, encodes images. None: there are none, or this stage isn't the first.
        """
        self._pooler = pooler
        self._images = images
        self._agree = agree
        self._rows = rows
        self._states = states
        self._adapter_rows = adapter_rows
        self._drafter = drafter
        self._graphs = graphs
        self._recorded = recorded
        self._source = source
        self._sink = sink
        self._token_source = token_source
        self._token_sink = token_sink
        self._decoder = decoder
        self._attention = attention
        self._batch = batch
        self._sampler = sampler
        self._threads = threads or ComputeThreads()
        self._reports = reports
        self._experts = experts
        self._returned_states = ReturnedStates()
        self._prompt_logprobs: dict[int, int] = {}
        """For requests with prompt logprobs, by slot: how many of the most likely tokens to report at each position."""

    def parts(self) -> Parts:
        """The parts of a step, for profiles."""
        yield self, {"_update_requests": "update_requests", "_compute": "forward", "_sample": "sample"}
        yield self, {"_attention": "attention"}
        if self._source is not None:
            yield self, {"_receive": "receive"}
        if self._sink is not None:
            yield self._sink, {"send": "send"}
        if self._token_source is not None:
            yield self._token_source, {"take_for": "receive_tokens"}
        yield self._batch, {"apply": "apply_plan", "advance": "prepare_inputs"}
        if self._images is not None:
            yield from self._images.parts()
        yield from self._decoder.parts()
        if self._drafter is not None:
            yield self, {"take_draft_token_ids": "draft"}
            yield from self._drafter.network.parts()

    def share_experts(self, experts: ExpertParallel | None) -> None:
        """Share experts with other ranks than before from now on. None: run steps alone.

        A runner that begins to run steps together with others pads them no more.
        """
        self._experts = experts
        if experts is not None:
            self._graphs = None
            self._batch.pad_no_more()

    def finish(self) -> None:
        """Take what other workers have sent to this one. Call this after the last step.

        Raises:
            OSError: a worker is stuck or gone.
        """
        if self._token_source is not None:
            self._token_source.finish()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step, as described in `StepPlan`, and return its result."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Give the device one step, as described in `StepPlan`."""
        try:
            return self._launch(plan)
        finally:
            self._threads.end_step()

    @torch.inference_mode()
    def take_draft_token_ids(self, slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        """Draft `num_tokens[i]` tokens for each slot, all of whose tokens must have arrived. Returns the drafts."""
        assert self._drafter is not None, "this worker doesn't draft"
        try:
            return self._drafter.draft(slots, num_tokens)
        finally:
            self._threads.end_step()

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        self._update_requests(plan)
        self._batch.apply(plan)
        if self._token_source is not None:
            self._token_source.take_for(plan)
        step, tensors = self._batch.advance(plan)
        if self._token_source is not None:
            self._token_source.note(step, tensors)
        launched = LaunchedStep(StepResult(plan.step), step, self._batch, drafter=self._drafter)
        if self._experts is not None:
            launched.result_so_far.is_anyone_busy = self._begin_together(self._experts, step)
        if self._images is not None and plan.encoder is not None:
            self._encode(self._images, plan.encoder)
        if len(step.slots):
            hidden = self._compute(step, tensors)
            if self._sink is not None:
                self._sink.send(hidden)
            else:
                self._finish(step, tensors, hidden, launched)
            if self._drafter is not None:
                self._drafter.network.sync(step, tensors)
        return launched

    def _encode(self, images: StepImages, plan: EncoderPlan) -> None:
        self._threads.begin_step(images.num_patches(plan), images.num_weights)
        images.apply(plan)
        self._threads.adapt()

    def _begin_together(self, experts: ExpertParallel, step: StepInputs) -> bool:
        """Exchange numbers of tokens with the other engines. Returns whether any engine has a token.

        If only other engines have tokens, runs this rank's experts for them.
        """
        num_tokens = len(step.positions)
        num_kept = num_tokens if self._wants_all_rows(step) else len(step.sampled)
        is_anyone_busy = experts.begin(num_tokens, num_kept)
        if is_anyone_busy and not len(step.slots):
            self._choose_threads(experts.num_tokens)
            for layer in self._decoder.sparse_layers:
                layer.forward_nothing()
        return is_anyone_busy

    def _update_requests(self, plan: StepPlan) -> None:
        if self._drafter is not None:
            self._drafter.network.apply(plan)
        if self._states is not None:
            self._states.apply(plan)
        if self._pooler is not None:
            self._pooler.apply(plan)
        if self._sampler is None:
            return
        for slot in plan.freed_slots:
            self._sampler.remove(slot)
            self._prompt_logprobs.pop(slot, None)
        self._returned_states.apply(plan)
        for new in plan.new_requests:
            self._sampler.add(new.slot, new.params, new.seed, new.eos_token_ids, new.bad_words_token_ids, new.thinking)
            if new.params.prompt_logprobs is not None:
                self._prompt_logprobs[new.slot] = new.params.prompt_logprobs

    def _compute(self, step: StepInputs, tensors: StepTensors) -> Tensor:
        """Run the decoder. Returns what `Network.forward` does, in the last stage of the rows of all workers."""
        if self._rows is not None:
            self._rows.begin(step)
        divided = None if self._rows is None or self._rows.shares is None else self._rows
        # before the step's time begins, in which compute threads shouldn't wait
        received = None if self._source is None else self._receive(self._source, step, tensors)
        if not self._threads.is_single:
            num_tokens = self._num_rows(step) if self._experts is None else self._experts.num_tokens
            self._choose_threads(num_tokens, num_keys=int(step.starts.sum() + step.counts.sum()))
        self._attention.begin(step, tensors)
        rows = None if divided or self._wants_all_rows(step) else self._kept_rows(step, tensors)
        taps = NO_TAPS if self._drafter is None else self._drafter.network.taps
        images, image_rows = self._images, step.features.rows if step.features is not None else ()
        if images is not None and image_rows:
            taps = images.deepstack(image_rows)

        def compute() -> Tensor:
            inputs = self._batch.token_ids_of(tensors) if received is None else received
            if images is not None and image_rows:
                inputs = images.merged(self._decoder.vocabulary.embed(inputs), image_rows)
            if divided is not None and received is None:
                inputs = divided.own(inputs)
            run_layer = None if self._recorded is None else self._recorded.of_step(len(inputs), self._attention)
            return self._decoder.forward(inputs, self._attention, rows, self._threads.adapt, taps, run_layer)

        uses_adapters = self._note_adapters(step)
        if self._graphs is not None and tensors.is_padded and not uses_adapters:
            return self._graphs.run(len(tensors.slots_T), compute)[: len(step.sampled)]
        if divided is None or self._sampler is None:  # no model that pools divides rows
            return compute()
        hidden_TD = divided.gather(compute())
        if self._wants_all_rows(step) or tensors.sampled_rows_R is None:
            return hidden_TD
        return hidden_TD.index_select(0, tensors.sampled_rows_R)

    def _num_rows(self, step: StepInputs) -> int:
        """How many of the step's rows this worker computes."""
        shares = None if self._rows is None else self._rows.shares
        return len(step.positions) if shares is None else len(shares.rows)

    def _note_adapters(self, step: StepInputs) -> bool:
        """Tell the layers which rows are for which adapter. Returns whether any is."""
        if self._adapter_rows is None:
            return False
        token_slots, kept = step.token_slots, step.sampled_rows
        if self._rows is not None and self._rows.shares is not None:
            token_slots, kept = token_slots[self._rows.shares.rows], kept[:0]
        self._adapter_rows.begin_step(self._batch.host.adapter[token_slots], kept)
        return not self._adapter_rows.is_empty

    def _receive(self, source: Link, step: StepInputs, tensors: StepTensors) -> Tensor:
        """Return the hidden states [T, D] of the stage before."""
        num_rows = len(tensors.slots_T) if self._rows is None else self._num_rows(step)
        shape = (num_rows, self._decoder.hidden_size)
        return source.receive_into(torch.empty(shape, dtype=self._decoder.dtype, device=tensors.slots_T.device))

    def _finish(self, step: StepInputs, tensors: StepTensors, hidden: Tensor, launched: LaunchedStep) -> None:
        """Sample from final hidden states. Adds tokens, log probabilities and returned states to `launched`."""
        if self._pooler is not None:
            self._pool(self._pooler, step, tensors, hidden, launched)
            return
        hidden_TD: Tensor | None = None
        if self._wants_all_rows(step):
            hidden_TD = hidden
            launched.prompt_logprobs = self._start_prompt_logprobs(step, hidden)
            if tensors.sampled_rows_R is not None:
                hidden = hidden.index_select(0, tensors.sampled_rows_R)
        if self._reports:
            launched.states = self._returned_states.start(step, self._batch.num_prompt, hidden_TD, hidden)
        logits_RV = self._decoder.vocabulary.logits(hidden)
        if len(step.sampled):
            self._sample(step, tensors, logits_RV, launched)

    def _pool(
        self, pooler: Pooler, step: StepInputs, tensors: StepTensors, hidden: Tensor, launched: LaunchedStep
    ) -> None:
        """Pool final hidden states. Adds the results to `launched`, with a token for each, which means nothing."""
        hidden_TD = hidden if pooler.wants_all_rows(step.slots) else None
        kept = None if hidden_TD is None else self._kept_rows(step, tensors)
        if kept is not None:
            hidden = hidden.index_select(0, kept)
        launched.pooled = pooler.start(step, self._batch.host.token_ids, hidden_TD, hidden)
        if len(step.sampled):
            launched.token_ids = Download([torch.zeros(len(step.sampled), dtype=torch.int64, device=hidden.device)])

    def _kept_rows(self, step: StepInputs, tensors: StepTensors) -> Tensor | None:
        """Return the rows from which tokens are sampled, or results are made. None: the first ones."""
        if self._pooler is not None and self._pooler.takes_first_tokens:
            return to_device(step.first_rows, tensors.slots_T.device)
        return tensors.sampled_rows_R

    def _wants_all_rows(self, step: StepInputs) -> bool:
        """Whether a request in the step asked for prompt logprobs, for its prompt's hidden states, or for a result that
        takes these."""
        if self._pooler is not None:
            return self._pooler.wants_all_rows(step.slots)
        has_logprobs = self._prompt_logprobs and not self._prompt_logprobs.keys().isdisjoint(step.slots.tolist())
        return bool(has_logprobs) or self._returned_states.wants_prompts(step.slots)

    def _choose_threads(self, num_tokens: int, num_keys: int = 0) -> None:
        """`num_keys`: how many tokens' keys and values attention reads in each layer."""
        if self._threads.is_fixed:
            num_tokens, num_keys = TILE_ROWS, 0  # every step uses the same number of threads
        num_cached = num_keys * self._decoder.num_key_value_numbers
        self._threads.begin_step(num_tokens, self._decoder.num_weights, num_cached)

    def _start_prompt_logprobs(self, step: StepInputs, hidden_TD: Tensor) -> list[_PromptLogprobs]:
        """Start to compute the logprobs of those prompt tokens that follow a token computed in this step.

        Returns what `LaunchedStep.prompt_logprobs` has.
        """
        entries: list[_PromptLogprobs] = []
        first_rows = step.first_rows
        for index, slot in enumerate(step.slots.tolist()):
            first = int(step.starts[index]) + 1
            end = min(first + int(step.counts[index]), int(self._batch.num_prompt[slot]))
            if slot not in self._prompt_logprobs or first >= end:
                continue
            row = int(first_rows[index])
            downloads = self._prompt_logprobs_of(slot, first, hidden_TD[row : row + end - first])
            if self._reports:
                entries.append((index, first, downloads))
        return entries

    def _prompt_logprobs_of(self, slot: int, first: int, hidden_TD: Tensor) -> list[TokenLogprobsDownload]:
        """Start to compute the logprobs of a prompt's tokens from position `first` on, one for each row of `hidden_TD`.

        A few rows are computed at a time. Empty if this worker doesn't report: it then only takes part in computing the
        logits.
        """
        downloads: list[TokenLogprobsDownload] = []
        size = rows_at_a_time(self._decoder.vocab_size)
        for start in range(0, len(hidden_TD), size):
            logits_TV = self._decoder.vocabulary.logits(hidden_TD[start : start + size])
            if self._reports:
                assert self._sampler is not None, "only the last stage samples"
                next_ids_T = self._batch.token_ids_SM[slot, first + start : first + start + len(logits_TV)].long()
                downloads.append(self._sampler.prompt_logprobs(logits_TV, next_ids_T, self._prompt_logprobs[slot]))
        return downloads

    def _sample(self, step: StepInputs, tensors: StepTensors, logits_RV: Tensor, launched: LaunchedStep) -> None:
        """Sample a token for each slot that gets one, and append it to the slot's tokens. Adds both to `launched`."""
        slots = step.sampled_slots
        assert self._sampler is not None, "only the last stage samples"
        if self._sampler.is_plain_greedy(slots):
            token_ids_R = self._sampler.kernels.most_likely(logits_RV)
        else:
            sampled = self._sampler.sample(logits_RV, slots, step.next_positions, self._batch)
            token_ids_R = sampled.token_ids_R
            launched.logprobs = sampled.logprobs
            launched.failed, launched.sampler = sampled.failed, self._sampler
        if self._agree is not None:
            token_ids_R = self._agree(token_ids_R)
        self._batch.append(tensors, token_ids_R)
        if self._token_sink is not None:
            self._token_sink.send(token_ids_R.to(torch.int32))
        launched.token_ids = Download([token_ids_R])
