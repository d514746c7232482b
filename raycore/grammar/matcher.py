"""Follows one output through a grammar, token by token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidRequest
from raycore.grammar.free_text import FreeText

if TYPE_CHECKING:
    from llguidance import LLMatcher


class TokenMatcher:
    """Follows one output, and tells which tokens may come next. `GrammarCompiler.matcher` creates it."""

    def __init__(
        self, native: LLMatcher, vocab_size: int, end_ids: Iterable[int], free_text: FreeText | None = None
    ) -> None:
        """Start at the beginning of an output.

        Args:
            native: the compiled grammar, in its initial state.
            vocab_size: the width of the model's logits.
            end_ids: the tokens that may end a complete output.
            free_text: follows the unconstrained text before the constrained part; None if there is none.
        """
        self._native = native
        self._vocab_size = vocab_size
        self._end_ids = frozenset(token_id for token_id in end_ids if token_id < vocab_size)
        self._free_text = free_text
        self._num_tokens = 0
        self._has_ended = False

    def allowed_after(self, output: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which tokens may follow `output`, as bool[vocab_size]; at least one. After an ended output: the end tokens.

        Args:
            output: all tokens so far. It must begin with the `output` of the previous call.

        Raises:
            InvalidRequest: `output` doesn't follow the grammar, no token can come next, or the grammar is too complex.
        """
        for token_id in output[self._num_tokens :].tolist():
            self._advance(token_id)
        self._num_tokens = len(output)
        return self._allowed()

    def _advance(self, token_id: int) -> None:
        if self._free_text is None:
            self._follow(token_id)
            return
        tag = self._free_text.advance(token_id)
        if tag is not None:
            self._free_text = None
            for kept_id in tag.kept_ids:
                self._follow(kept_id)

    def _follow(self, token_id: int) -> None:
        if self._has_ended:
            return
        if token_id in self._end_ids and self._native.is_accepting():
            self._has_ended = True
        elif not self._native.consume_token(token_id):
            raise InvalidRequest(f"structured_outputs can't be enforced at token {token_id}: {reason_of(self._native)}")

    def _allowed(self) -> NDArray[np.bool_]:
        if self._free_text is not None:
            allowed_V = np.ones(self._vocab_size, np.bool_)
            forbidden_ids = self._free_text.forbidden_ids()
            allowed_V[forbidden_ids[forbidden_ids < self._vocab_size]] = False
            return allowed_V
        allowed_V = np.zeros(self._vocab_size, np.bool_)
        if not self._has_ended:
            bits = np.frombuffer(self._native.compute_bitmask(), np.uint8)
            allowed_V = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)
            # after an error, the native matcher still allows the output to end
            if self._native.is_error():
                raise InvalidRequest(f"structured_outputs can't be enforced: {reason_of(self._native)}")
        if self._has_ended or self._native.is_accepting():
            allowed_V[list(self._end_ids)] = True
        if not allowed_V.any():
            raise InvalidRequest(
                "structured_outputs can't be enforced: it allows none of the model's tokens at this point of the output"
            )
        return allowed_V


def reason_of(native: LLMatcher) -> str:
    """llguidance's error message, without its placeholder for omitted details."""
    return native.get_error().removesuffix("<non-verbose/>").rstrip()
