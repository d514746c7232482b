"""Finds the log probabilities that belong to a response's texts.

A token belongs to the text in which its first character stands that isn't a tag's. Both have a place in the output's
text, so it doesn't matter which tokens come together. Bytes of a character belong where the character does.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from raycore.outputs import PositionLogprobs
from raycore.server.chat.message import MessageRun
from raycore.server.chat.parts import MessageDelta
from raycore.server.generation.logprobs import chat_logprobs
from raycore.server.generation.positions import OutputPieces, new_pieces
from raycore.server.parsers.tool_calls import Content


class _Token(NamedTuple):
    start: int
    end: int
    """Where its text stands in the output's text. Without text, `end` is `start`: it belongs to what follows."""
    id: int
    logprobs: PositionLogprobs


class TextLogprobs:
    """The log probabilities of one output. Give it all deltas, and the texts in their order."""

    def __init__(self, message: MessageRun, num_top: int | None) -> None:
        """`num_top`: how many most likely tokens to show for each token. None: all of them."""
        params = message.job.params
        self._names = message.names
        self._params = params
        self._num_top = num_top
        self._pieces = OutputPieces(message.names.tokenizer, params.skip_special_tokens, message.job.prompt.token_ids)
        self._tokens: deque[_Token] = deque()
        """Those that no text has got yet."""

    def add(self, delta: MessageDelta) -> None:
        """Take the next tokens. Their text comes later, or with this delta."""
        pieces = new_pieces(self._pieces, delta.token_ids, delta.completion, self._params)
        special = self._names.tokenizer.special_ids
        for token_id, logprobs, (start, text) in zip(delta.token_ids, delta.logprobs or (), pieces, strict=True):
            if text or token_id not in special:
                self._tokens.append(_Token(start, start + len(text), token_id, logprobs))

    def take(self, text: Content) -> list[dict[str, Any]]:
        """Those of the tokens of a text."""
        if text.start is None:
            return []
        end = text.start + len(text.text)
        taken: list[_Token] = []
        while self._tokens and self._tokens[0].start < end:
            token = self._tokens.popleft()
            if token.start >= text.start or token.end > text.start:
                taken.append(token)
        token_ids, positions = [token.id for token in taken], [token.logprobs for token in taken]
        told = chat_logprobs(self._names, token_ids, positions, self._num_top)["content"]
        for entry in told:
            for each in (entry, *entry["top_logprobs"]):
                each["bytes"] = each["bytes"] or []
        return told
