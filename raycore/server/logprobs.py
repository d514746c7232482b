"""Converts log probabilities to the formats of `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycore.outputs import PositionLogprobs
from raycore.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON can't represent."""


class CompletionLogprobs:
    """Builds the `logprobs` object of a choice of `/v1/completions`. Add the tokens in the order of the text."""

    def __init__(self, tokenizer: Tokenizer, offset: int, num_top: int) -> None:
        """Begin without tokens.

        Args:
            offset: the position of the first token in the text, in characters.
            num_top: how many most likely tokens to show at each position.
        """
        self.offset = offset
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> None:
        """Add the next tokens with the log probabilities at their positions."""
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self._tokenizer.token_text(token_id)
            self._tokens.append(text)
            self._offsets.append(self.offset)
            self.offset += len(text)
            if position is None:
                self._token_logprobs.append(None)
                self._top.append(None)
                continue
            self._token_logprobs.append(_logprob(position, token_id))
            # the first entry is the actual token; the others are the most likely ones
            shown = list(position)[: self._num_top + 1]
            self._top.append({self._tokenizer.token_text(other): _logprob(position, other) for other in shown})

    def as_dict(self) -> dict[str, Any]:
        """The `logprobs` object of a choice."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int
) -> dict[str, Any]:
    """The `logprobs` object of a choice of `/v1/chat/completions`."""
    return {
        "content": [
            _chat_token(tokenizer, token_id, position, num_top)
            for token_id, position in zip(token_ids, positions, strict=True)
        ],
        "refusal": None,
    }


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs` field: for each prompt token, entries by token id."""
    return [None if position is None else _by_token_id(position) for position in positions]


def _by_token_id(position: PositionLogprobs) -> dict[str, Any]:
    return {
        str(token_id): {
            "logprob": _logprob(position, token_id),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token_id, entry in position.items()
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, position: PositionLogprobs, num_top: int) -> dict[str, Any]:
    # the first entry is the actual token; sorting by rank leaves it out if it isn't among the most likely ones
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)[:num_top]
    return _chat_entry(tokenizer, token_id, position) | {
        "top_logprobs": [_chat_entry(tokenizer, other, position) for other, _ in ranked]
    }


def _chat_entry(tokenizer: Tokenizer, token_id: int, position: PositionLogprobs) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id)
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _logprob(position, token_id),
        "bytes": None if spelled is None else list(spelled),
    }


def _logprob(position: PositionLogprobs, token_id: int) -> float:
    return max(position[token_id].logprob, LEAST)
