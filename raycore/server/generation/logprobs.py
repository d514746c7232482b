"""Converts log probabilities to the formats of `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycore.outputs import PositionLogprobs
from raycore.server.generation.positions import Piece
from raycore.server.options import ServerOptions
from raycore.server.protocol import INT64_MAX, SamplingRequest
from raycore.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON can't represent."""


@dataclass(frozen=True)
class TokenNames:
    """How a response names tokens: by their text or, if `are_ids`, as `token_id:123`."""

    tokenizer: Tokenizer
    are_ids: bool

    @staticmethod
    def of(request: SamplingRequest, tokenizer: Tokenizer, options: ServerOptions) -> TokenNames:
        """The names in the response to a request. Its own `return_tokens_as_token_ids` overrides the server's."""
        asked = request.return_tokens_as_token_ids
        return TokenNames(tokenizer, options.return_tokens_as_token_ids if asked is None else asked)

    def of_token(self, token_id: int) -> str:
        """The name of a token as it is in the middle of a text."""
        return _id_name(token_id) if self.are_ids else self.tokenizer.token_text(token_id)

    def in_text(self, token_id: int, piece: str) -> str:
        """The name of a token that adds `piece` to a text. Special tokens have a name even if they add nothing."""
        if self.are_ids or (not piece and token_id in self.tokenizer.special_ids):
            return self.of_token(token_id)
        return piece


class CompletionLogprobs:
    """Builds the `logprobs` object of a choice of `/v1/completions`. Add the tokens in the order of the text."""

    def __init__(self, names: TokenNames, num_top: int | None) -> None:
        """Begin without tokens. `num_top`: how many most likely tokens to show at each position. None: all others."""
        self._names = names
        self._num_top = num_top
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], pieces: Sequence[Piece]
    ) -> None:
        """Add the next tokens, with the log probabilities at their positions and what they add to the text."""
        for token_id, position, piece in zip(token_ids, positions, pieces, strict=True):
            name = self._names.in_text(token_id, piece.text)
            self._tokens.append(name)
            self._offsets.append(piece.start)
            self._token_logprobs.append(None if position is None else _logprob(position, token_id))
            self._top.append(None if position is None else self._by_name(position, token_id, name))

    def _by_name(self, position: PositionLogprobs, token_id: int, name: str) -> dict[str, float]:
        """The log probabilities of the actual token, whose name is `name`, and of the most likely ones.

        Several tokens may have the same text. The actual token keeps its name, so that a client finds its value there.
        Another token whose text is taken is named by its id.
        """
        top = {name: _logprob(position, token_id)}
        for other, entry in position.items():
            if other != token_id and (self._num_top is None or (entry.rank or 0) <= self._num_top):
                text = self._names.of_token(other)
                top[_id_name(other) if text in top else text] = _logprob(position, other)
        return top

    def as_dict(self) -> dict[str, Any]:
        """The `logprobs` object of a choice."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }


def num_shown(request: SamplingRequest, num_top: int) -> int | None:
    """How many tokens to show at each position, if the request asks for the `num_top` most likely ones. None: all."""
    return None if num_top == -1 or request.logprob_token_ids else num_top


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int | None
) -> dict[str, Any]:
    """The `logprobs` object of a choice of `/v1/chat/completions`. `num_top`: see `num_shown`."""
    return {
        "content": [
            _chat_token(names, token_id, position, num_top)
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


def _chat_token(names: TokenNames, token_id: int, position: PositionLogprobs, num_top: int | None) -> dict[str, Any]:
    # the first entry is the actual token; sorting by rank leaves it out if it isn't among the most likely ones
    ranked = sorted(position.items(), key=lambda item: item[1].rank or INT64_MAX)[:num_top]
    return _chat_entry(names, token_id, position) | {
        "top_logprobs": [_chat_entry(names, other, position) for other, _ in ranked]
    }


def _chat_entry(names: TokenNames, token_id: int, position: PositionLogprobs) -> dict[str, Any]:
    spelled = names.tokenizer.token_bytes(token_id)
    return {
        "token": names.of_token(token_id),
        "logprob": _logprob(position, token_id),
        "bytes": None if spelled is None else list(spelled),
    }


def _logprob(position: PositionLogprobs, token_id: int) -> float:
    logprob = position[token_id].logprob
    return logprob if logprob > LEAST else LEAST  # also for nan


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"
