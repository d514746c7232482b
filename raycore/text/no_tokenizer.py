"""What an engine has with `skip_tokenizer_init` where others have a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from raycore.errors import InvalidRequest
from raycore.text.tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """Stands for a tokenizer that wasn't loaded. It knows how many tokens there are, and nothing else.

    What needs a tokenizer raises InvalidRequest.
    """

    def __init__(self, vocab_size: int) -> None:  # pyright: ignore[reportMissingSuperCall]  # that one reads a tokenizer
        self._named_tokens, self._templates, self._texts, self._path = {}, {}, {}, Path()
        self.truncation_side = "right"
        self.vocab_size = vocab_size
        self.special_ids = frozenset()
        self.bos_token_id = self.eos_token_id = self._unknown_id = None
        self._unknown_token = ""

    def __getattr__(self, name: str) -> NoReturn:
        if name == "_native":
            raise no_tokenizer("text")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise no_tokenizer("a conversation")


def no_tokenizer(what: str) -> InvalidRequest:
    """The error for a request that has or asks for `what`, which needs a tokenizer."""
    return InvalidRequest(
        f"{what} needs a tokenizer, and the engine has none (skip_tokenizer_init=True): give and take token ids"
    )
