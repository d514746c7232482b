"""Turns a request's limit of its reasoning into tokens that are forced."""

from __future__ import annotations

from raycore.config import EngineConfig
from raycore.errors import InvalidRequest
from raycore.messages import ThinkingLimit
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer


class ThinkingLimits:
    """Makes the limits of one engine's requests. Thread-safe."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self._tags = None if config.reasoning_config is None else config.reasoning_config.tags()
        self._tokenizer = tokenizer
        self._token_ids: dict[str, list[int]] = {}
        """By tag."""

    def of(self, params: SamplingParams) -> ThinkingLimit | None:
        """The limit that a request sets. None: it sets none.

        Raises:
            InvalidRequest: nothing says how the model writes its reasoning, or the tokenizer has no tokens for that.
        """
        if params.thinking_token_budget is None:
            return None
        tags = params.reasoning_tags or self._tags
        if tags is None:
            raise InvalidRequest(
                f"thinking_token_budget={params.thinking_token_budget} needs the tags of the model's reasoning: give "
                "the engine reasoning_config, or a server --reasoning-parser"
            )
        closing = self._ids(tags.closing)
        forced = self._ids(tags.forced) if tags.forced else closing
        return ThinkingLimit(params.thinking_token_budget, self._ids(tags.opening), closing, forced, tags.is_open)

    def _ids(self, tag: str) -> list[int]:
        found = self._token_ids.get(tag)
        if found is None:
            found = self._tokenizer.encode(tag, add_special_tokens=False)
            if not found:
                raise InvalidRequest(f"thinking_token_budget: the tokenizer has no tokens for {tag!r}")
            if len(self._token_ids) < _NUM_KEPT:
                self._token_ids[tag] = found
        return found


_NUM_KEPT = 64
"""Maximum number of cached tags. A model has three."""
