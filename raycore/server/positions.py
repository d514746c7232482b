"""Where in a response's text each token begins, and what it adds to the text, for `/v1/completions`.

A token that ends before a character is complete adds nothing: the token that completes the character adds it. So do
special tokens that the text leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from raycore.text.detokenizer import IncrementalDetokenizer
from raycore.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """What one token adds to a text."""

    start: int
    """The position in the text, in characters."""
    text: str


class OutputPieces:
    """The pieces of one output, while its tokens come."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = (), begin: int = 0
    ) -> None:
        """`begin`: the position at which the output begins in the response's text."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, prompt_token_ids)
        self._tokenizer = tokenizer
        self._begin = begin

    def take(self, token_ids: Sequence[int]) -> list[Piece]:
        """The pieces of the output's next tokens, if others follow."""
        pieces: list[Piece] = []
        for token_id in token_ids:
            start = len(self._detokenizer.text)
            self._detokenizer.append([token_id])
            pieces.append(Piece(self._begin + start, self._detokenizer.text[start:]))
        return pieces

    def take_last(self, token_ids: Sequence[int], length: int, *, has_stop_token: bool) -> list[Piece]:
        """The pieces of the output's last tokens.

        Args:
            length: the length of the output's text, which may have been cut off at a stop string. Tokens after it begin
                at the end of the text.
            has_stop_token: whether the last token is a stop token that isn't part of the text.
        """
        pieces = self.take(token_ids[:-1] if has_stop_token else token_ids)
        if has_stop_token:
            pieces.append(Piece(self._begin + length, self._tokenizer.token_text(token_ids[-1])))
        elif pieces:
            # bytes that no further token completes
            before = len(self._detokenizer.text)
            self._detokenizer.finish()
            pieces[-1] = Piece(pieces[-1].start, pieces[-1].text + self._detokenizer.text[before:])
        return [Piece(min(start, self._begin + length), text) for start, text in pieces]


def prompt_starts(
    tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int], *, adds_special_tokens: bool
) -> list[int]:
    """The positions at which a prompt's tokens begin in its text.

    Args:
        text: the text that was given and tokenized. None: the token ids were given, and the text is decoded from them,
            with special tokens.
        adds_special_tokens: whether the tokenizer has added its special tokens to the text.
    """
    if text is not None:
        return tokenizer.token_starts(text, adds_special_tokens)
    return [piece.start for piece in OutputPieces(tokenizer, skip_special_tokens=False).take(token_ids)]


def prompt_pieces(starts: Sequence[int], text: str) -> list[Piece]:
    """The pieces of a prompt with this text, whose tokens begin at `starts`, or at its end if it has become shorter."""
    within = [min(start, len(text)) for start in starts]
    return [Piece(start, text[start:end]) for start, end in pairwise([*within, len(text)])]
