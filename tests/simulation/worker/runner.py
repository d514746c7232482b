"""Runs the steps of a worker: turns a `StepPlan` into a `StepResult`, as `StepPlan` says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raycore.cache_layout import KVCacheConfig
from raycore.config import EngineConfig
from raycore.errors import InvalidRequest
from raycore.messages import GrammarOutput, NewRequest, StepPlan, StepResult, TokenLogprobs, TokenReport
from raycore.parts.constraints.grammar.matcher import mask_bytes
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts
from raycore.parts.hidden_states.values import NAME as HIDDEN_STATES
from raycore.step.batch import SlotBatch, StepInputs
from raycore.step.features import SlotFeatures
from raycore.step.verification import verify
from simulation.worker import model, sampling
from simulation.worker.cache import Cache
from simulation.worker.chance import Chance
from simulation.worker.features import Embeddings
from simulation.worker.numbers64 import Words, as_words, mix
from simulation.worker.preparation import Adapters
from simulation.worker.states import States
from simulation.worker.steps import note_drafts
from simulation.world.kernel import pause

WRONG_DRAFTS = 0.25


@dataclass(slots=True)
class _Extras:
    """What a slot's request wants besides plain tokens. Most want nothing."""

    request: NewRequest
    rules: sampling.Rules | None


class Computed(NamedTuple):
    """A step from which nothing has been sampled yet."""

    step: StepInputs
    result: StepResult
    hidden_T: Words | None
    """None: the step has no tokens."""


Masks = dict[tuple[int, int], NDArray[np.bool_]]
"""Which tokens may come, [V], by slot and position."""


def _masks_of(grammar: GrammarOutput, vocab_size: int) -> Masks:
    slots, positions = (np.frombuffer(each, np.int32).tolist() for each in (grammar.slots, grammar.positions))
    bits_MB = np.frombuffer(grammar.bitmask, np.uint8).reshape(len(slots), mask_bytes(vocab_size))
    keys = zip(slots, positions, strict=True)
    masks_MV = np.unpackbits(bits_MB, axis=1, count=vocab_size, bitorder="little").astype(np.bool_)
    return dict(zip(keys, masks_MV, strict=True))


