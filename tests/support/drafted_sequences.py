"""Sequences that a runner computes, with guesses of any kind, and with no more blocks than they need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from small_model import BLOCK_SIZE, GREEDY, NUM_BLOCKS, int32, new_request, plan

from raycore.messages import StepTokens
from raycore.runner.runner import ModelRunner
from raycore.sampling_params import SamplingParams


class Sequences:
    """The known tokens of each slot. Steps and drafts go to `runner`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.known: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self._free = list(range(NUM_BLOCKS))
        self._freed: list[int] = []

    def start(
        self, slot: int, prompt: Sequence[int], params: SamplingParams = GREEDY, *, shared_with: int | None = None
    ) -> None:
        """Compute a prompt in two chunks, the second of which has one token.

        `shared_with`: a slot that has computed the same beginning. Its full blocks are used.
        """
        num_shared = 0 if shared_with is None else (len(prompt) - 1) // BLOCK_SIZE
        shared = [] if shared_with is None else self.blocks[shared_with][:num_shared]
        num_blocks = -(-len(prompt) // BLOCK_SIZE)
        self.blocks[slot] = shared + [self._free.pop(0) for _ in range(num_blocks - num_shared)]
        self.known[slot] = list(prompt)
        num_computed = num_shared * BLOCK_SIZE
        request = new_request(slot, prompt, self.blocks[slot], num_computed, params)
        freed, self._freed = self._freed, []
        num_first = len(prompt) - 1 - num_computed
        if num_first:
            self._runner.execute(plan([slot], [num_first], new_requests=[request], freed_slots=freed))
            self._note([slot], self._runner.execute(plan([slot])))
        else:
            self._note([slot], self._runner.execute(plan([slot], [1], new_requests=[request], freed_slots=freed)))

    def end(self, slot: int) -> None:
        """Free the slot and the blocks that no other slot has, which are used again at once."""
        self._freed.append(slot)
        own = self.blocks.pop(slot)
        others = {block for blocks in self.blocks.values() for block in blocks}
        self._free = [block for block in own if block not in others] + self._free
        del self.known[slot]

    def step(self, guesses: dict[int, list[int]]) -> None:
        """Compute the next token of these slots, and verify a guess for each, which may be empty."""
        slots = sorted(guesses, key=lambda slot: len(guesses[slot]) > 0)
        added: list[tuple[int, int]] = []
        for slot in slots:
            num_needed = -(-(len(self.known[slot]) + len(guesses[slot])) // BLOCK_SIZE)
            while len(self.blocks[slot]) < num_needed:
                self.blocks[slot].append(self._free.pop(0))
                added.append((slot, self.blocks[slot][-1]))
        tokens = StepTokens(
            int32([len(self.known[slot]) - 1 for slot in slots]),
            int32([1 + len(guesses[slot]) for slot in slots]),
            int32([token for slot in slots for token in (self.known[slot][-1], *guesses[slot])]),
        )
        freed, self._freed = self._freed, []
        blocks = {"new_block_slots": int32([each[0] for each in added]), "new_block_ids": int32([e[1] for e in added])}
        counts = [1 + len(guesses[slot]) for slot in slots]
        self._note(slots, self._runner.execute(plan(slots, counts, tokens=tokens, freed_slots=freed, **blocks)))

    def draft(self, num_tokens: dict[int, int]) -> dict[int, list[int]]:
        """Have the runner draft so many tokens for each slot."""
        drafts = self._runner.take_draft_token_ids(list(num_tokens), list(num_tokens.values()))
        return dict(zip(num_tokens, drafts, strict=True))

    def _note(self, slots: Sequence[int], result) -> None:
        token_ids = np.frombuffer(result.token_ids, np.int32).tolist()
        counts = np.frombuffer(result.num_tokens, np.int32).tolist() or [1] * len(slots)
        for slot, count in zip(slots, counts, strict=True):
            self.known[slot] += token_ids[:count]
            del token_ids[:count]
