"""Runs steps on one worker, with its part of the model: turns a `StepPlan` into a `StepResult`.

A step applies the plan, runs the layers, samples tokens, and appends them to their sequences. In a pipeline, each stage
runs its own layers, and only the last one samples. A GPU does this in the background: `launch` only gives it the work,
and the next step may be launched before the result arrives. On a CPU, a step is over when `launch` returns. This module
knows nothing of processes, memory limits, or where the weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.decoder.network import NO_TAPS, Network, both_taps
from raycore.hooks import overridden
from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS
from raycore.parts.drafts.runner.drafter import NO_DRAFTER, Drafting
from raycore.parts.experts.parallel import ExpertParallel
from raycore.profile_session import ProfiledParts
from raycore.runner.compute_threads import ONE_THREAD, ComputeThreads
from raycore.runner.execution import BY_OPERATION, StepExecution
from raycore.runner.heads import Head
from raycore.runner.launched_step import LaunchedStep
from raycore.runner.part import RunnerPart
from raycore.runner.rows import ALL_ROWS, StepRows
from raycore.runner.sources import Source
from raycore.runner.step_parts import Lockstep
from raycore.step.batch import StepInputs
from raycore.step.device_batch import DeviceBatch, StepTensors


class ModelRunner:
    """Runs steps on one worker, one after the other."""

    def __init__(
        self,
        network: Network,
        attention: Attention,
        batch: DeviceBatch,
        source: Source,
        head: Head,
        drafting: Drafting = NO_DRAFTER,
        *,
        threads: ComputeThreads = ONE_THREAD,
        rows: StepRows = ALL_ROWS,
        execution: StepExecution = BY_OPERATION,
        parts: Sequence[RunnerPart] = (),
    ) -> None:
        """
        Args:
            source: where the first layer's inputs come from.
            head: what is done with the last layer's.
            drafting: drafts tokens between steps, or when a step begins.
            threads: chooses the number of compute threads on a CPU.
            rows: which rows of a step this worker computes.
            execution: how layers are run.
            parts: what else takes part in steps.
        """
        self._network = network
        self._attention = attention
        self._batch = batch
        self._source = source
        self._head = head
        self._threads = threads
        self._rows = rows
        self._execution = execution
        self._drafting = drafting
        self._own_parts: list[RunnerPart] = [drafting, *parts, source, head]
        self._tensors: StepTensors
        """Of the masked step whose tokens haven't been sampled yet."""
        self._bind([])

    def _bind(self, lockstep: Sequence[Lockstep]) -> None:
        """Bind the parts' hooks, and what other engines add that share experts, if there are any."""
        parts = [*lockstep, *self._own_parts]
        self._catch_up = overridden(parts, RunnerPart.catch_up)
        self._apply = overridden(parts, RunnerPart.apply)
        self._begin = overridden(parts, RunnerPart.begin)
        self._wants_all_rows = overridden(parts, RunnerPart.wants_all_rows)
        self._begin_forward = overridden(parts, RunnerPart.begin_forward)
        self._taps = overridden(parts, RunnerPart.taps)
        self._end_forward = overridden(parts, RunnerPart.end_forward)
        self._note_launch = overridden(parts, RunnerPart.launched)
        self._received = overridden(parts, RunnerPart.received)
        self._count_tokens: Callable[[StepInputs], int] = lockstep[0].count if lockstep else self._rows.count

    def parts(self) -> ProfiledParts:
        """The parts of a step, for profiles."""
        yield self, {"_update_requests": "update_requests", "_compute": "forward", "_attention": "attention"}
        yield self._batch, {"apply": "apply_plan", "advance": "prepare_inputs"}
        yield from self._network.parts()
        for part in self._own_parts:
            yield from part.parts()

    def share_experts(self, experts: ExpertParallel) -> None:
        """Share experts with these ranks from now on. Steps are run together with theirs, and padded no more."""
        self._bind([Lockstep(experts, self._network, self._wants_all, self._threads)])
        self._execution = self._execution.unpadded()
        self._batch.pad_no_more()

    def run_alone(self) -> None:
        """Share experts with no other ranks from now on."""
        self._bind([])

    def finish(self) -> None:
        """Take what other workers have sent to this one. Call this after the last step.

        Raises:
            OSError: a worker is stuck or gone.
        """
        for part in self._own_parts:
            part.finish()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step, as described in `StepPlan`, and return its result."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Give the device one step, as described in `StepPlan`. If the plan is masked, `sample` has to follow."""
        try:
            return self._launch(plan)
        finally:
            self._threads.end_step()

    @torch.inference_mode()
    def sample(self, launched: LaunchedStep, grammar: GrammarOutput | None) -> None:
        """Have the device sample the tokens of a masked step, the last one that was launched."""
        self._sample(launched, self._tensors, grammar)
        for note_launch in self._note_launch:
            note_launch(launched)

    @torch.inference_mode()
    def take_draft_token_ids(self, slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        """Draft `num_tokens[i]` tokens for each slot, all of whose tokens must have arrived. Returns the drafts.

        A worker that doesn't draft returns nothing.
        """
        try:
            return self._drafting.draft(slots, num_tokens)
        finally:
            self._threads.end_step()

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        for catch_up in self._catch_up:
            catch_up()
        self._batch.apply(plan)
        self._update_requests(plan)
        drafts = self._drafting.for_step(plan) if plan.max_drafts else NO_DRAFTS
        step, tensors = self._batch.advance(plan, drafts)
        launched = LaunchedStep(StepResult(plan.step), step, self._batch, self._received)
        for begin in self._begin:
            begin(plan, step, tensors, launched.result_so_far)
        if len(step.slots):
            self._rows.begin(step)
            has_all = self._rows.is_divided or self._wants_all(step)
            hidden = self._compute(step, tensors, keeps_all=has_all)
            self._head.take(step, tensors, hidden, launched, has_all=has_all)
            if plan.masked:
                self._tensors = tensors
                return launched
            self._sample(launched, tensors, plan.grammar)
        for note_launch in self._note_launch:
            note_launch(launched)
        return launched

    def _sample(self, launched: LaunchedStep, tensors: StepTensors, grammar: GrammarOutput | None) -> None:
        step = launched.step
        self._head.sample(step, tensors, launched, grammar)
        for end_forward in self._end_forward:
            end_forward(step, tensors, launched.extras)

    def _update_requests(self, plan: StepPlan) -> None:
        for apply in self._apply:
            apply(plan)

    def _wants_all(self, step: StepInputs) -> bool:
        """Whether the last layer computes all tokens."""
        for wants_all_rows in self._wants_all_rows:  # noqa: SIM110 - runs in each step, where any() is slower
            if wants_all_rows(step):
                return True
        return False

    def _compute(self, step: StepInputs, tensors: StepTensors, *, keeps_all: bool) -> Tensor:
        """Run the layers. Returns what the head takes. `keeps_all`: all rows that this worker computes."""
        attention = self._attention
        self._source.wait(step, tensors)
        if not self._threads.is_single:
            self._threads.begin_layers(self._network, self._count_tokens(step), step.num_keys)
        attention.begin(step, tensors)
        for begin_forward in self._begin_forward:
            begin_forward(step, tensors)
        kept = None if keeps_all else self._head.kept_rows(step, tensors)
        taps = NO_TAPS
        for taps_of in self._taps:
            # drafts come before the source, whose images change what they read
            taps = both_taps(taps_of(step), taps)

        def compute() -> Tensor:
            inputs = self._source.read(step, tensors)
            run_layers = self._execution.of_step(len(inputs), attention)
            return self._network.forward(inputs, attention, kept, self._threads.adapt, taps, run_layers)

        return self._execution.run(compute, tensors)
