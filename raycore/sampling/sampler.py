"""Samples the next token for each row of logits, according to its request's sampling parameters.

Parameters are kept in arrays by slot, so that a step costs the same few array operations however many requests it has.
Only requests with rules of their own (see `logits.py`) or with log probabilities are processed one by one. A row's
token depends only on the row's logits, on its request's parameters, seed and earlier tokens, and on the token's
position. The order is vLLM's: first log probabilities of the unmodified logits; then rules, penalties and top-n-sigma;
then the most likely token, or temperature, min-p, top-k, top-p and a draw. Log probabilities can be those of the logits
that the token is picked from instead (`logprobs_mode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.config.model import LogprobsMode
from raycore.messages import GrammarOutput, ThinkingLimit
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.sampling import keyed_random
from raycore.sampling.kernels import SamplingKernels
from raycore.sampling.logits import LogitsRules
from raycore.sampling.logprobs import (
    ChosenLogprobsDownload,
    Logprobs,
    LogprobsDownload,
    TokenLogprobsDownload,
    logprobs,
)
from raycore.sampling.picking import DrawLimits, drawn_logits
from raycore.sampling_params import SamplingParams
from raycore.step.copies import to_device
from raycore.step.device_batch import DeviceBatch

if TYPE_CHECKING:
    from raycore.sampling.processor_batch import ProcessorBatch

_LOGITS_AT_A_TIME = 1 << 22
"""Number of logits that are processed together. Picking tokens takes up to a dozen float32 copies of them: 200 MB."""
_INITIAL_SLOTS = 64
_NO_LOGPROBS = -2
_SLOT = np.dtype(
    [
        ("plain_greedy", np.bool_),  # needs only the most likely token
        ("greedy", np.bool_),
        ("changes_logits", np.bool_),
        ("num_logprobs", np.int64),
        ("chosen_logprobs", np.bool_),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int64),  # the vocabulary's size if unlimited
        ("top_p", np.float64),
        ("stream_state", np.uint64),
        ("stream_gamma", np.uint64),
    ],
    align=True,  # torch accepts only fields of aligned records
)


def rows_at_a_time(vocab_size: int) -> int:
    """Return how many rows of logits are processed together, which bounds the memory for sampling."""
    return max(1, _LOGITS_AT_A_TIME // vocab_size)


class _Rows:
    """What the sampler needs to know of the requests of some rows, as long as these stay the same."""

    def __init__(self, slots: NDArray[np.integer], state: NDArray[np.void]) -> None:
        """`state`: the rows' records of type `_SLOT`."""
        self.slots = slots
        self.changes_logits = bool(state["changes_logits"].any())
        self.likely = np.flatnonzero(state["greedy"])
        """The rows that get their most likely token. The others draw."""
        self.drawn = np.flatnonzero(~state["greedy"])
        drawn = state[self.drawn]
        self._stream_state, self._stream_gamma, self._temperature, self._min_p, self._top_k, self._top_p = (
            np.ascontiguousarray(drawn[name])
            for name in ("stream_state", "stream_gamma", "temperature", "min_p", "top_k", "top_p")
        )
        self.with_logprobs = np.flatnonzero((state["num_logprobs"] != _NO_LOGPROBS) & ~state["chosen_logprobs"])
        self.num_likely: list[int] = state["num_logprobs"][self.with_logprobs].tolist()
        self.with_chosen = np.flatnonzero(state["chosen_logprobs"])
        """The rows whose requests chose the tokens whose log probabilities they get."""

    def draw_limits(self, positions: NDArray[np.integer], *, are_scaled: bool = False) -> DrawLimits:
        """Return how the rows that draw do so, if their tokens get these positions.

        `are_scaled`: whether their logits are after the temperature and min-p.
        """
        uniform_D = keyed_random.uniform(self._stream_state, self._stream_gamma, positions)
        return DrawLimits(
            temperature_R=np.ones_like(self._temperature) if are_scaled else self._temperature,
            min_p_R=np.zeros_like(self._min_p) if are_scaled else self._min_p,
            top_k_R=self._top_k,
            top_p_R=self._top_p,
            uniform_R=uniform_D,
        )


class SampledTokens(NamedTuple):
    """The result of `Sampler.sample` for R rows."""

    token_ids_R: Tensor
    """int64[R]: each row's token, on the device."""
    logprobs: list[tuple[list[int], LogprobsDownload]]
    """(rows, their log probabilities), for the rows whose request asked for them."""
    failed: list[tuple[int, str]]
    """(row, reason) of requests that can't continue from this row on. The row's token has no meaning."""


