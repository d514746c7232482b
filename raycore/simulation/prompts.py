"""Makes the tokens of a trace's prompts: equal where the trace says so, and different elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from raycore.simulation.traces import BLOCK_TOKENS, TracedRequest

_OWN = 1 << 48
"""Numbers of blocks that only one request has begin here."""


class Prompts:
    """Makes prompts of a vocabulary's tokens."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: at least 2."""
        self._vocab_size = vocab_size
        self._filling = [token % vocab_size for token in range(BLOCK_TOKENS)]

    def tokens(self, index: int, request: TracedRequest) -> list[int]:
        """The token ids of a prompt. `index`: the request's place in the trace."""
        tokens: list[int] = []
        for block_id in request.hash_ids or (_OWN + index,):
            tokens += self._block(block_id)
        missing = request.num_prompt - len(tokens)
        if missing > 0:
            tokens += self._filling * -(-missing // BLOCK_TOKENS)
        return tokens[: request.num_prompt]

    def _block(self, block_id: int) -> list[int]:
        """A block that begins with its number. Digests of blocks depend on all before them, so that this is enough."""
        digits = list(self._digits(block_id))
        return [*digits, *self._filling[len(digits) :]]

    def _digits(self, number: int) -> Iterator[int]:
        while True:
            yield number % self._vocab_size
            number //= self._vocab_size
            if not number:
                return