class Runner:
    """The requests that have slots, and the memory that depends on the KV cache."""

    def __init__(self, config: EngineConfig, cache: KVCacheConfig, adapters: Adapters, chance: Chance) -> None:
        num_slots, limits = config.scheduler.max_num_seqs, config.encoder_limits
        self.cache = Cache(cache, chance)
        self._vocab_size = config.model.spec.vocab_size
        self._adapters = adapters
        self._embeddings = None if limits is None else Embeddings(limits)
        self.states = None if config.state_rows is None else States(config.state_rows, chance)
        self._batch = SlotBatch(
            num_slots,
            cache.layout.limits.max_model_len,
            cache.layout.limits.block_size,
            cache.layout.num_groups,
            None if limits is None else SlotFeatures(None, num_slots, has_axes=False),
        )
        self._salts = np.zeros(num_slots, np.uint64)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._is_greedy = np.zeros(num_slots, np.bool_)
        self._extras: dict[int, _Extras] = {}
        """By slot. Of requests that want nothing, there is no entry."""
        self.last_sampled: list[int] = []
        """The slots that the last step has sampled."""
        self._num_heard = np.zeros(num_slots, np.int64)
        """By slot: how many tokens the host knows, which follows the rules."""

    def compute(self, plan: StepPlan, weights: Words) -> Computed:
        """Run one step, but sample nothing."""
        for slot in plan.freed_slots:
            self._extras.pop(slot, None)
        for request in plan.new_requests:
            self._enter(request)
        batch = self._batch
        batch.apply(plan)
        if self.states is not None:
            self.states.apply(plan)
        drafts = self._drafts(plan, weights) if plan.max_drafts else NO_DRAFTS
        step, result = batch.advance(plan, drafts), StepResult(plan.step)
        self.last_sampled = step.sampled_slots.tolist() if len(step.slots) else []
        if plan.encoder is not None:
            assert self._embeddings is not None, "the model takes only text"
            self._embeddings.apply(plan.encoder, weights)
        if not len(step.slots):
            return Computed(step, result, None)
        pause()
        hidden_T = self._compute(step, weights)
        self._report_prompts(step, hidden_T, result)
        return Computed(step, result, hidden_T)

    def sample(self, computed: Computed, grammar: GrammarOutput | None) -> tuple[StepResult, Callable[[], None]]:
        """Run the rest of a step. Returns the result, and what has to be called when the host takes it."""
        step, result, hidden_T = computed
        if hidden_T is None:
            return result, lambda: None
        if len(step.sampled):
            self._sample(
                step,
                hidden_T[step.sampled_rows],
                result,
                None if grammar is None else _masks_of(grammar, self._vocab_size),
            )
        else:
            result.num_tokens = np.zeros(len(step.slots), np.int32).tobytes()
        return result, lambda: self._hear(step)

    def _hear(self, step: StepInputs) -> None:
        """Note that the host knows a step's new tokens."""
        slots = step.sampled_slots[self._batch.is_current(step)]
        self._num_heard[slots] = self._batch.num_known[slots]

    def _enter(self, request: NewRequest) -> None:
        slot, params = request.slot, request.params
        self._num_heard[slot] = len(request.token_ids) // 4
        self._salts[slot] = model.salt_key((params.extra_args or {}).get("salt"))
        self._seeds[slot] = request.seed
        self._is_greedy[slot] = params.is_greedy
        rules = sampling.Rules(params, request.eos_token_ids, request.bad_words_token_ids, self._vocab_size)
        wants_more = (
            request.pooling is not None
            or params.logprobs is not None
            or params.prompt_logprobs is not None
            or params.return_hidden_states
            or params.return_prompt_hidden_states
        )
        self._extras.pop(slot, None)
        if rules.has_any or wants_more:
            self._extras[slot] = _Extras(request, rules if rules.has_any else None)

    def _compute(self, step: StepInputs, weights: Words) -> Words:
        """[T]: the hidden states."""
        content_T = as_words(self._batch.token_ids[step.token_slots, step.positions])
        if step.features is not None and step.features.rows:
            assert self._embeddings is not None, "the model takes only text"
            self._embeddings.replace(content_T, step.features)
        adapters_T = self._adapters.keys(self._batch.adapter[step.token_slots])
        own_T = mix(adapters_T, self._salts[step.token_slots])
        first_T = model.first_layer(content_T, as_words(step.positions), own_T, weights)
        places = self.cache.places_of(step)
        seen_T = self.cache.exchange(step, places, 0, first_T)
        if self.states is not None:
            seen_T += self.states.advance(step, first_T)
        pause()
        second_T = model.second_layer(seen_T, first_T, weights)
        return model.hidden_states(self.cache.exchange(step, places, 1, second_T), second_T, weights)

    def _sample(self, step: StepInputs, hidden_R: Words, result: StepResult, masks: Masks | None) -> None:
        slots_R = step.sampled_slots
        picked_RV = sampling.pick(
            hidden_R, self._seeds[slots_R], step.next_positions, self._is_greedy[slots_R], self._vocab_size
        )
        failed: dict[int, str] = {}
        if self._extras:
            failed = self._follow_rules(step, picked_RV, masks)
        ids_R = picked_RV.argmax(axis=1)
        if step.is_decoding:
            rows = np.arange(len(ids_R))
        else:
            new = verify(step, ids_R)
            rows = new.rows
            result.num_tokens = new.counts.astype(np.int32).tobytes()
            if step.draft_ids is not None:
                lengths = np.bincount(step.sampled, minlength=len(step.slots)) - 1
                has_any = lengths > 0
                note_drafts(int(has_any.sum()), int(lengths[has_any].sum()), int((new.counts - 1)[has_any].sum()))
                self._batch.drop_drafts(step, new.counts)
                result.num_drafts = step.num_drafts.astype(np.int32).tobytes()
        self._batch.token_ids[slots_R[rows], step.next_positions[rows]] = ids_R[rows]
        result.token_ids = ids_R[rows].astype(np.int32).tobytes()
        result.failed = [(int(step.sampled[row]), failed[row]) for row in rows.tolist() if row in failed]
        if self._extras:
            self._report(step, hidden_R, ids_R, rows.tolist(), result)

    def _follow_rules(self, step: StepInputs, picked_RV: Words, masks: Masks | None) -> dict[int, str]:
        """Forbid tokens. Returns why requests can't go on, by row.

        `masks`: of requests with constraints. Rows without one are free: they come after a wrong draft, or nobody wants
        them any more. None: constraints are followed here.
        """
        failed: dict[int, str] = {}
        for row, slot in enumerate(step.sampled_slots.tolist()):
            extras = self._extras.get(slot)
            if extras is not None and extras.rules is not None:
                position, num_prompt = int(step.next_positions[row]), extras.request.num_prompt_tokens
                if masks is not None and extras.request.params.structured_outputs is not None:
                    if (slot, position) in masks:
                        picked_RV[row, ~masks[slot, position]] = 0
                    continue
                output = self._batch.token_ids[slot, num_prompt:position].tolist()
                if step.draft_ids is None:
                    num_missing = position - int(self._num_heard[slot])
                    output[len(output) - num_missing :] = [0] * num_missing
                try:
                    picked_RV[row, ~extras.rules.allowed(output)] = 0
                except InvalidRequest as error:
                    failed[row] = str(error)
        return failed

    def _report(
        self, step: StepInputs, hidden_R: Words, ids_R: model.Ints, rows: Sequence[int], result: StepResult
    ) -> None:
        """Add what requests want to know of their new tokens."""
        for row in rows:
            extras = self._extras.get(int(step.sampled_slots[row]))
            if extras is None:
                continue
            index, params, own = int(step.sampled[row]), extras.request.params, hidden_R[row : row + 1]
            if extras.request.pooling is not None:
                result.pooled.append((index, sampling.pooled(own, extras.request.pooling)))
            elif params.logprobs is not None:
                (entry,) = self._logprobs(own, ids_R[row : row + 1], params.logprobs)
                result.logprobs.append((index, entry))
            if params.return_hidden_states:
                position = int(step.next_positions[row]) - 1
                report = TokenReport(HIDDEN_STATES, position, 1, sampling.hidden_bytes(own[0]))
                result.reports.append((index, report))

    def _report_prompts(self, step: StepInputs, hidden_T: Words, result: StepResult) -> None:
        """Add what requests want to know of their prompts' tokens."""
        if not self._extras:
            return
        row = 0
        for index, (slot, start, count) in enumerate(
            zip(step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        ):
            extras = self._extras.get(slot)
            if extras is not None and start < extras.request.num_prompt_tokens:
                num_prompt, params = extras.request.num_prompt_tokens, extras.request.params
                if params.prompt_logprobs is not None:
                    known = self._batch.token_ids[slot, start + 1 : min(start + count + 1, num_prompt)]
                    own = hidden_T[row : row + len(known)]
                    entries = self._logprobs(own, known.astype(np.int64), params.prompt_logprobs)
                    if entries:
                        result.prompt_logprobs.append((index, start + 1, entries))
                if params.return_prompt_hidden_states:
                    own = hidden_T[row : row + min(count, num_prompt - start)]
                    states = b"".join(sampling.hidden_bytes(each) for each in own)
                    result.reports.append((index, TokenReport(HIDDEN_STATES, start, len(own), states)))
            row += count

    def _logprobs(self, hidden_R: Words, chosen_R: model.Ints, num_best: int) -> list[TokenLogprobs]:
        return sampling.logprobs(hidden_R, chosen_R, num_best, self._vocab_size)

    def _drafts(self, plan: StepPlan, weights: Words) -> Drafts:
        """Return drafts for a step, up to the lengths that its plan has. All workers of a rank make the same ones."""
        drafts: dict[int, list[int]] = {}
        pairs = zip(np.frombuffer(plan.slots, np.int32), np.frombuffer(plan.max_drafts, np.int32), strict=True)
        for slot, most in sorted((int(slot), int(most)) for slot, most in pairs):
            own = random.Random(f"{self._seeds[slot]} {self._batch.num_known[slot]}")
            length = own.randint(0, most)
            if length:
                drafts[slot] = self.draft(slot, length, weights, lambda own=own: own.random() < WRONG_DRAFTS)
        return Drafts.of(list(drafts), list(drafts.values()))

    def draft(self, slot: int, count: int, weights: Words, is_wrong: Callable[[], bool]) -> list[int]:
        """Draft a slot's next tokens: each is right or wrong as `is_wrong` says, unless the prompt has features."""
        batch, drafts = self._batch, list[int]()
        num_known = int(batch.num_known[slot])
        tokens = batch.token_ids[slot, :num_known].tolist()
        own = mix(self._adapters.keys(batch.adapter[slot : slot + 1]), self._salts[slot])
        shape = model.Shape(self._vocab_size, self.cache.windows, self.states is not None)
        one = slice(slot, slot + 1)
        for position in range(num_known, num_known + count):
            hidden = model.whole_sequence(shape, as_words(np.array(tokens + drafts)), own, weights)[-1:]
            picked = sampling.pick(
                hidden, self._seeds[one], np.array([position]), self._is_greedy[one], self._vocab_size
            )
            drafts.append((int(picked.argmax()) + is_wrong()) % self._vocab_size)
        return drafts
