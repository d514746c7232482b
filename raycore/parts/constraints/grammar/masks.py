"""Makes the masks of many outputs at once: which tokens may come next in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidRequest
from raycore.node.resources import usable_cores
from raycore.parts.constraints.grammar.matcher import TokenMatcher, mask_bytes

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MAX_THREADS = 8


class Output(NamedTuple):
    """An output whose last tokens may be drafts. What may come next is asked before each draft, and after the last."""

    matcher: TokenMatcher
    tokens: NDArray[np.int32]
    num_drafts: int


class Masks(NamedTuple):
    """The masks of some outputs."""

    rows: list[tuple[int, int]]
    """(index of the output, number of its drafts before) for each mask. None comes after a draft that may not come."""
    bits_RB: NDArray[np.uint8]
    """[R, mask_bytes(vocab_size)]"""
    failed: list[tuple[int, int, str]]
    """(index of the output, number of its drafts before, reason) of outputs that can't go on. Their matchers can't be
    used any more."""


class MaskMaker:
    """Makes masks for one model's tokens. While llguidance computes, other threads run."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._executor: LLExecutor | None = None

    def make(self, outputs: Sequence[Output]) -> Masks:
        """Make the masks of outputs, each of which has a matcher of its own."""
        parts: list[NDArray[np.uint8]] = [np.empty((0, mask_bytes(self._vocab_size)), np.uint8)]
        masks = Masks([], parts[0], [])
        indexes, num_before = list(range(len(outputs))), 0
        while indexes:
            made, bits_RB = self._make(outputs, indexes, num_before, masks.failed)
            masks.rows.extend((index, num_before) for index in made)
            parts.append(bits_RB)
            indexes = [
                index
                for index, bits_B in zip(made, bits_RB, strict=True)
                if num_before < outputs[index].num_drafts and _has(bits_B, _draft(outputs[index], num_before))
            ]
            num_before += 1
        return masks._replace(bits_RB=np.concatenate(parts))

    def _make(
        self, outputs: Sequence[Output], indexes: list[int], num_before: int, failed: list[tuple[int, int, str]]
    ) -> tuple[list[int], NDArray[np.uint8]]:
        """Make the masks of some outputs after `num_before` of their drafts. Returns which it has made, and these."""
        bits_RB = np.zeros((len(indexes), mask_bytes(self._vocab_size)), np.uint8)
        native: list[tuple[LLMatcher, int]] = []
        num_native_bytes = 0
        why: dict[int, str] = {}
        for row, index in enumerate(indexes):
            matcher, tokens, num_drafts = outputs[index]
            try:
                matcher.follow(tokens[: len(tokens) - num_drafts + num_before])
            except InvalidRequest as error:
                why[row] = str(error)
                continue
            if matcher.needs_native_mask:
                native.append((matcher.native, row))
                num_native_bytes = matcher.num_native_bytes
        if native:
            # the tokenizer may have more tokens than the model
            is_wider = num_native_bytes > bits_RB.shape[1]
            native_RB = np.zeros((len(indexes), num_native_bytes), np.uint8) if is_wider else bits_RB
            self._compute(native, native_RB)
            bits_RB = np.ascontiguousarray(native_RB[:, : bits_RB.shape[1]])
        for row, index in enumerate(indexes):
            if row in why:
                continue
            try:
                outputs[index].matcher.complete(bits_RB[row])
            except InvalidRequest as error:
                why[row] = str(error)
        failed.extend((indexes[row], num_before, each) for row, each in why.items())
        made = [row for row in range(len(indexes)) if row not in why]
        return [indexes[row] for row in made], bits_RB[made] if why else bits_RB

    def _compute(self, native: list[tuple[LLMatcher, int]], bits_RB: NDArray[np.uint8]) -> None:
        """Write the masks of native matchers into these rows."""
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor(num_threads=max(1, min(_MAX_THREADS, usable_cores() // 2)))
        self._executor.unsafe_compute_mask_ptr(native, bits_RB.ctypes.data, bits_RB.shape[1], len(bits_RB))


def _draft(output: Output, index: int) -> int:
    return int(output.tokens[len(output.tokens) - output.num_drafts + index])


def _has(bits_B: NDArray[np.uint8], token_id: int) -> bool:
    """Whether a mask has a token. Drafts may be beyond the vocabulary of the mask."""
    return token_id >> 3 < len(bits_B) and bool(bits_B[token_id >> 3] >> (token_id & 7) & 1)
