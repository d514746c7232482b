"""Chat templates: Jinja text from a checkpoint, rendered in a sandbox as Hugging Face's tokenizers render it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from raycore.errors import InvalidRequest

Message = Mapping[str, Any]
_CONTINUE_HERE = "\ue000continue here\ue001 "
"""Ends the message to continue while the template is rendered. Characters of private use set it apart; a template that
strips the message takes away its last space."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""What OpenAI's APIs call a part of a message that is text."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training: here it is its body, no more."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def render(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """The conversation as one text.

    Args:
        continue_final_message: end the text where the last message's content ends, so that the model goes on with it.
        variables: what the template may use besides `messages` and `add_generation_prompt`.

    Raises:
        InvalidRequest: the messages or options are of the wrong shape, or the template refuses them.
    """
    plain = [_check_message(index, message) for index, message in enumerate(_check_list(messages))]
    if continue_final_message:
        _mark_end(plain, add_generation_prompt)
    try:
        text = _compile(template).render(messages=plain, add_generation_prompt=add_generation_prompt, **variables)
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"the chat template fails on these messages: {type(error).__name__}: {error}") from error
    return _cut_at_mark(text) if continue_final_message else text


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes for HTML, which models have not been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


def _check_list(messages: object) -> Sequence[object]:
    if not isinstance(messages, list | tuple):
        kind = type(messages).__name__
        raise InvalidRequest(f"messages is a {kind}: it must be a list of mappings with 'role' and 'content'")
    messages = cast("Sequence[object]", messages)
    if not messages:
        raise InvalidRequest("messages is empty: there is nothing to answer")
    return messages


def _check_message(index: int, message: object) -> dict[str, Any]:
    """A copy of the message whose content is text, or None where it calls tools instead."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages[{index}] is {message!r}: it must be a mapping with 'role' and 'content'")
    plain: dict[str, Any] = dict(cast("Message", message))
    if not isinstance(plain.get("role"), str):
        raise InvalidRequest(f"messages[{index}] has role {plain.get('role')!r}: it must be text, such as 'user'")
    content = plain.get("content")
    if content is None and not plain.get("tool_calls"):
        raise InvalidRequest(f"messages[{index}] (role {plain['role']!r}) has no 'content'")
    if content is not None and not isinstance(content, str):
        plain["content"] = _join_parts(index, content)
    return plain


def _join_parts(index: int, content: object) -> str:
    """Content given as a list of `{"type": "text", "text": …}` parts, joined by newlines."""
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"messages[{index}] has content {content!r}: it must be text, or a list of text parts")
    texts: list[str] = []
    for part in cast("Sequence[object]", content):
        fields = cast("Message", part) if isinstance(part, Mapping) else {"text": part}
        text = fields.get("text")
        if not isinstance(text, str) or fields.get("type", "text") not in _TEXT_PARTS:
            raise InvalidRequest(f"messages[{index}] has a content part {part!r}: only text parts are supported")
        texts.append(text)
    return "\n".join(texts)


def _mark_end(messages: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message=True goes on with the last message, add_generation_prompt=True begins a new one: "
            "only one of them can be had"
        )
    if messages[-1].get("content") is None:
        raise InvalidRequest("continue_final_message=True, but the last message has no content to continue")
    messages[-1]["content"] += _CONTINUE_HERE


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_CONTINUE_HERE.rstrip())
    if end < 0:
        raise InvalidRequest(
            "continue_final_message=True, but the chat template changes the last message's content or leaves it out"
        )
    return text[:end] if text.startswith(_CONTINUE_HERE, end) else text[:end].rstrip()
