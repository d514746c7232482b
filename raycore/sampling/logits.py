"""Changes logits as the requests' sampling parameters ask, before a token is picked.

The order is vLLM's: `structured_outputs`, `allowed_token_ids`, `bad_words` and `min_tokens` forbid tokens, then
`logit_bias` is added, then users' logits processors run, then the repetition, frequency and presence penalties are
applied. Then `top_n_sigma` forbids tokens, and last, `thinking_token_budget` or a replay may leave only one. How a
token is picked afterwards is decided elsewhere: a rule that needs probabilities after the temperature divides by it
itself, and takes it from a column of its own.

Each rule keeps to the following. A slot without a request is all zeros, so a column is 0 where its rule is off, even if
the parameter's default isn't. A rule that only limits which tokens are drawn is off for greedy requests. Nothing waits
for the device: an index that is a mask, or a tensor of zero dimensions, would, so `masked_fill_` and `gather` are used.
A row's result doesn't depend on other rows, to the last bit, so sums over the vocabulary are computed row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.messages import GrammarOutput, ThinkingLimit
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.parts.constraints.sampling import forced_token, replayed_token
from raycore.sampling.kernels import SamplingKernels
from raycore.sampling.row_masks import FollowedGrammars, RowMasks
from raycore.sampling_params import SamplingParams
from raycore.step.copies import to_device, to_device_together
from raycore.step.device_batch import DeviceBatch

_MAX_BIAS = 100.0
_PENALTY_BYTES = 64 << 20
"""Bytes for the penalties of the sequences that are processed together, unless one sequence needs more."""
_PENALTY_BYTES_PER_TOKEN = 48
_NO_IDS = np.empty(0, np.int64)
_SLOT = np.dtype(  # a slot without a request is all zeros, which means no rule
    [
        ("ruled", np.bool_),  # has rules that apply at every position
        ("penalised", np.bool_),
        ("min_tokens", np.int64),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("top_n_sigma", np.float32),  # 0 for greedy requests, whose token it keeps
        ("forces", np.bool_),  # has a limit of its reasoning, or tokens that it replays
        ("only_constrained", np.bool_),  # has no other rule that applies at every position than a grammar
    ],
    align=True,  # torch accepts only fields of aligned records
)


def max_penalty_bytes(num_seqs: int, max_model_len: int) -> int:
    """Return the maximum number of bytes that penalties take in addition to the logits."""
    longest = max_model_len * _PENALTY_BYTES_PER_TOKEN
    return max(longest, min(num_seqs * longest, _PENALTY_BYTES))


@dataclass(slots=True, frozen=True)
class _Rules:
    """The tokens that one request forbids or favors. All are in the vocabulary."""

    allowed_ids: NDArray[np.int64] | None
    """The only tokens that may be sampled. None: all."""
    end_ids: NDArray[np.int64]
    """Stop tokens, forbidden until the output has `min_tokens` tokens."""
    early_end_ids: NDArray[np.int64]
    """The stop tokens that may end a complete constrained output even before `min_tokens`."""
    bad_words: list[NDArray[np.int64]]
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    params: SamplingParams
    thinking: ThinkingLimit | None = None

    @property
    def has_ids(self) -> bool:
        return self.allowed_ids is not None or bool(self.bad_words) or len(self.bias_ids) > 0

    @property
    def always_apply(self) -> bool:
        return self.has_ids or self.params.structured_outputs is not None


class LogitsRules:
    """How the running requests change their logits, by slot."""

    def __init__(
        self, vocab_size: int, num_slots: int, kernels: SamplingKernels, grammars: GrammarCompiler | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels
        self.grammars = FollowedGrammars(grammars, vocab_size)
        """What is followed if nobody has given masks."""
        self._rules: dict[int, _Rules] = {}
        self._given: RowMasks | None = None
        self._slots = np.zeros(num_slots, _SLOT)
        self._counts: Tensor | None = None
        """float32, flat, all zeros between calls: working memory to count output tokens."""

    def grow(self, num_slots: int) -> None:
        """Make room for more slots."""
        self._slots = np.pad(self._slots, (0, num_slots - len(self._slots)))

    def add(
        self,
        slot: int,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        bad_words_token_ids: Sequence[Sequence[int]],
        thinking: ThinkingLimit | None = None,
    ) -> bool:
        """Store the rules of the request in `slot`, replacing earlier ones. Returns whether they change logits."""
        self.remove(slot)
        rules = self._make_rules(params, eos_token_ids, bad_words_token_ids)
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        penalised = penalties != (1.0, 0.0, 0.0)
        min_tokens = params.min_tokens if len(rules.end_ids) else 0
        self._rules[slot] = replace(rules, thinking=thinking)
        if params.structured_outputs is not None:
            self.grammars.add(slot, params)
        forces = thinking is not None or params.trace_decode_token_ids is not None
        top_n_sigma = 0.0 if params.is_greedy else params.top_n_sigma
        only_constrained = params.structured_outputs is not None and not rules.has_ids
        always = rules.always_apply
        self._slots[slot] = (always, penalised, min_tokens, *penalties, top_n_sigma, forces, only_constrained)
        return always or penalised or min_tokens > 0 or top_n_sigma > 0 or forces

    def remove(self, slot: int) -> None:
        """Forget a slot's request."""
        self._rules.pop(slot, None)
        self.grammars.remove(slot)
        self._slots[slot] = 0

    @contextmanager
    def given(self, grammar: GrammarOutput) -> Generator[None, None, None]:
        """Within the `with` statement, follow these masks instead of grammars."""
        self._given = RowMasks.given(grammar, self._vocab_size)
        try:
            yield
        finally:
            self._given = None

    def apply(
        self,
        logits_RV: Tensor,
        slots: NDArray[np.integer],
        positions: NDArray[np.integer],
        batch: DeviceBatch,
        processed: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Apply the rules of the requests in `slots`. Returns a float32 copy, or `logits_RV` itself if nothing changes.

        Row `i` of `logits_RV` is for slot `slots[i]`, and its token gets position `positions[i]`.

        Args:
            processed: what users' logits processors make of all rows, between the biases and the penalties. It may
                change its argument. None: there are none.
        """
        state = self._slots[slots]
        too_early = positions - batch.num_prompt[slots] < state["min_tokens"]
        ruled_rows = np.flatnonzero(state["ruled"] | too_early)
        penalised_rows = np.flatnonzero(state["penalised"])
        cut_rows = np.flatnonzero(state["top_n_sigma"])
        forced_rows = np.flatnonzero(state["forces"])
        if not any(map(len, (ruled_rows, penalised_rows, cut_rows, forced_rows))) and processed is None:
            return logits_RV
        logits_RV = logits_RV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if len(ruled_rows):
            self._apply_rules(logits_RV, ruled_rows, slots, positions, too_early, batch)
        if processed is not None:
            logits_RV = processed(logits_RV)
        if len(penalised_rows):
            size = max(1, _PENALTY_BYTES // _PENALTY_BYTES_PER_TOKEN // int(positions[penalised_rows].max()))
            for first in range(0, len(penalised_rows), size):
                rows = penalised_rows[first : first + size]
                self._apply_penalties(logits_RV, rows, slots[rows], positions[rows], batch)
        for row in cut_rows.tolist():  # one by one, so that a row's sums don't depend on other rows
            _keep_top_sigmas(logits_RV[row], float(state["top_n_sigma"][row]))
        for row in forced_rows.tolist():
            self._force(logits_RV[row], int(slots[row]), int(positions[row]), batch)
        return logits_RV

    def _make_rules(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
    ) -> _Rules:
        allowed = params.allowed_token_ids
        bias = {i: b for i, b in (params.logit_bias or {}).items() if i < self._vocab_size}
        end_ids = {*eos_token_ids, *(params.stop_token_ids or ())} if params.min_tokens else ()
        return _Rules(
            allowed_ids=None if allowed is None else self._known_ids(allowed),
            end_ids=self._known_ids(end_ids),
            early_end_ids=self._known_ids(params.early_end_ids(eos_token_ids)),
            bad_words=[np.array(word, np.int64) for word in bad_words if len(word) and word[-1] < self._vocab_size],
            bias_ids=np.fromiter(bias, np.int64, len(bias)),
            bias_values=np.fromiter((max(-_MAX_BIAS, min(b, _MAX_BIAS)) for b in bias.values()), np.float32, len(bias)),
            params=params,
        )

    def _known_ids(self, token_ids: Collection[int]) -> NDArray[np.int64]:
        """Return the ids in ascending order, without duplicates and without ids outside the model's vocabulary."""
        # not np.unique(), whose first call imports numpy.ma
        ids = np.array(sorted(set(token_ids)), np.int64)
        return ids[ids < self._vocab_size]

    def _apply_rules(
        self,
        logits_RV: Tensor,
        rows: NDArray[np.integer],
        slots: NDArray[np.integer],
        positions: NDArray[np.integer],
        too_early: NDArray[np.bool_],
        batch: DeviceBatch,
    ) -> None:
        forbidden: list[NDArray[np.int64]] = []
        biased: list[NDArray[np.int64]] = []
        biases: list[NDArray[np.float32]] = []
        masks = self._given
        if masks is None:
            masks = self.grammars.masks_of(slots[rows], positions[rows], batch)
        is_simple = self._slots["only_constrained"][slots[rows]] & ~too_early[rows]
        if is_simple.any():
            self._kernels.mask(logits_RV, *masks.of_rows(rows[is_simple], slots, positions))
            rows = rows[~is_simple]
            if not len(rows):
                return
        lost_slot = -1  # its other rows follow a draft that its grammar forbids, so they will be dropped
        for row in rows.tolist():
            slot = int(slots[row])
            if slot == lost_slot:
                continue
            rules = self._rules[slot]
            output = batch.token_ids[slot, int(batch.num_prompt[slot]) : int(positions[row])]
            forbidden_ids = _forbidden_ids(rules, output, bool(too_early[row]))
            if rules.params.structured_outputs is not None:
                early_end_ids = rules.early_end_ids if too_early[row] else _NO_IDS
                position = int(positions[row])
                kept_V = masks.allowed(slot, position)
                if kept_V is not None:
                    kept_V = self._apply_grammar(logits_RV[row], kept_V, rules, forbidden_ids, early_end_ids)
                forbidden_ids = _NO_IDS
                has_draft = row + 1 < len(slots) and slots[row + 1] == slot
                if has_draft and (kept_V is None or not kept_V[batch.token_ids[slot, position]]):
                    lost_slot = slot
            elif rules.allowed_ids is not None:
                _keep_only(logits_RV[row], rules.allowed_ids)
            forbidden.append(forbidden_ids + row * self._vocab_size)
            biased.append(rules.bias_ids + row * self._vocab_size)
            biases.append(rules.bias_values)
        flat = logits_RV.view(-1)
        arrays = [np.concatenate(forbidden), np.concatenate(biased), np.concatenate(biases)]
        forbidden_F, biased_B, biases_B = to_device_together(arrays, logits_RV.device)
        flat.index_fill_(0, forbidden_F, -torch.inf)
        flat.index_add_(0, biased_B, biases_B)

    def _apply_grammar(
        self,
        logits_V: Tensor,
        kept_V: NDArray[np.bool_],
        rules: _Rules,
        forbidden_ids: NDArray[np.int64],
        early_end_ids: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Forbid all tokens but `kept_V`, in place. Other rules apply only if they leave at least one token.

        Args:
            kept_V: which tokens the request's grammar allows.
            early_end_ids: tokens that may end a complete output although `min_tokens` forbids them. If only end tokens
                are left, one of these is sampled.

        Returns: which tokens may come next, bool[V].
        """
        if rules.allowed_ids is not None:
            kept_V = _narrow(kept_V, rules.allowed_ids, is_wanted=True)
        if len(forbidden_ids):
            kept_V = _narrow(kept_V, forbidden_ids, is_wanted=False)
        if kept_V[early_end_ids].any():
            kept_V = _narrow(kept_V, early_end_ids, is_wanted=True)
        logits_V.masked_fill_(to_device(~kept_V, logits_V.device), -torch.inf)
        return kept_V

    def _force(self, logits_V: Tensor, slot: int, position: int, batch: DeviceBatch) -> None:
        """Leave only the token that is replayed or ends too long a reasoning, if one has to come here, in place."""
        rules, num_prompt = self._rules[slot], int(batch.num_prompt[slot])
        if rules.params.trace_decode_token_ids is not None:
            token_id = replayed_token(rules.params.trace_decode_token_ids, position - num_prompt)
        else:
            assert rules.thinking is not None
            token_id = forced_token(rules.thinking, batch.token_ids[slot, :position], num_prompt)
        if token_id is not None:
            logits_V.fill_(-torch.inf)[token_id] = 0.0

    def _apply_penalties(
        self,
        logits_RV: Tensor,
        rows: NDArray[np.integer],
        slots: NDArray[np.integer],
        positions: NDArray[np.integer],
        batch: DeviceBatch,
    ) -> None:
        """Apply penalties to all rows at once, in place. The cost grows with the sequences' lengths, not with the
        vocabulary.

        P rows are penalised, and L is the longest sequence's length. A shorter row has its own first token in place of
        the tokens that it lacks, with a weight of 0. So some indexed writes name an element several times. They are
        well defined, because they write the same value each time.
        """
        flat = logits_RV.view(-1)
        state = self._slots[slots]
        columns = [
            rows * self._vocab_size,
            positions,
            batch.num_prompt[slots],
            *(np.ascontiguousarray(state[name]) for name in ("repetition", "frequency", "presence")),
        ]
        slots_P, first_P1, known_P1, prompt_P1, repetition_P1, frequency_P1, presence_P1 = to_device_together(
            [slots, *(column[:, None] for column in columns)], logits_RV.device
        )
        column_L = torch.arange(int(positions.max()), device=logits_RV.device)
        is_known_PL = column_L < known_P1
        token_PL = batch.token_ids_SM[:, : len(column_L)].index_select(0, slots_P)
        key_PL = first_P1 + torch.where(is_known_PL, token_PL, token_PL[:, :1])

        logit_PL = flat[key_PL]
        flat[key_PL] = torch.where(logit_PL > 0, logit_PL / repetition_P1, logit_PL * repetition_P1)

        in_output_PL = (is_known_PL & (column_L >= prompt_P1)).float()
        count_PL = self._count(key_PL, in_output_PL, flat)
        flat[key_PL] = flat[key_PL] - frequency_P1 * count_PL - presence_P1 * (count_PL > 0)

    def _count(self, key_PL: Tensor, weight_PL: Tensor, flat: Tensor) -> Tensor:
        """Return float32[P, L]: for each key, the sum of the weights of all entries with the same key."""
        if self._counts is None or len(self._counts) < len(flat):
            self._counts = torch.zeros_like(flat)
        keys = key_PL.view(-1)
        count_PL = self._counts.index_add_(0, keys, weight_PL.view(-1))[key_PL]
        self._counts.index_fill_(0, keys, 0.0)
        return count_PL


def _narrow(kept_V: NDArray[np.bool_], ids: NDArray[np.int64], *, is_wanted: bool) -> NDArray[np.bool_]:
    """Return the kept tokens that are in `ids`, or with `is_wanted=False` those that aren't.

    If that would leave no token, return `kept_V` unchanged.
    """
    wanted_V = np.full(len(kept_V), not is_wanted)
    wanted_V[ids] = is_wanted
    narrowed_V = kept_V & wanted_V
    return narrowed_V if narrowed_V.any() else kept_V


def _keep_only(logits_V: Tensor, allowed_ids: NDArray[np.int64]) -> None:
    """Forbid all tokens but `allowed_ids`, in place. Forbid none if `allowed_ids` is empty."""
    if len(allowed_ids):
        ids = to_device(allowed_ids, logits_V.device)
        kept = logits_V.index_select(0, ids)
        logits_V.fill_(-torch.inf).index_copy_(0, ids, kept)


def _keep_top_sigmas(logits_V: Tensor, num_sigmas: float) -> None:
    """Forbid the tokens more than `num_sigmas` standard deviations below the most likely one, in place.

    This is top-n-sigma (Tang et al. 2024, arXiv 2411.07641). Tokens that are forbidden already don't count.
    """
    is_counted_V = logits_V > -torch.inf
    num_counted = is_counted_V.sum()
    mean = torch.where(is_counted_V, logits_V, 0.0).sum() / num_counted
    deviation_V = torch.where(is_counted_V, logits_V - mean, 0.0)
    sigma = (deviation_V.square().sum() / num_counted).sqrt()
    logits_V.masked_fill_(logits_V < logits_V.max() - num_sigmas * sigma, -torch.inf)


def _forbidden_ids(rules: _Rules, output: NDArray[np.int32], too_early: bool) -> NDArray[np.int64]:
    """Return the tokens that bad words and `min_tokens` forbid next. Empty if they would forbid all allowed tokens."""
    ids = [word[-1:] for word in rules.bad_words if _completes(output, word)]
    if too_early:
        ids.append(rules.end_ids)
    forbidden = np.concatenate(ids) if ids else _NO_IDS
    if rules.allowed_ids is not None and np.isin(rules.allowed_ids, forbidden).all():
        return _NO_IDS
    return forbidden


def _completes(output: NDArray[np.int32], word: NDArray[np.int64]) -> bool:
    """Whether the output ends with all tokens of `word` except its last one."""
    num_before = len(word) - 1
    return num_before <= len(output) and np.array_equal(output[len(output) - num_before :], word[:-1])
