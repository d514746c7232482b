"""An engine core in one thread: the real scheduler and a model runner without a model.

The runner applies plans as `StepPlan` says, to a simulated KV cache that records which token was written at which
position of which block. Before it makes a token, it reads the request's whole context back through the block table.
A wrong block, a stale prefix, or a write to another request's block therefore fails.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import cycle, groupby

import msgspec
import numpy as np
from configs import SPEC
from fake_connector import GARBAGE, FakeConnector
from msgspec.structs import replace

from raycore.cache_layout import CacheGroup, CacheLayout, CacheLimits
from raycore.config import CacheConfig, SchedulerConfig
from raycore.config.states import StateRows
from raycore.kvcache.snapshots import Snapshots
from raycore.messages import (
    EncoderPlan,
    EngineRequest,
    NewRequest,
    StepPlan,
    StepResult,
    StepTokens,
    TokenLogprobs,
    TokenReport,
)
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.parts.adapters.scheduler import AdapterLimit
from raycore.parts.constraints.scheduler import Constraints, GrammarMasks
from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.guesses.drafts import Drafts
from raycore.parts.drafts.scheduler.drafting import DraftPlanning, PlanningAhead
from raycore.parts.drafts.scheduler.speculation import Speculation
from raycore.parts.drafts.scheduler.worker_drafts import DraftsAhead, WorkerDrafts
from raycore.parts.experts.models import MoeSpec
from raycore.parts.images.config import EncoderLimits
from raycore.parts.images.scheduler import EncoderInputs
from raycore.parts.routed_experts.client import ExpertsOfRequest, ReturnedExperts
from raycore.parts.routed_experts.scheduler import CachedExperts
from raycore.parts.transfers.config.kv_transfer import KVTransferConfig
from raycore.parts.transfers.scheduler.cache_events import CacheEvents
from raycore.parts.transfers.scheduler.state_blocks import StateBlocks
from raycore.parts.transfers.scheduler.transfers import Transfers
from raycore.sampling_params import RepetitionDetectionParams, SamplingParams
from raycore.scheduler.part import SchedulerPart
from raycore.scheduler.prefix_states import PrefixStates
from raycore.scheduler.prefixes import Prefixes
from raycore.scheduler.scheduler import Scheduler
from raycore.state.slot_rows import SlotRows
from raycore.state.spec import FROM_ZERO
from raycore.step.batch import StepInputs

VOCAB = 50
MAX_DRAFTS = 5
WITH_EXPERTS = replace(SPEC, moe=MoeSpec(7, 1, 8, [True]))
"""A model with one layer of experts, of which each token gets one."""
RETURNED = ReturnedExperts(WITH_EXPERTS)


def next_token(context: list[int], seed: int) -> int:
    """The fake model: any other context gives another token."""
    return zlib.crc32(np.array([seed, *context], np.int32).tobytes()) % VOCAB


def expert_of(tokens: list[int], position: int) -> int:
    """The expert of a token, which depends on the tokens before it, too."""
    return zlib.crc32(np.array(tokens[: position + 1], np.int32).tobytes()) % WITH_EXPERTS.moe.num_experts


def repeats(output: list[int], asked: RepetitionDetectionParams) -> bool:
    """Whether an output ends with a repetition."""
    sizes = range(max(1, asked.min_pattern_size), asked.max_pattern_size + 1)
    return any(
        len(output) >= size * asked.min_count and output[-size * asked.min_count :] == output[-size:] * asked.min_count
        for size in sizes
    )


def reference(request: EngineRequest, max_model_len: int) -> tuple[list[int], str, int | str | None]:
    """(output tokens, finish reason, stop reason) of a request that runs all alone."""
    params, context = request.params, request.prompt_token_ids + request.output_token_ids
    new: list[int] = []
    while True:
        token = next_token(context, request.seed)
        context = [*context, token]
        new.append(token)
        num_output = len(context) - len(request.prompt_token_ids)
        if num_output >= params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                return new, "stop", None
            if token in (params.stop_token_ids or []):
                return new, "stop", token
        if num_output == params.max_tokens or len(context) == max_model_len:
            return new, "length", None
        asked, output = params.repetition_detection, context[len(request.prompt_token_ids) :]
        if asked is not None and num_output >= params.min_tokens and repeats(output, asked):
            return new, "repetition", "repetition_detected"


class Clairvoyant(Speculation):
    """Drafts that are right for as long as `num_right` says, a list that is gone through again and again."""

    def __init__(self, num_right: list[int], requests: dict[int, EngineRequest]) -> None:
        super().__init__(SpeculativeConfig("ngram", MAX_DRAFTS), 64)
        self._num_right = cycle(num_right)
        self._requests = requests

    def propose(self, slots, running, limits, budget, num_other):
        """Drafts of up to MAX_DRAFTS tokens for each slot, within the limits."""
        drafts: dict[int, list[int]] = {}
        for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True):
            length = min(limit, budget, MAX_DRAFTS)
            if length > 0:
                drafts[slot] = self._draft(slot, running, length)
                budget -= length
        return Drafts.of(list(drafts), list(drafts.values()))

    def _draft(self, slot: int, running, length: int) -> list[int]:
        context = running.tokens[slot, : running.received[slot]].tolist()
        return draft_after(context, self._requests[int(running.seq_id[slot])].seed, length, next(self._num_right))


def draft_after(context: list[int], seed: int, length: int, num_right: int) -> list[int]:
    """A draft whose first tokens are right."""
    draft: list[int] = []
    for offset in range(length):
        token = next_token(context + draft, seed)
        draft.append(token if offset < num_right else (token + 1) % VOCAB)
    return draft


class DraftingWorkers(WorkerDrafts):
    """Asks for drafts of all slots, within the limits. The runner makes them."""

    def __init__(self) -> None:
        super().__init__(SpeculativeConfig("ngram", MAX_DRAFTS), 64)

    def propose(self, slots, running, limits, budget, num_other):
        return self._asked(slots, limits, budget, num_other)

    def _asked(self, slots, limits, budget, num_other):
        lengths = np.minimum(limits, MAX_DRAFTS)
        lengths = np.minimum(lengths, np.maximum(budget - (np.cumsum(lengths) - lengths), 0))
        return Drafts(slots, lengths, np.zeros((len(slots), 0), np.int32)).shortened(lengths)


class LastStageDrafting(DraftsAhead):
    """Asks for as many drafts after each step."""

    def __init__(self) -> None:
        super().__init__(SpeculativeConfig("ngram", MAX_DRAFTS), 64)

    _asked = DraftingWorkers._asked


class FakeStates:
    """Rows of states, each of which is the tokens after which it is."""

    def __init__(self, rows: StateRows) -> None:
        self._rows = SlotRows(rows.num_slots, rows.rows_per_slot)
        self.tokens: dict[int, list[int]] = {FROM_ZERO: []}
        self.num_begun = 0
        """How many requests have begun with the state of a prefix."""

    def execute(
        self,
        plan: StepPlan,
        starts: list[int],
        counts: list[int],
        known: dict[int, list[int]],
        num_drafts: dict[int, int],
    ) -> None:
        """Read and write the states of a step. `known`: tokens by slot, drafts of the step included."""
        self._rows.apply(plan)
        self.num_begun += 0 if plan.states is None else len(plan.states.begins) // 8
        step, slots = _step_inputs(plan, starts, counts, known, num_drafts), _ints(plan.slots)
        made, copies_2n = self._rows.begin(step)
        copied = {target: self.tokens[source] for source, target in copies_2n.T.tolist()}
        assert len(copied) == copies_2n.shape[1]
        saves: list[list[tuple[int, int]]] = [[] for _ in slots]
        for index, count, row in made.saves_S3.tolist():
            saves[index].append((count, row))
        written = {row: index for index, own in enumerate(saves) for _, row in own}
        written |= {int(row): index for index, row in enumerate(made.sequences_n4[:, 3])}
        assert len(written) == len(slots) + len(made.saves_S3), "a row is written twice"
        assert not written.keys() & copied.keys()
        self.tokens |= copied
        read = [self.tokens[row] for row in made.sequences_n4[:, 2].tolist()]
        for index, (first, count, row, write_row) in enumerate(made.sequences_n4.tolist()):
            tokens, start = known[slots[index]], starts[index]
            assert (first, count) == (sum(counts[:index]), counts[index])
            assert written.get(row, index) == index, "a row is written that another sequence reads"
            assert read[index] == tokens[:start], "the state of other tokens"
            assert saves[index] == sorted(saves[index])
            for num_tokens, saved_row in [*saves[index], (count, write_row)]:
                assert 0 < num_tokens <= count
                self.tokens[saved_row] = tokens[: start + num_tokens]


def _step_inputs(
    plan: StepPlan, starts: list[int], counts: list[int], known: dict[int, list[int]], num_drafts: dict[int, int]
) -> StepInputs:
    """What `SlotRows` reads of a step."""
    slots = _ints(plan.slots)
    num_sampled = [
        num_drafts.get(slot, 0) + (start + count == len(known[slot]))
        for slot, start, count in zip(slots, starts, counts, strict=True)
    ]
    nothing = np.zeros(0, np.int64)
    return StepInputs(
        slots=np.array(slots, np.int64),
        counts=np.array(counts),
        starts=np.array(starts),
        num_decodes=counts.count(1),
        token_slots=nothing,
        positions=nothing,
        sampled=np.repeat(np.arange(len(counts)), num_sampled),
        sampled_rows=nothing,
        next_positions=nothing,
        draft_ids=nothing if max(num_sampled) > 1 else None,
        generations=nothing,
        block_tables=np.zeros((0, 0), np.int32),
        tables_version=0,
    )


class FakeEncoder:
    """The embeddings of features, each of which is what it was computed from."""

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self.kept: dict[str, tuple[int, bytes]] = {}
        """By identifier: (number of embeddings, what they were computed from)."""
        self.num_encoded = 0

    def execute(self, plan: EncoderPlan | None, slots: list[int], starts: list[int], counts: list[int], rows) -> None:
        """Drop and compute embeddings, and check that those are there which a step's tokens need."""
        for identifier in [] if plan is None else plan.freed:
            self.kept.pop(identifier, None)  # a worker that has started over has lost it
        inputs = [] if plan is None else plan.inputs
        for feature, data in inputs:
            assert feature.identifier not in self.kept, "it is there"
            self.kept[feature.identifier] = feature.num_tokens, data.data
        self.num_encoded += len(inputs)
        assert sum(feature.num_tokens for feature, _ in inputs) <= self.limits.cache_size
        assert sum(size for size, _ in self.kept.values()) <= self.limits.cache_size
        used: set[str] = set()
        for slot, start, count in zip(slots, starts, counts, strict=True):
            for feature in rows[slot].features:
                end = feature.position + feature.num_tokens
                if feature.position < start + count and end > start:
                    size, data = self.kept[feature.identifier]
                    assert (size, data) == (feature.num_tokens, feature.identifier.encode())
                    assert self.limits.is_divisible or end <= start + count, "a feature is cut"
                    used.add(feature.identifier)
        assert used >= {feature.identifier for feature, _ in inputs}, "encoded too early"


