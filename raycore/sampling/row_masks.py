"""Which tokens may come next, for rows of logits whose requests have constraints: as given, or by their grammars."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidRequest
from raycore.messages import GrammarOutput
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.parts.constraints.grammar.masks import MaskMaker, Output
from raycore.parts.constraints.grammar.matcher import TokenMatcher, mask_bytes
from raycore.sampling_params import SamplingParams
from raycore.step.device_batch import DeviceBatch


class RowMasks:
    """Masks by slot and position."""

    def __init__(self, keys: list[tuple[int, int]], bits_MB: NDArray[np.uint8], vocab_size: int) -> None:
        """`keys`: (slot, position) of each mask's token."""
        self._bits_MB = bits_MB
        self._vocab_size = vocab_size
        self._masks = {key: mask for mask, key in enumerate(keys)}

    @classmethod
    def given(cls, grammar: GrammarOutput, vocab_size: int) -> RowMasks:
        """What has come from an engine."""
        slots, positions = np.frombuffer(grammar.slots, np.int32), np.frombuffer(grammar.positions, np.int32)
        bits: NDArray[np.uint8] = np.frombuffer(grammar.bitmask, np.uint8)
        keys = list(zip(slots.tolist(), positions.tolist(), strict=True))
        return cls(keys, np.reshape(bits, (len(slots), mask_bytes(vocab_size))), vocab_size)

    def allowed(self, slot: int, position: int) -> NDArray[np.bool_] | None:
        """Return which tokens may come, bool[V]. None: there is no mask, because the row comes after a wrong draft, or
        its request has left or has failed."""
        mask = self._masks.get((slot, position))
        if mask is None:
            return None
        bits_B = self._bits_MB[mask]
        unpacked: NDArray[np.uint8] = np.unpackbits(bits_B, count=self._vocab_size, bitorder="little")
        return unpacked.view(np.bool_)  # pyright: ignore[reportUnknownMemberType]

    def of_rows(
        self, rows: NDArray[np.integer], slots: NDArray[np.integer], positions: NDArray[np.integer]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return those of some rows that have a mask, int64[M], and their masks, uint8[M, B]."""
        keys = zip(slots[rows].tolist(), positions[rows].tolist(), strict=True)
        masks_N = np.array([self._masks.get(key, -1) for key in keys], np.int64)
        has_mask_N = masks_N >= 0
        return rows[has_mask_N].astype(np.int64), self._bits_MB[masks_N[has_mask_N]]


class FollowedGrammars:
    """The constraints that this worker follows itself, by slot, if nobody gives masks."""

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        """`compiler`: None: no request has a constraint."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._maker = MaskMaker(vocab_size)
        self._none = RowMasks([], np.empty((0, mask_bytes(vocab_size)), np.uint8), vocab_size)
        self._params: dict[int, SamplingParams] = {}
        self._matchers: dict[int, TokenMatcher] = {}
        self._failures: dict[int, tuple[int, str]] = {}
        """The position from which on a request's constraint can't be followed, and why."""

    def add(self, slot: int, params: SamplingParams) -> None:
        """Note a request that has a constraint."""
        self._params[slot] = params

    def remove(self, slot: int) -> None:
        """Forget a slot's request."""
        for each in (self._params, self._matchers, self._failures):
            each.pop(slot, None)

    def masks_of(self, slots: NDArray[np.integer], positions: NDArray[np.integer], batch: DeviceBatch) -> RowMasks:
        """Return the masks of rows. Of a slot with several, all tokens but the first one follow drafts. There is none
        after a draft that may not come, or if the constraint can't be followed."""
        if not self._params:
            return self._none
        ends = dict(zip(slots.tolist(), positions.tolist(), strict=True))
        starts = dict(zip(slots[::-1].tolist(), positions[::-1].tolist(), strict=True))
        outputs: list[Output] = []
        made: list[int] = []
        for slot, end in ends.items():
            if slot not in self._params or slot in self._failures:
                continue
            try:
                matcher = self._matcher(slot)
            except InvalidRequest as error:
                self._failures[slot] = starts[slot], str(error)
                continue
            tokens = batch.token_ids[slot, int(batch.num_prompt[slot]) : end]
            outputs.append(Output(matcher, tokens, end - starts[slot]))
            made.append(slot)
        masks = self._maker.make(outputs)
        for index, num_before, why in masks.failed:
            self._failures[made[index]] = starts[made[index]] + num_before, why
        keys = [(made[index], starts[made[index]] + num_before) for index, num_before in masks.rows]
        return RowMasks(keys, masks.bits_RB, self._vocab_size)

    def failed(self, slots: NDArray[np.integer], positions: NDArray[np.integer]) -> list[tuple[int, str]]:
        """Return (row, reason) for each row from which on its request can't continue."""
        if not self._failures:
            return []
        found: list[tuple[int, str]] = []
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            first, why = self._failures.get(slot, (position + 1, ""))
            if position >= first:
                found.append((row, why))
        return found

    def take_back_failure(self, slot: int) -> None:
        """Note that a slot's request hasn't failed, because the failure followed a wrong draft."""
        if self._failures.pop(slot, None) is not None:
            self._matchers.pop(slot, None)  # it can't be used after an error

    def _matcher(self, slot: int) -> TokenMatcher:
        """Return what follows a slot's output. Raises InvalidRequest if the constraint can't be compiled."""
        matcher = self._matchers.get(slot)
        if matcher is None:
            params = self._params[slot]
            assert self._compiler is not None
            assert params.structured_outputs is not None
            matcher = self._compiler.matcher_of(params.structured_outputs, params.stop_token_ids or ())
            self._matchers[slot] = matcher
        return matcher
