"""Where in a response's text each token begins, and what it adds to the text.

A token that ends before a character is complete adds nothing: the token that completes the character adds it. So do
special tokens that the text leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from raycore.outputs import CompletionOutput
from raycore.sampling_params import SamplingParams
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

    def take_last(self, token_ids: Sequence[int], *, has_stop_token: bool) -> list[Piece]:
        """The pieces of the output's last tokens, also of those that a stop string cuts off.

        `has_stop_token`: whether the last token is a stop token that isn't part of the text.
        """
        pieces = self.take(token_ids[:-1] if has_stop_token else token_ids)
        before = len(self._detokenizer.text)
        self._detokenizer.finish()  # bytes that no further token completes
        end = len(self._detokenizer.text)
        if has_stop_token:
            pieces.append(Piece(self._begin + end, self._tokenizer.token_text(token_ids[-1])))
        elif pieces:
            pieces[-1] = Piece(pieces[-1].start, pieces[-1].text + self._detokenizer.text[before:])
        return pieces


def new_pieces(
    pieces: OutputPieces, token_ids: Sequence[int], completion: CompletionOutput, params: SamplingParams
) -> list[Piece]:
    """The pieces of the next tokens of a completion. `completion`: all of it so far, up to these tokens."""
    if completion.finish_reason is None:
        return pieces.take(token_ids)
    has_stop_token = has_hidden_stop_token(completion, params) and bool(token_ids)
    return pieces.take_last(token_ids, has_stop_token=has_stop_token)


def has_hidden_stop_token(completion: CompletionOutput, params: SamplingParams) -> bool:
    """Whether the output's last token is a stop token that isn't part of the text."""
    ends_at_token = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
    return ends_at_token and not params.include_stop_str_in_output


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
