"""Requests whose outputs must not have certain words."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from functools import cache
from typing import Any

from raycore.demo import demo_model_path
from raycore.text.tokenizer import Tokenizer
from simulation.cluster.kinds.kind import Asked
from simulation.cluster.kinds.rules import Rule
from simulation.scenario import Request

_COUNT = 40
"""Of words, each of one character: a good part of the vocabulary is forbidden."""


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(demo_model_path())


class _BadWords(Rule):
    def options(self, draw: random.Random, options: Mapping[str, Any]) -> dict[str, Any] | None:
        return {"skip_tokenizer_init": False}

    def apply(self, value: dict[str, Any], request: Request, asked: Asked) -> None:
        super().apply(value, request, asked)
        asked.engine["bad_words_token_ids"] = _tokenizer().bad_words_token_ids(value["bad_words"])


KIND = _BadWords("bad words", lambda draw, _: {"bad_words": draw.sample(string.ascii_letters + string.digits, _COUNT)})