class FakeModelRunner:
    """Stands in for `ModelRunner`: applies plans to a simulated KV cache of `num_blocks` and checks each context."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_drafts: int = 0,
        windows: Sequence[int | None] = (None,),
        states: FakeStates | None = None,
        encoder: FakeEncoder | None = None,
    ) -> None:
        self.encoder = encoder
        self.max_drafts = max_drafts
        self.windows = list(windows)
        self.states = states
        self.block_size = block_size
        self.kv_tokens = np.full((num_blocks, block_size), -1, np.int64)
        self.kv_positions = np.full((num_blocks, block_size), -1, np.int64)
        self.kv_groups = np.full((num_blocks, block_size), -1, np.int64)
        self.rows: dict[int, NewRequest] = {}
        self.known: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[list[int]]] = {}
        """By slot and group."""
        self.num_drafts: dict[int, int] = {}
        """By slot: how many of its last known tokens are drafts of this step."""
        self.num_right = cycle([0])
        """How many tokens of each of its own drafts are right, in turn."""
        self.drafts: dict[int, list[int]] = {}
        """By slot: what was drafted after its last step."""
        self.depth = 1
        self.drafts_ahead = False
        self.reports_experts = False
        self.unseen: deque[set[int]] = deque()
        """For each step whose result the scheduler hasn't seen: the slots for which it made a token."""
        self.num_resumed = 0
        self.num_cached = 0
        self.max_plan_bytes = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """One step, in the order that `StepPlan` gives."""
        data = msgspec.msgpack.encode(plan)
        plan = msgspec.msgpack.decode(data, type=StepPlan)
        self.max_plan_bytes = max(self.max_plan_bytes, len(data))
        for slot in plan.freed_slots:
            for state in (self.rows, self.known, self.computed, self.blocks):
                del state[slot]
        for new in plan.new_requests:
            self._take_in(new)
        new_blocks = zip(*self._by_group(plan.new_block_ids), strict=True)
        for slot, of_groups in zip(_ints(plan.new_block_slots), new_blocks, strict=True):
            for blocks, block in zip(self.blocks[slot], of_groups, strict=True):
                blocks.append(block)
        slots = _ints(plan.slots)
        assert len(set(slots)) == len(slots)
        assert slots or plan.transfer is not None, "an empty step"
        counts = _ints(plan.num_tokens) or [1] * len(slots)
        if not slots:
            self.unseen.append(set())
            return StepResult(plan.step)
        assert sorted(counts, key=lambda count: count > 1) == counts, "single tokens come first"
        starts = [self.computed[slot] for slot in slots]
        self.num_drafts = {}
        for slot, most in zip(slots, _ints(plan.max_drafts), strict=False):
            self._draft(slot, most)
        if plan.max_drafts:
            assert plan.tokens is None
            counts = [count + self.num_drafts[slot] for slot, count in zip(slots, counts, strict=True)]
        if self.encoder is not None:
            self.encoder.execute(plan.encoder, slots, starts, counts, self.rows)
        else:
            assert plan.encoder is None
        if plan.tokens is not None:
            self._check_told(plan.tokens, slots, starts, counts)
        if self.states is not None:
            self.states.execute(plan, starts, counts, self.known, self.num_drafts)
        else:
            assert plan.states is None
        # a request may go on from blocks that another one fills in this step
        for _, slot, count in sorted(zip(starts, slots, counts, strict=True)):
            self._write(slot, count)
        reports = self._chosen_experts(slots, starts, counts) if self.reports_experts else []
        num_drafts = [self.num_drafts.get(slot, 0) for slot in slots]
        tokens = [self._read_and_sample(slot, start) for slot, start in zip(slots, starts, strict=True)]
        self.unseen.append({slot for slot, new in zip(slots, tokens, strict=True) if new})
        for slot, new, most in zip(slots, tokens, _ints(plan.next_drafts), strict=False):
            assert self.drafts_ahead
            if most:
                assert new
                self.drafts[slot] = self._make_draft(slot, most)
        return StepResult(
            plan.step,
            np.array([token for new in tokens for token in new], np.int32).tobytes(),
            np.array([len(new) for new in tokens], np.int32).tobytes(),
            reports=reports,
            num_drafts=np.array(num_drafts, np.int32).tobytes(),
            logprobs=[
                (index, TokenLogprobs([token], [-1.0], 1))
                for index, (slot, new) in enumerate(zip(slots, tokens, strict=True))
                for token in new
                if self.rows[slot].params.logprobs is not None
            ],
            prompt_logprobs=[
                (index, start + 1, [TokenLogprobs([token], [-1.0], 1) for token in predicted])
                for index, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True))
                if (predicted := self._prompt(slot)[start + 1 : start + count + 1])
                and self.rows[slot].params.prompt_logprobs is not None
            ],
        )

    def _draft(self, slot: int, most: int) -> None:
        """Add a draft to the known tokens, at most as long as the plan says."""
        known = self.known[slot]
        assert not most or self.computed[slot] == len(known) - 1
        draft = self.drafts.pop(slot, None)
        if draft is None:
            draft = [] if self.drafts_ahead else self._make_draft(slot, most)
        known += draft[:most]
        self.num_drafts[slot] = len(draft[:most])

    def _make_draft(self, slot: int, most: int) -> list[int]:
        num_right = next(self.num_right) if most else 0
        return draft_after(self.known[slot], self.rows[slot].seed, min(most, 1 + num_right), num_right)

    def _chosen_experts(self, slots: list[int], starts: list[int], counts: list[int]) -> list[tuple[int, TokenReport]]:
        chosen = [
            bytes(expert_of(self.known[slot], position) for position in range(start, start + count))
            for slot, start, count in zip(slots, starts, counts, strict=True)
        ]
        each = enumerate(zip(starts, counts, chosen, strict=True))
        return [(index, TokenReport("routed_experts", *report)) for index, report in each]

    def _check_told(self, told: StepTokens, slots: list[int], starts: list[int], counts: list[int]) -> None:
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        token_ids, num_sampled = _ints(told.token_ids), _ints(told.num_sampled)
        assert _ints(told.starts) == starts
        for slot, start, end, sampled in zip(slots, starts, ends, num_sampled, strict=True):
            known = self.known[slot]
            part, token_ids = token_ids[: end - start], token_ids[end - start :]
            num_drafts = max(0, sampled - 1)
            assert part[: len(part) - num_drafts] == known[start : end - num_drafts]
            assert sampled == (end - num_drafts == len(known)) + num_drafts
            known += part[len(part) - num_drafts :]
            self.num_drafts[slot] = num_drafts
        assert not token_ids
        assert all(slot not in unseen for slot in slots for unseen in self.unseen), "told before it was known"

    def _prompt(self, slot: int) -> list[int]:
        return self.known[slot][: self.rows[slot].num_prompt_tokens]

    def _take_in(self, new: NewRequest) -> None:
        assert new.slot not in self.rows
        for slots in self.unseen:
            slots.discard(new.slot)
        self.rows[new.slot] = new
        self.known[new.slot] = _ints(new.token_ids)
        self.drafts.pop(new.slot, None)
        self.computed[new.slot] = new.num_computed_tokens
        self.blocks[new.slot] = self._by_group(new.block_ids)
        self.num_resumed += len(self.known[new.slot]) > new.num_prompt_tokens
        self.num_cached += new.num_computed_tokens

    def _write(self, slot: int, count: int) -> None:
        start, known = self.computed[slot], self.known[slot]
        assert start + count <= len(known), "more than is known"
        num_needed, num_held = -(-(start + count) // self.block_size), len(self.blocks[slot][0])
        # wrong drafts leave blocks over
        most = num_needed + self.depth * self.max_drafts
        assert num_needed <= num_held <= most, "blocks exactly for what is computed"
        is_garbage = self._reads_garbage(slot, start)
        for position in range(start, start + count):
            for group, blocks in enumerate(self.blocks[slot]):
                where = blocks[position // self.block_size], position % self.block_size
                self.kv_tokens[where] = GARBAGE if is_garbage else self._content(slot, position)
                self.kv_positions[where] = GARBAGE if is_garbage else position
                self.kv_groups[where] = group
        self.computed[slot] = start + count

    def _content(self, slot: int, position: int) -> int:
        """What the model sees at a position: a token, or an embedding of a feature."""
        for feature in self.rows[slot].features:
            if 0 <= position - feature.position < feature.num_tokens:
                return VOCAB + zlib.crc32(f"{feature.identifier} {position - feature.position}".encode())
        return self.known[slot][position]

    def _reads_garbage(self, slot: int, start: int) -> bool:
        """Whether the keys and values of computed tokens weren't loaded, or were computed from such ones.

        Those that tokens see from `start` on.
        """
        firsts = [0 if window is None else max(0, start - window + 1) for window in self.windows]
        return any(
            GARBAGE in self.kv_tokens[blocks].ravel()[first : self.computed[slot]]
            for first, blocks in zip(firsts, self.blocks[slot], strict=True)
        )

    def _by_group(self, block_ids: bytes) -> list[list[int]]:
        ids = _ints(block_ids)
        return [ids[group :: len(self.windows)] for group in range(len(self.windows))]

    def _read_and_sample(self, slot: int, start: int) -> list[int]:
        """The new tokens: more than one if drafts were right. `start`: the first token of this step."""
        computed, known = self.computed[slot], self.known[slot]
        if self._reads_garbage(slot, start):
            return self._sample_garbage(slot)
        for group, (blocks, window) in enumerate(zip(self.blocks[slot], self.windows, strict=True)):
            seen = slice(0 if window is None else max(0, start - window + 1), computed)
            positions, tokens, groups = (
                each[blocks].ravel()[seen].tolist() for each in (self.kv_positions, self.kv_tokens, self.kv_groups)
            )
            assert positions == list(range(computed))[seen], "wrong positions"
            content = [self._content(slot, position) for position in range(computed)[seen]]
            assert tokens == content, "wrong context"
            assert set(groups) == {group}, "another group's block"
        if computed < len(known):
            return []
        if any(len(word) > 1 for word in self.rows[slot].bad_words_token_ids):
            assert all(slot not in slots for slots in self.unseen), "a rule depends on a token in flight"
        num_known = len(known) - self.num_drafts.pop(slot, 0)
        drafts = known[num_known:]
        del known[num_known:]
        while True:
            known.append(next_token(known, self.rows[slot].seed))
            if not drafts or drafts.pop(0) != known[-1]:
                break
        self.computed[slot] = len(known) - 1
        return known[num_known:]

    def _sample_garbage(self, slot: int) -> list[int]:
        """New tokens that the scheduler must not use: nobody may get them, and nothing may follow them."""
        known = self.known[slot]
        if self.computed[slot] < len(known):
            return []
        num_drafts = self.num_drafts.pop(slot, 0)
        if num_drafts:
            del known[len(known) - num_drafts :]
        known.append(VOCAB - 1)
        self.computed[slot] = len(known) - 1
        return [VOCAB - 1]


class FakeEngineCore:
    """Stands in for `EngineCore`: a scheduler and a fake model runner, with up to `depth` plans in flight."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        depth: int = 1,
        tells_tokens: bool = False,
        num_turns: int = 1,
        num_right: list[int] | None = None,
        max_adapters: int = 0,
        windows: Sequence[int | None] = (None,),
        num_prefix_states: int | None = None,
        mamba_block_size: int | None = None,
        encoder: EncoderLimits | None = None,
        connector: FakeConnector | None = None,
        kv_load_failure_policy: str = "recompute",
        kv_events: list | None = None,
        has_experts: bool = False,
        workers_draft: bool = False,
        drafts_ahead: bool = False,
        masks: GrammarMasks | None = None,
    ) -> None:
        """
        Args:
            num_right: how many tokens of each draft are right, in turn. None: there are no drafts.
            workers_draft: whether the runner makes the drafts, which are then as long as they are right, and one more.
            drafts_ahead: whether it does so after the step before.
            windows: those of the groups of layers.
            num_prefix_states: of a model whose layers keep states. None: they don't.
            encoder: of a model that takes more than text. None: it doesn't.
            masks: what makes the masks of constrained requests. None: they aren't constrained.
            has_experts: whether tokens' experts are returned. The first group of layers then has no window.
        """
        groups = [CacheGroup("full" if window is None else "window", (), window) for window in windows]
        self.layout = CacheLayout(tuple(groups), CacheLimits(block_size, max_model_len, max_num_batched_tokens))
        self.max_model_len = max_model_len
        self.requests: dict[int, EngineRequest] = {}
        max_drafts = 0 if num_right is None else MAX_DRAFTS
        cache = CacheConfig(
            block_size,
            enable_prefix_caching,
            0.9,
            mamba_block_size=mamba_block_size,
            num_prefix_states=num_prefix_states,
        )
        state_rows = None
        if num_prefix_states is not None:
            state_rows = StateRows.of(cache, max_num_seqs, max_drafts, block_size)
        parts: list[SchedulerPart] = [AdapterLimit(max_adapters), Constraints(defers_masks=masks is not None)]
        if masks is not None:
            parts.append(masks)
        if enable_prefix_caching:
            parts.append(Prefixes())
        snapshots = Snapshots(range(0))
        if enable_prefix_caching and state_rows is not None:
            prefix_states = PrefixStates(state_rows)
            snapshots = prefix_states.snapshots
            parts.append(prefix_states)
        if num_right is not None:
            if drafts_ahead:
                parts.append(PlanningAhead(LastStageDrafting()))
            else:
                speculation = DraftingWorkers() if workers_draft else Clairvoyant(num_right, self.requests)
                parts.append(DraftPlanning(speculation))
        if encoder is not None:
            parts.append(EncoderInputs(encoder))
        if connector is not None:
            settings = KVTransferConfig("fake", kv_load_failure_policy=kv_load_failure_policy)
            parts.append(Transfers(connector, settings, StateBlocks(snapshots, connector.num_state_parts)))
        if kv_events is not None:
            parts.append(CacheEvents(kv_events))
        if has_experts:
            parts.append(CachedExperts(WITH_EXPERTS))
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, policy, long_prefill_token_threshold),
            cache,
            num_blocks,
            VOCAB,
            tells_tokens=tells_tokens,
            num_turns=num_turns,
            layout=self.layout if len(windows) > 1 or windows[0] is not None else None,
            waits_for_output=workers_draft and state_rows is not None,
            parts=parts,
        )
        self.connector = connector
        states = None if state_rows is None else FakeStates(state_rows)
        self.encoder = None if encoder is None else FakeEncoder(encoder)
        self.runner = FakeModelRunner(num_blocks, block_size, max_drafts, windows, states, self.encoder)
        self.runner.reports_experts = has_experts
        self.runner.num_right, self.runner.depth = cycle(num_right or [0]), depth
        self.runner.drafts_ahead = drafts_ahead
        self.depth = depth
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.experts: defaultdict[int, ExpertsOfRequest] = defaultdict(lambda: RETURNED.begin(SamplingParams()))
        self.finished: dict[int, tuple[str, int | str | None]] = {}
        self.started: dict[int, int] = {}
        self.start_order: list[int] = []
        self.prompt_logprobs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.plans: list[StepPlan] = []

    def submit(
        self, prompt: list[int], *, seq_id: int | None = None, adapter: tuple[int, int] | None = None, **options: object
    ) -> int:
        """Submit a request; what isn't an option of `EngineRequest` is a sampling parameter.

        `adapter`: the slot and the load_id of the request's adapter.
        """
        seq_id = len(self.requests) if seq_id is None else seq_id
        own = {name: options.pop(name) for name in list(options) if name in EngineRequest.__struct_fields__}
        params = SamplingParams(temperature=1.0, **options)  # type: ignore[arg-type]
        request = EngineRequest(seq_id, f"r{seq_id}", prompt, params, **{"seed": 7, **own})  # type: ignore[arg-type]
        self.scheduler.submit(request, is_held=adapter is not None)
        if adapter is not None:
            self.scheduler.give_adapter(seq_id, *adapter)
            self.scheduler.release([seq_id])
        self.requests[seq_id] = request
        self.tokens[seq_id] = []
        return seq_id

    def abort(self, *seq_ids: int) -> None:
        """Abort requests; those that have finished stay finished."""
        self.scheduler.abort(seq_ids)
        self.aborted |= set(seq_ids) - set(self.finished)

    def step(self) -> bool:
        """Fill the pipeline, then take in its oldest result; False when there was nothing to do."""
        while len(self.in_flight) < self.depth and (plan := self.scheduler.schedule()) is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self._execute(plan)))
            self.scheduler.check_integrity()
        if not self.in_flight:
            return False
        self.runner.unseen.popleft()
        self._take_in(*self.in_flight.popleft())
        self.scheduler.check_integrity()
        return True

    def _execute(self, plan: StepPlan) -> StepResult:
        if self.connector is None:
            return self.runner.execute(plan)
        self.connector.begin(plan, self.runner)
        result = self.runner.execute(plan)
        result.transfer = self.connector.end(self.runner)
        return result

    def run(self) -> None:
        """Step until nothing is left, then check every request against the reference."""
        for _ in range(5000):
            if not self.step():
                break
        assert not self.scheduler.has_work()
        load = self.scheduler.load()
        assert (load.num_waiting, load.num_running, load.kv_usage) == (0, 0, 0.0)
        for seq_id, request in self.requests.items():
            tokens, *end = reference(request, self.max_model_len)
            if seq_id in self.aborted:
                assert seq_id not in self.finished
                assert self.tokens[seq_id] == tokens[: len(self.tokens[seq_id])]
            else:
                assert self.tokens[seq_id] == tokens
                assert self.finished[seq_id] == tuple(end)
                assert seq_id in self.started
                if self.runner.reports_experts:
                    self._check_experts(request, tokens)

    def _check_experts(self, request: EngineRequest, tokens: list[int]) -> None:
        known = [*request.prompt_token_ids, *request.output_token_ids, *tokens]
        completion = CompletionOutput(0, "", known[len(request.prompt_token_ids) :], finish_reason="length")
        output = RequestOutput("", None, request.prompt_token_ids, None, [completion], finished=True)
        self.experts[request.seq_id].add_to(output)
        assert completion.routed_experts is not None
        expected = [expert_of(known, position) for position in range(len(known) - 1)]
        assert completion.routed_experts.ravel().tolist() == expected

    def _take_in(self, plan: StepPlan, result: StepResult) -> None:
        outputs = self.scheduler.update(plan, result)
        seq_ids = outputs.seq_ids.tolist()
        owners = [seq_id for seq_id, _ in groupby(seq_ids)]
        assert len(set(owners)) == len(owners)
        for seq_id, cached in outputs.started:
            assert seq_id not in self.started
            self.started[seq_id] = cached
            self.start_order.append(seq_id)
        for seq_id, token in zip(seq_ids, outputs.token_ids.tolist(), strict=True):
            assert seq_id not in self.aborted
            assert seq_id not in self.finished
            assert seq_id in self.started
            self.tokens[seq_id].append(token)
        for seq_id, report in outputs.reports:
            if report.part == RETURNED.name:
                self.experts[seq_id].take(0, report)
        for seq_id, entry in outputs.logprobs:
            self.logprobs.setdefault(seq_id, []).extend(entry.token_ids)
        for seq_id in {seq_id for seq_id, _ in outputs.logprobs}:
            assert self.logprobs[seq_id] == self.tokens[seq_id]
        for seq_id, position, entries in outputs.prompt_logprobs:
            seen = self.prompt_logprobs.setdefault(seq_id, [])
            assert position == len(seen) + 1, "nothing predicts a prompt's first token"
            seen.extend(entry.token_ids[0] for entry in entries)
        for end in outputs.finished:
            assert end.seq_id in seq_ids
            self.finished[end.seq_id] = (end.finish_reason, end.stop_reason)
        intervals = [self.requests[seq_id].flush_interval_s for seq_id in seq_ids]
        assert outputs.flush_interval_s == min(intervals, default=float("inf"))


def _ints(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()
