"""Builds parts of grammars in llguidance's variant of Lark, and the patterns in them. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from raycore.errors import InvalidRequest
from raycore.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

SpecialTokens = Mapping[str, int]
"""The ids of special tokens, by the tokens' texts. Grammars must refer to special tokens by id."""

_ESCAPES = 'nrbtf\\"'
"""Without `u`: llguidance doesn't recognize a property's name that is written as `\\u0061`, and lets its value be
anything."""
WHITE_SPACE: JsonCompileOptions = {"whitespace_pattern": r"[ \t\n\r]{1,32}", "json_allowed_escapes": _ESCAPES}
"""Allowed white space between the parts of JSON: enough for indentation, but bounded, so that a model can't generate
white space for ever."""
NO_SPACE: JsonCompileOptions = {"whitespace_flexible": False, "json_allowed_escapes": _ESCAPES}
_REGEX_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def tag_rule(text: str, special: SpecialTokens) -> str:
    """A tag in the syntax of a grammar rule: the special token with this text, or else plain text."""
    return f"<[{special[text]}]>" if text in special else json.dumps(text)


def alternative(asked: StructuredOutputsParams) -> str:
    """The body of a rule that matches exactly what `asked` allows.

    Raises:
        InvalidRequest: `asked` is a grammar, which can't be part of another grammar, or its schema isn't valid JSON.
    """
    for name in ("grammar", "structural_tag"):
        if getattr(asked, name) is not None:
            raise InvalidRequest(f"structured_outputs.{name} can't be combined with tools: use json, regex or choice")
    if asked.regex is not None:
        return pattern_rule(asked.regex)
    if asked.choice is not None:
        return pattern_rule(pattern_of_choice(asked.choice))
    return f"%json {json.dumps(_schema(asked))}"


def pattern_rule(regex: str) -> str:
    """The body of a rule that matches a regular expression."""
    escaped = _SLASH.sub(lambda match: match[1] or r"\/", regex).replace("\n", r"\n")
    return f"/(?:{escaped})/"


def pattern_of_choice(texts: Sequence[str]) -> str:
    """A regular expression that matches these texts and nothing else."""
    return "|".join(map(_literal, texts))


def _literal(text: str) -> str:
    """A regular expression that matches this text and nothing else."""
    return "".join(f"\\{character}" if character in _REGEX_SPECIAL else character for character in text)


def _schema(asked: StructuredOutputsParams) -> Any:
    space = NO_SPACE if asked.disable_any_whitespace else WHITE_SPACE
    if asked.json is None:
        return {"type": "object", "x-guidance": space}
    try:
        schema: object = json.loads(str(asked.json))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{asked}: {error}") from error
    if not isinstance(schema, dict):
        return schema
    schema = cast("dict[str, Any]", schema)
    own: object = schema.get("x-guidance")
    return {**schema, "x-guidance": {**space, **(cast("dict[str, Any]", own) if isinstance(own, dict) else {})}}
