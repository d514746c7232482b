"""Finds out whether a chat template takes system messages after the first message."""

from __future__ import annotations

import functools
from typing import Any

from raycore.errors import InvalidRequest
from raycore.text.tokenizer import Tokenizer

_PROBE = "raycore_probe"
_PROBES: list[dict[str, Any]] = [
    {"role": "system", "content": "Probe."},
    {"role": "user", "content": "Probe."},
    {"role": "system", "content": _PROBE},
    {"role": "user", "content": "Probe."},
]


@functools.lru_cache(maxsize=8)
def has_one_system(tokenizer: Tokenizer, chat_template: str | None) -> bool:
    """Whether a template refuses or leaves out all system messages but that at the beginning.

    `chat_template`: None: the checkpoint's.
    """
    try:
        text = tokenizer.apply_chat_template(_PROBES, add_generation_prompt=True, chat_template=chat_template)
    except InvalidRequest:
        return True
    return _PROBE not in text
