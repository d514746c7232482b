"""Follows one output through a grammar, token by token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.free_text import FreeText
from raycore.parts.constraints.grammar.native import reason_of

if TYPE_CHECKING:
    from llguidance import LLMatcher


class TokenMatcher:
    """Follows one output, and tells which tokens may come next. `GrammarCompiler.matcher` creates it."""

    def __init__(
        self,
        native: LLMatcher,
        vocab_size: int,
        end_ids: Iterable[int],
        free_text: FreeText | None = None,
        *,
        num_native: int,
    ) -> None:
        """Start at the beginning of an output.

        Args:
            native: the compiled grammar, in its initial state.
            vocab_size: the width of the model's logits.
            end_ids: the tokens that may end a complete output.
            free_text: follows the unconstrained text before the constrained part; None if there is none.
            num_native: how many tokens the native matcher's masks have.
        """
        self.native = native
        """The native matcher, for those that have it write its mask."""
        self.num_native_bytes = mask_bytes(num_native)
        """Of the native matcher's mask. More than the model's, if the tokenizer has more tokens."""
        self._vocab_size = vocab_size
        self._end_ids = frozenset(token_id for token_id in end_ids if token_id < vocab_size)
        self._free_text = free_text
        self._output: NDArray[np.int32] = np.empty(0, np.int32)
        """The output that has been followed."""
        self._num_free: int | None = None if free_text is not None else 0
        """How many tokens of the output are unconstrained text. None: all so far."""
        self._num_kept = 0
        """How many tokens of the tag that ends the unconstrained text the native matcher has consumed, too."""
        self._ended_at: int | None = None
        """The number of tokens with which the output has ended. The native matcher hasn't consumed the last one."""

    def allowed_after(self, output: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which tokens may follow `output`, as bool[vocab_size]; at least one. After an ended output: the end tokens.

        Raises: what `follow` and `complete` raise.
        """
        self.follow(output)
        bits_B = np.zeros(mask_bytes(self._vocab_size), np.uint8)
        if self.needs_native_mask:
            native_bits = np.frombuffer(self.native.compute_bitmask(), np.uint8)[: len(bits_B)]
            bits_B[: len(native_bits)] = native_bits
        self.complete(bits_B)
        unpacked_V: NDArray[np.uint8] = np.unpackbits(bits_B, count=self._vocab_size, bitorder="little")
        return unpacked_V.view(np.bool_)  # pyright: ignore[reportUnknownMemberType]

    def follow(self, output: NDArray[np.int32]) -> None:
        """Go to the state after `output`.

        Args:
            output: all tokens so far. Those in which it differs from the `output` of the previous call are taken back.

        Raises:
            InvalidRequest: `output` doesn't follow the grammar.
        """
        num_common = _num_common(self._output, output)
        if num_common < len(self._output):
            self._take_back_to(num_common)
        for index in range(num_common, len(output)):
            self._advance(int(output[index]), index + 1)
        self._output = np.array(output)

    @property
    def needs_native_mask(self) -> bool:
        """Whether the native matcher decides what may come next: `complete` then needs its mask."""
        return self._num_free is not None and self._ended_at is None

    def complete(self, bits_B: NDArray[np.uint8]) -> None:
        """Write which tokens may come next into `bits_B`, a bit for each. Bits beyond the vocabulary are cleared.

        Args:
            bits_B: uint8[mask_bytes(vocab_size)]: the native matcher's mask if `needs_native_mask`.

        Raises:
            InvalidRequest: no token can come next, or the grammar is too complex.
        """
        if self._num_free is None:
            assert self._free_text is not None
            forbidden_ids = self._free_text.forbidden_ids()
            allowed_V = np.ones(self._vocab_size, np.bool_)
            allowed_V[forbidden_ids[forbidden_ids < self._vocab_size]] = False
            packed = np.packbits(allowed_V, bitorder="little")
            bits_B[:] = 0
            bits_B[: len(packed)] = packed
            return
        # after an error, the native matcher still allows the output to end
        if self._ended_at is None and self.native.is_error():
            raise InvalidRequest(f"structured_outputs can't be enforced: {reason_of(self.native)}")
        if self._ended_at is not None:
            bits_B[:] = 0
        if self._ended_at is not None or self.native.is_accepting():
            for token_id in self._end_ids:
                bits_B[token_id >> 3] |= 1 << (token_id & 7)
        num_whole, num_bits = divmod(self._vocab_size, 8)
        if num_bits:
            bits_B[num_whole] &= (1 << num_bits) - 1
            num_whole += 1
        bits_B[num_whole:] = 0
        if not bits_B.any():
            raise InvalidRequest(
                "structured_outputs can't be enforced: it allows none of the model's tokens at this point of the output"
            )

    def _take_back_to(self, num_tokens: int) -> None:
        """Return to the state after the first `num_tokens` tokens of the output."""
        num_consumed = self._num_consumed(len(self._output))
        if self._free_text is not None:
            end = len(self._output) if self._num_free is None else self._num_free
            self._free_text.take_back(max(0, end - num_tokens))
            if num_tokens < end:
                self._num_free, self._num_kept = None, 0
        if self._ended_at is not None and num_tokens < self._ended_at:
            self._ended_at = None
        num_undone = num_consumed - self._num_consumed(num_tokens)
        if num_undone:
            self.native.rollback(num_undone)

    def _num_consumed(self, num_tokens: int) -> int:
        """How many tokens the native matcher has consumed after the first `num_tokens` tokens of the output."""
        if self._num_free is None:
            return 0
        last = num_tokens if self._ended_at is None else min(num_tokens, self._ended_at - 1)
        return self._num_kept + last - self._num_free

    def _advance(self, token_id: int, num_tokens: int) -> None:
        """Follow the output's next token, with which it has `num_tokens` tokens."""
        if self._num_free is not None:
            self._take(token_id, num_tokens)
            return
        assert self._free_text is not None
        tag = self._free_text.advance(token_id)
        if tag is not None:
            self._num_free, self._num_kept = num_tokens, len(tag.kept_ids)
            for kept_id in tag.kept_ids:
                self._consume(kept_id)

    def _take(self, token_id: int, num_tokens: int) -> None:
        if self._ended_at is not None:
            return
        if token_id in self._end_ids and self.native.is_accepting():
            self._ended_at = num_tokens
        else:
            self._consume(token_id)

    def _consume(self, token_id: int) -> None:
        if not self.native.consume_token(token_id):
            raise InvalidRequest(f"structured_outputs can't be enforced at token {token_id}: {reason_of(self.native)}")


def mask_bytes(vocab_size: int) -> int:
    """Return the number of bytes of a mask with a bit for each token, in whole words of 32 bits."""
    return (vocab_size + 31) // 32 * 4


def _num_common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """The number of tokens at the beginning that both have."""
    length = min(len(one), len(other))
    differing = (one[:length] != other[:length]).nonzero()[0]
    return int(differing[0]) if len(differing) else length
