"""Reduces the JSON schemas inside a grammar of llguidance's variant of Lark. Pure."""

from __future__ import annotations

import json
import re

from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.schema import enforceable
from raycore.parts.constraints.grammar.schema_values import DECODER

_PART = re.compile(
    r"""(?://|\#)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|<[^<>\s]+>|%json\b\s*""",
    re.DOTALL,
)
"""What may contain `%json` without meaning it (comments, strings, patterns, special tokens), and `%json` itself."""
_SHOWN = 60
"""How many characters of a schema an error message quotes."""


def with_enforceable_schemas(grammar: str) -> str:
    """The grammar with each schema after `%json` as `enforceable` returns it.

    Raises:
        InvalidRequest: a schema is refused, or isn't valid JSON.
    """
    parts: list[str] = []
    end = 0
    while (found := _PART.search(grammar, end)) is not None:
        parts.append(grammar[end : found.end()])
        end = found.end()
        if found[0].startswith("%json"):
            start = end
            try:
                schema, end = DECODER.raw_decode(grammar, start)
                parts.append(json.dumps(enforceable(schema)))
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"%json {grammar[start : start + _SHOWN]!r}: {error}") from error
    return "".join([*parts, grammar[end:]])
