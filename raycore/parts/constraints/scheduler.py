"""Which tokens of a step follow a grammar, and the masks for these. Rules that wait for a request's last token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidRequest
from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.parts.constraints.grammar.masks import MaskMaker, Output
from raycore.parts.constraints.grammar.matcher import TokenMatcher
from raycore.scheduler.part import SchedulerPart, SchedulerView, Start
from raycore.scheduler.request import Request
from raycore.scheduler.slots import PREFILL
from raycore.scheduler.step_builder import InFlight

if TYPE_CHECKING:
    from raycore.scheduler.slots import SlotTable


class Constraints(SchedulerPart):
    """Knows the rules that workers apply to a token after they have seen all before it."""

    order = 80

    def __init__(self, *, defers_masks: bool = False) -> None:
        """`defers_masks`: whether a step may begin before the last token is known that its masks follow."""
        self._defers_masks = defers_masks

    def needs_output(self, request: Request) -> bool:
        """A grammar, or a word that may not come, follows the tokens, or reasoning ends after so many of them."""
        if request.thinking is not None or any(len(word) > 1 for word in request.bad_words_token_ids):
            return True
        return request.params.structured_outputs is not None and not self._defers_masks


@dataclass(eq=False, slots=True)
class _Constrained:
    """A running request with a constraint, as long as it has its slot."""

    request: Request
    matcher: TokenMatcher | None = None
    """None: there is none yet, or the last one has failed."""


@dataclass(slots=True)
class _MaskedTokens:
    """The new tokens of a slot in a step: one, and one more for each draft."""

    constrained: _Constrained
    slot: int
    position: int
    """That of the first one."""
    drafts: NDArray[np.int32]


@dataclass(slots=True)
class _MaskedStep:
    tokens: list[_MaskedTokens]
    failed: list[tuple[int, int, str]]
    """(slot, position, reason) of tokens that can't come."""


class GrammarMasks(SchedulerPart):
    """Plans steps with constrained requests as masked, and makes the masks.

    `make` may run on another thread, while the scheduler rests.
    """

    order = 85

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self.compiler = compiler
        self._maker = MaskMaker(vocab_size)
        self._running: dict[int, _Constrained] = {}
        """By slot."""
        self._steps: dict[int, _MaskedStep] = {}
        """The masked steps in flight, by number."""

    def attach(self, view: SchedulerView) -> None:
        self._table: SlotTable = view.slots

    def started(self, start: Start) -> None:
        if start.request.params.structured_outputs is not None:
            self._running[start.request.slot] = _Constrained(start.request)

    def left(self, request: Request, slot: int, *, is_over: bool) -> None:
        self._running.pop(slot, None)

    def plan_finished(self, plan: StepPlan) -> None:
        """Note which new tokens follow grammars."""
        if not self._running:
            return
        slots = np.frombuffer(plan.slots, np.int32).tolist()
        if self._running.keys().isdisjoint(slots):
            return
        tokens = list(self._told_tokens(plan, slots) if plan.tokens is not None else self._next_tokens(slots))
        if tokens:
            plan.masked, self._steps[plan.step] = True, _MaskedStep(tokens, [])

    def _next_tokens(self, slots: list[int]) -> list[_MaskedTokens]:
        """Return the tokens of a step that samples one after each slot's last known token."""
        table = self._table
        return [
            _MaskedTokens(self._running[slot], slot, int(table.computed[slot]), _NO_DRAFTS)
            for slot in slots
            if slot in self._running and table.phase[slot] != PREFILL
        ]

    def _told_tokens(self, plan: StepPlan, slots: list[int]) -> list[_MaskedTokens]:
        """Return the tokens of a step whose plan tells which tokens it computes."""
        told = plan.tokens
        assert told is not None
        token_ids = np.frombuffer(told.token_ids, np.int32)
        starts, num_sampled = np.frombuffer(told.starts, np.int32), np.frombuffer(told.num_sampled, np.int32)
        counts = np.frombuffer(plan.num_tokens, np.int32) if plan.num_tokens else np.ones_like(starts)
        ends = np.cumsum(counts)
        return [
            _MaskedTokens(
                self._running[slot],
                slot,
                int(starts[row] + counts[row] - num_sampled[row]) + 1,
                token_ids[ends[row] - num_sampled[row] + 1 : ends[row]],
            )
            for row, slot in enumerate(slots)
            if slot in self._running and num_sampled[row]
        ]

    def is_due(self, step: int) -> bool:
        """Whether all tokens have arrived that a step's masks follow."""
        received = self._table.received
        return all(received[each.slot] >= each.position for each in self._current(step))

    def make(self, step: int) -> GrammarOutput:
        """Make a step's masks. Requests that have left meanwhile need none."""
        outputs: list[Output] = []
        made: list[_MaskedTokens] = []
        for each in self._current(step):
            try:
                matcher = self._matcher(each.constrained)
            except InvalidRequest as error:
                self._steps[step].failed.append((each.slot, each.position, str(error)))
                continue
            request = each.constrained.request
            tokens = self._table.tokens[each.slot, request.num_prompt_tokens : each.position]
            outputs.append(Output(matcher, np.concatenate([tokens, each.drafts]), len(each.drafts)))
            made.append(each)
        masks = self._maker.make(outputs)
        for index, num_before, why in masks.failed:
            made[index].constrained.matcher = None
            self._steps[step].failed.append((made[index].slot, made[index].position + num_before, why))
        slots = np.array([made[index].slot for index, _ in masks.rows], np.int32)
        positions = np.array([made[index].position + num_before for index, num_before in masks.rows], np.int32)
        return GrammarOutput(slots.tobytes(), positions.tobytes(), masks.bits_RB.tobytes())

    def _current(self, step: int) -> list[_MaskedTokens]:
        """Return the tokens of a step whose requests still have their slots."""
        return [each for each in self._steps[step].tokens if self._running.get(each.slot) is each.constrained]

    def _matcher(self, constrained: _Constrained) -> TokenMatcher:
        """Return what follows a request's output. Raises InvalidRequest if its constraint can't be compiled."""
        params = constrained.request.params
        if constrained.matcher is None:
            assert params.structured_outputs is not None
            constrained.matcher = self.compiler.matcher_of(params.structured_outputs, params.stop_token_ids or ())
        return constrained.matcher

    def result_arrived(self, step: InFlight, result: StepResult) -> None:
        """Have the requests fail that got a token for which there was no mask. After a wrong draft, they got none."""
        if not self._steps:
            return
        masked = self._steps.pop(step.step, None)
        if masked is None or not masked.failed:
            return
        slots = step.batch.slots.tolist()
        counts = np.frombuffer(result.num_tokens, np.int32) if result.num_tokens else np.ones(len(slots), np.int32)
        for slot, position, why in masked.failed:
            row = slots.index(slot)
            if self._table.received[slot] + counts[row] > position:
                result.failed.append((row, why))

    def check_integrity(self) -> None:
        for slot, constrained in self._running.items():
            assert self._table.requests[slot] is constrained.request


_NO_DRAFTS = np.empty(0, np.int32)
