"""Parts of a runner: rows for adapters, tokens that the last stage returns, ranks that share experts."""

from __future__ import annotations

from collections.abc import Callable

from raycore.decoder.network import Network
from raycore.messages import StepPlan, StepResult
from raycore.parallel.returned_tokens import TokenReceiver
from raycore.parts.adapters.layers import AdapterRows
from raycore.parts.experts.parallel import ExpertParallel
from raycore.profile_session import ProfiledParts
from raycore.runner.compute_threads import ComputeThreads
from raycore.runner.part import RunnerPart
from raycore.runner.rows import StepRows
from raycore.step.batch import StepInputs
from raycore.step.device_batch import DeviceBatch, StepTensors


class AdaptedRows(RunnerPart):
    """Tells the layers which rows are for which LoRA adapter."""

    def __init__(self, adapter_rows: AdapterRows, batch: DeviceBatch, rows: StepRows) -> None:
        """`adapter_rows`: where the network's layers look."""
        self._adapter_rows = adapter_rows
        self._batch = batch
        self._rows = rows

    def begin_forward(self, step: StepInputs, tensors: StepTensors) -> None:
        kept = step.sampled_rows[:0] if self._rows.is_divided else step.sampled_rows
        self._adapter_rows.begin_step(self._batch.host.adapter[self._rows.of_numbers(step.token_slots)], kept)


class ReturnedTokens(RunnerPart):
    """On the first stage, takes the tokens that the last one has sampled."""

    def __init__(self, receiver: TokenReceiver) -> None:
        self._receiver = receiver

    def apply(self, plan: StepPlan) -> None:
        self._receiver.take_for(plan)

    def begin(self, plan: StepPlan, step: StepInputs, tensors: StepTensors, result: StepResult) -> None:
        self._receiver.note(step, tensors, plan.next_drafts)

    def finish(self) -> None:
        self._receiver.finish()

    def parts(self) -> ProfiledParts:
        yield self._receiver, {"take_for": "receive_tokens"}


class Lockstep(RunnerPart):
    """Has all engines that share experts run every step together."""

    def __init__(
        self,
        experts: ExpertParallel,
        network: Network,
        wants_all: Callable[[StepInputs], bool],
        threads: ComputeThreads,
    ) -> None:
        """`wants_all`: whether the last layer computes all rows of a step."""
        self._experts = experts
        self._network = network
        self._wants_all = wants_all
        self._threads = threads

    def begin(self, plan: StepPlan, step: StepInputs, tensors: StepTensors, result: StepResult) -> None:
        """Exchange numbers of tokens with the other engines.

        If only other engines have tokens, runs this rank's experts for them.
        """
        num_tokens = len(step.positions)
        num_kept = num_tokens if self._wants_all(step) else len(step.sampled)
        result.is_anyone_busy = self._experts.begin(num_tokens, num_kept)
        if result.is_anyone_busy and not len(step.slots):
            self._threads.begin_layers(self._network, self._experts.num_tokens)
            for layer in self._network.sparse_layers:
                layer.forward_nothing()

    def count(self, step: StepInputs) -> int:
        """Return how many tokens all engines have in the step."""
        return self._experts.num_tokens
