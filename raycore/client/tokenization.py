"""How the prompts of one call become tokens: vLLM's `tokenization_kwargs` and `truncate_prompt_tokens`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.sampling_params import checked_int
from raycore.text.cuts import Side
from raycore.text.tokenizer import Tokenizer

_KNOWN = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")


@dataclass(frozen=True, slots=True)
class Tokenization:
    """How prompts become tokens."""

    max_tokens: int | None = None
    """What is left of longer prompts. None: they aren't cut."""
    side: Side | None = None
    """Where prompts are cut. None: as the tokenizer says."""
    add_special_tokens: bool = True

    @staticmethod
    def of(truncate_prompt_tokens: object, given: object, max_model_len: int) -> Tokenization:
        """Return what a caller asks for.

        Args:
            truncate_prompt_tokens: a number of tokens, -1 for `max_model_len`, or None.
            given: `tokenization_kwargs`: a mapping that may have `truncate_prompt_tokens`, `truncation_side` and
                `add_special_tokens`, or None.

        Raises:
            InvalidRequest: a value is invalid; the message names it.
        """
        if given is not None and not isinstance(given, Mapping):
            raise InvalidRequest(f"tokenization_kwargs={shortened(given)} isn't a mapping")
        asked: dict[Any, Any] = {} if given is None else dict(cast("Mapping[Any, Any]", given))
        unknown = [name for name in asked if name not in _KNOWN]
        if unknown:
            raise InvalidRequest(f"tokenization_kwargs has {shortened(unknown[0])}: known are {', '.join(_KNOWN)}")
        side, adds = asked.get("truncation_side"), asked.get("add_special_tokens", True)
        if side not in (None, "left", "right"):
            raise InvalidRequest(f"truncation_side={shortened(side)} isn't 'left' or 'right'")
        if not isinstance(adds, bool):
            raise InvalidRequest(f"add_special_tokens={shortened(adds)} isn't True or False")
        number = asked.get("truncate_prompt_tokens", truncate_prompt_tokens)
        return Tokenization(_checked(number, max_model_len), side, adds)

    def encode(self, texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
        """Return the tokens of texts."""
        if self.max_tokens is None:
            return tokenizer.encode_batch(texts, add_special_tokens=self.add_special_tokens)
        return tokenizer.encode_within(texts, self.max_tokens, self.add_special_tokens, self.side)

    def cut(self, token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
        """Return what is left of a prompt that was given as tokens."""
        if self.max_tokens is None or len(token_ids) <= self.max_tokens:
            return token_ids
        is_left = (self.side or tokenizer.truncation_side) == "left"
        return token_ids[-self.max_tokens :] if is_left else token_ids[: self.max_tokens]


PLAIN = Tokenization()
"""As the tokenizer does it by itself."""


def _checked(number: object, max_model_len: int) -> int | None:
    if number is None:
        return None
    checked = checked_int("truncate_prompt_tokens", number)
    if checked != -1 and not 1 <= checked <= max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens={checked} isn't from 1 to max_model_len={max_model_len}, or -1, which stands for "
            "that"
        )
    return max_model_len if checked == -1 else checked