class Sampler:
    """Samples tokens for the running requests, whose sampling parameters it holds by slot."""

    def __init__(
        self,
        vocab_size: int,
        kernels: SamplingKernels,
        *,
        grammars: GrammarCompiler | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        batch_invariant: bool = False,
        processors: ProcessorBatch | None = None,
    ) -> None:
        """
        Args:
            grammars: for requests with `structured_outputs`.
            logprobs_mode: what requests that ask for log probabilities get.
            batch_invariant: make the bits of processed log probabilities independent of other rows. `kernels` decide
                for everything else.
            processors: users' logits processors. None: there are none.
        """
        self._vocab_size = vocab_size
        self.kernels = kernels
        """What computes."""
        self._rules = LogitsRules(vocab_size, _INITIAL_SLOTS, kernels, grammars)
        self._slots = np.zeros(_INITIAL_SLOTS, _SLOT)
        self._last_rows: _Rows | None = None
        """Those of the last call, because most steps have the same requests as the one before."""
        self._plain_slots: NDArray[np.integer] | None = None
        """The slots of the last call of `is_plain_greedy` that has returned True, if no request has come or gone."""
        self._are_processed = logprobs_mode.startswith("processed")
        self._are_logits = logprobs_mode.endswith("logits")
        self._batch_invariant = batch_invariant
        self._processors = processors
        self._draws_scaled = processors is not None and processors.changes_draws
        """Whether rows that draw do so from logits that are divided by the temperature already."""
        self._chosen_ids: dict[int, list[int]] = {}
        """By slot: `logprob_token_ids`."""

    def add(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        eos_token_ids: Sequence[int] = (),
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        thinking: ThinkingLimit | None = None,
    ) -> None:
        """Store the sampling parameters of the request that gets `slot`, in place of an earlier request's."""
        if slot >= len(self._slots):
            num_slots = max(slot + 1, 2 * len(self._slots))
            self._slots = np.pad(self._slots, (0, num_slots - len(self._slots)))
            self._rules.grow(num_slots)
        self._last_rows = self._plain_slots = None
        changes_logits = self._rules.add(slot, params, eos_token_ids, bad_words_token_ids, thinking)
        if self._processors is not None:
            self._processors.add(slot, params)
        if params.logprob_token_ids is not None:
            self._chosen_ids[slot] = params.logprob_token_ids
        self._slots[slot] = (
            params.is_greedy and not changes_logits and params.num_logprobs is None and self._processors is None,
            params.is_greedy,
            changes_logits,
            _NO_LOGPROBS if params.num_logprobs is None else params.num_logprobs,
            params.logprob_token_ids is not None,
            params.temperature,
            params.min_p,
            min(params.top_k or self._vocab_size, self._vocab_size),
            params.top_p,
            *keyed_random.stream_key(seed),
        )

    def remove(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self._last_rows = self._plain_slots = None
        self._rules.remove(slot)
        if self._processors is not None:
            self._processors.remove(slot)
        self._chosen_ids.pop(slot, None)
        self._slots[slot] = 0

    def take_back_failure(self, slot: int) -> None:
        """Note that the request in `slot` has not failed, because the failure followed a wrong draft."""
        self._rules.grammars.take_back_failure(slot)

    def prompt_logprobs(self, logits_TV: Tensor, token_ids_T: Tensor, num_likely: int) -> TokenLogprobsDownload:
        """Start to compute the log probabilities of a prompt's tokens, int64[T], and at each of their positions of the
        `num_likely` most likely tokens (-1: of all). Nothing is processed in prompts."""
        return TokenLogprobsDownload(self._compute_logprobs, logits_TV, token_ids_T, [num_likely] * len(token_ids_T))

    def is_plain_greedy(self, slots: NDArray[np.integer]) -> bool:
        """Whether all these requests need only the most likely token. The caller may then pick the tokens itself."""
        if slots is self._plain_slots:
            return True
        is_plain = bool(self._slots["plain_greedy"][slots].all())
        self._plain_slots = slots if is_plain else None
        return is_plain

    def sample(
        self,
        logits_RV: Tensor,
        slots: NDArray[np.integer],
        positions: NDArray[np.integer],
        batch: DeviceBatch,
        grammar: GrammarOutput | None = None,
    ) -> SampledTokens:
        """Sample a token for each of R rows: row `i` is for slot `slots[i]`, and its token gets position
        `positions[i]`. A slot may have several rows, one after the other, with ascending positions.

        Reads the tokens of `batch` before these positions, which include drafts. Doesn't wait for the device, and
        doesn't change `logits_RV`, which may have any floating-point type.

        Args:
            grammar: which tokens may come in rows with a constraint. Such rows that it doesn't have are free. None:
                `grammars` decide.
        """
        if grammar is None:
            return self._sample(logits_RV, slots, positions, batch, with_logprobs=True)
        with self._rules.given(grammar):
            return self._sample(logits_RV, slots, positions, batch, with_logprobs=True)

    def draft(
        self, logits_RV: Tensor, slots: NDArray[np.integer], positions: NDArray[np.integer], batch: DeviceBatch
    ) -> Tensor:
        """Return int64[R]: a guess of the token that `sample` will return for each row, from other logits than it will
        get. Nothing is noted about the requests."""
        if self.is_plain_greedy(slots):
            return self.kernels.most_likely(logits_RV)
        sampled = self._sample(logits_RV, slots, positions, batch, with_logprobs=False)
        for row, _ in sampled.failed:
            self.take_back_failure(int(slots[row]))
        return sampled.token_ids_R

    def changes_logits(self, slots: NDArray[np.integer]) -> bool:
        """Whether the rules of any of these requests change its logits, and so may need the host's tokens."""
        return bool(self._slots["changes_logits"][slots].any())

    def _sample(
        self,
        logits_RV: Tensor,
        slots: NDArray[np.integer],
        positions: NDArray[np.integer],
        batch: DeviceBatch,
        *,
        with_logprobs: bool,
    ) -> SampledTokens:
        """Sample a token for each row, a few rows at a time. `with_logprobs`: for requests that ask for them."""
        size = rows_at_a_time(self._vocab_size)
        adjusted_RV = None
        if self._processors is not None:
            adjusted_RV = self._processed_by_users(self._processors, logits_RV, slots, positions, batch)
        if len(slots) <= size:
            return self._sample_rows(logits_RV, adjusted_RV, slots, positions, batch, with_logprobs=with_logprobs)
        parts: list[Tensor] = []
        result = SampledTokens(torch.empty(0), [], [])
        for first in range(0, len(slots), size):
            rows = slice(first, first + size)
            own_RV = None if adjusted_RV is None else adjusted_RV[rows]
            part = self._sample_rows(
                logits_RV[rows], own_RV, slots[rows], positions[rows], batch, with_logprobs=with_logprobs
            )
            parts.append(part.token_ids_R)
            result.logprobs.extend(([first + row for row in rows], each) for rows, each in part.logprobs)
            result.failed.extend((first + row, why) for row, why in part.failed)
        return result._replace(token_ids_R=torch.cat(parts))

    def _processed_by_users(
        self,
        processors: ProcessorBatch,
        logits_RV: Tensor,
        slots: NDArray[np.integer],
        positions: NDArray[np.integer],
        batch: DeviceBatch,
    ) -> Tensor:
        """Return float32[R, V]: the logits after the rules, among which users' processors run.

        If processors want logits after the temperature, these are, for rows that draw.
        """
        processors.begin(slots, positions, batch)
        adjusted_RV = self._rules.apply(logits_RV, slots, positions, batch, processors.apply)
        rows = _Rows(slots, self._slots[slots])
        if not self._draws_scaled or not len(rows.drawn):
            return adjusted_RV
        rows_D = self._on_device(rows.drawn)
        limits = rows.draw_limits(positions[rows.drawn])
        limits = limits._replace(
            top_k_R=np.full_like(limits.top_k_R, self._vocab_size), top_p_R=np.ones_like(limits.top_p_R)
        )
        adjusted_RV.index_copy_(
            0, rows_D, drawn_logits(adjusted_RV.index_select(0, rows_D), limits, self._batch_invariant)
        )
        changed_RV = processors.apply_to_draws(adjusted_RV.clone())
        return adjusted_RV.index_copy_(0, rows_D, changed_RV.index_select(0, rows_D))

    def _sample_rows(
        self,
        logits_RV: Tensor,
        adjusted_RV: Tensor | None,
        slots: NDArray[np.integer],
        positions: NDArray[np.integer],
        batch: DeviceBatch,
        *,
        with_logprobs: bool,
    ) -> SampledTokens:
        """Do the same as `_sample` for at most `rows_at_a_time` rows. `adjusted_RV`: None if no processor has run."""
        rows = self._last_rows
        if rows is None or not np.array_equal(rows.slots, slots):
            rows = self._last_rows = _Rows(np.array(slots), self._slots[slots])
        if adjusted_RV is None:
            adjusted_RV = self._rules.apply(logits_RV, slots, positions, batch) if rows.changes_logits else logits_RV
        token_ids_R = self._pick(adjusted_RV, rows, positions)
        downloads: list[tuple[list[int], LogprobsDownload]] = []
        if with_logprobs and (len(rows.with_logprobs) or len(rows.with_chosen)):
            if self._are_processed:
                logits_RV = self._processed(adjusted_RV, rows, positions)
            downloads = self._logprobs_of(logits_RV, token_ids_R, rows)
        failed = self._rules.grammars.failed(slots, positions)
        if self._processors is not None:
            failed += self._processors.failed(slots)
        return SampledTokens(token_ids_R, downloads, failed)

    def _logprobs_of(
        self, logits_RV: Tensor, token_ids_R: Tensor, rows: _Rows
    ) -> list[tuple[list[int], LogprobsDownload]]:
        """Start to compute what `SampledTokens.logprobs` has, from the logits of all rows."""
        downloads: list[tuple[list[int], LogprobsDownload]] = []
        if len(rows.with_logprobs):
            logits_LV, token_ids_L = logits_RV, token_ids_R
            if len(rows.with_logprobs) < len(logits_RV):
                rows_L = self._on_device(rows.with_logprobs)
                logits_LV, token_ids_L = logits_RV.index_select(0, rows_L), token_ids_R.index_select(0, rows_L)
            download = TokenLogprobsDownload(self._compute_logprobs, logits_LV, token_ids_L, rows.num_likely)
            downloads.append((rows.with_logprobs.tolist(), download))
        if len(rows.with_chosen):
            rows_C = self._on_device(rows.with_chosen)
            chosen = [self._chosen_ids[slot] for slot in rows.slots[rows.with_chosen].tolist()]
            logits_CV, token_ids_C = logits_RV.index_select(0, rows_C), token_ids_R.index_select(0, rows_C)
            picked = ChosenLogprobsDownload(logits_CV, token_ids_C, chosen, are_logits=self._are_logits)
            downloads.append((rows.with_chosen.tolist(), picked))
        return downloads

    def _compute_logprobs(self, logits_RV: Tensor, token_ids_R: Tensor, num_likely: int) -> Logprobs:
        if self._are_logits:
            return logprobs(logits_RV, token_ids_R, num_likely, row_by_row=True, are_logits=True)
        return self.kernels.logprobs(logits_RV, token_ids_R, num_likely)

    def _processed(self, adjusted_RV: Tensor, rows: _Rows, positions: NDArray[np.integer]) -> Tensor:
        """Return float32[R, V]: the logits that decide about each row's token, from those after the rules.

        For rows that draw, they are divided by the temperature, and those of tokens that can't be drawn are minus
        infinity.
        """
        if not len(rows.drawn):
            return adjusted_RV.float()
        limits = rows.draw_limits(positions[rows.drawn], are_scaled=self._draws_scaled)
        if not len(rows.likely):
            return drawn_logits(adjusted_RV, limits, self._batch_invariant)
        rows_D = self._on_device(rows.drawn)
        drawn_DV = drawn_logits(adjusted_RV.index_select(0, rows_D), limits, self._batch_invariant)
        return adjusted_RV.float().index_copy(0, rows_D, drawn_DV)

    def _pick(self, logits_RV: Tensor, rows: _Rows, positions: NDArray[np.integer]) -> Tensor:
        """Pick a token for each row, from logits after the rules."""
        if not len(rows.drawn):
            return self.kernels.most_likely(logits_RV)
        if not len(rows.likely):
            return self.kernels.draw(logits_RV, rows.draw_limits(positions, are_scaled=self._draws_scaled))
        rows_L, rows_D = self._on_device(rows.likely), self._on_device(rows.drawn)
        likely_ids_L = self.kernels.most_likely(logits_RV.index_select(0, rows_L))
        limits = rows.draw_limits(positions[rows.drawn], are_scaled=self._draws_scaled)
        drawn_ids_D = self.kernels.draw(logits_RV.index_select(0, rows_D), limits)
        token_ids_R = drawn_ids_D.new_empty(len(rows.slots))
        return token_ids_R.index_copy_(0, rows_L, likely_ids_L).index_copy_(0, rows_D, drawn_ids_D)

    def _on_device(self, values: NDArray[np.generic]) -> Tensor:
        return to_device(values, self.kernels.device)
