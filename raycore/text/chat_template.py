"""Renders chat templates, which are Jinja text in a checkpoint. The results are the same as with Hugging Face's
tokenizers.

Templates run in a sandbox.
"""

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
from raycore.text.conversation import Message, normalize_messages
from raycore.text.media_parts import ImagePlace

_CONTINUE_HERE = "\ue000continue here\ue001 "
"""Appended to the message that the model should continue, to find that message's end in the rendered text.

Private-use characters make this marker unique. Its trailing space is lost if the template strips the message.
"""
_PROBE = "raycore_probe"
_DEVELOPER = "developer"
_PYTHON_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""What an expression in a template may raise, besides Jinja's own errors."""


class _GenerationTag(Extension):
    """Renders only the body of `{% generation %}…{% endgeneration %}`, which marks text for training."""

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
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any],
    placeholder: str | None = None,
    interleaves: bool = False,
) -> str:
    """Render the conversation as one text. Developer messages become system messages if the template doesn't know them.

    Args:
        add_generation_prompt: tell the template to end the text with the beginning of an answer.
        continue_final_message: end the text where the last message's content ends, so that the model continues it.
        special_tokens: the texts of the special tokens by name, such as `bos_token`.
        variables: further variables for the template.
        placeholder: what stands for an image in a text, for templates that take only text.
        interleaves: whether these are where the images are, and not before a message's text.

    Raises:
        InvalidRequest: the messages or options are invalid, or the template refuses them or fails on them.
    """
    normal = normalize_messages(messages)
    if any(message["role"] == _DEVELOPER for message in normal):
        role = _developer_role(template, tuple(special_tokens.items()))
        normal = [{**message, "role": role} if message["role"] == _DEVELOPER else message for message in normal]
    has_images = placeholder is not None and any(isinstance(message["content"], list) for message in normal)
    if placeholder is not None and has_images and not _takes_parts(template, tuple(special_tokens.items())):
        normal = [_with_placeholders(message, placeholder, interleaves=interleaves) for message in normal]
    if continue_final_message:
        _mark_end(normal, add_generation_prompt)
    text = _render(
        template, {**special_tokens, **variables, "messages": normal, "add_generation_prompt": add_generation_prompt}
    )
    return _cut_at_mark(text) if continue_final_message else text


def syntax_error(template: str) -> str | None:
    """Return why a template can't be compiled, with the line. None: it can."""
    try:
        _compile(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return None


def _render(template: str, variables: Mapping[str, Any]) -> str:
    try:
        return _compile(template).render(**variables)
    except (jinja2.TemplateError, *_PYTHON_ERRORS) as error:
        if type(error) is jinja2.TemplateError:  # raised by the template's own call of raise_exception()
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        raise InvalidRequest(f"the chat template fails on these messages: {type(error).__name__}: {error}") from error


@functools.lru_cache(maxsize=32)
def _developer_role(template: str, special_tokens: tuple[tuple[str, str], ...]) -> str:
    """Return `developer` if the template names that role and renders its messages, or else `system`.

    A template that writes every role as it is comes from a model that has mostly seen no such role.
    """
    if _DEVELOPER not in template:
        return "system"
    messages = [{"role": _DEVELOPER, "content": _PROBE}, {"role": "user", "content": "Probe."}]
    variables = {"messages": messages, "add_generation_prompt": True, "tools": None, "documents": None}
    try:
        is_rendered = _PROBE in _render(template, {**dict(special_tokens), **variables})
    except InvalidRequest:
        is_rendered = True  # the template may need variables that only real requests have
    return _DEVELOPER if is_rendered else "system"


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
    """Unlike Jinja's own `tojson`, this filter doesn't escape HTML: models weren't trained on escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


@functools.lru_cache(maxsize=32)
def _takes_parts(template: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template renders contents that are lists of parts, and not their representation in Python."""
    messages = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
    variables = {"messages": messages, "add_generation_prompt": True, "tools": None, "documents": None}
    try:
        text = _render(template, {**dict(special_tokens), **variables})
    except InvalidRequest:
        return False
    return _PROBE in text and "'text'" not in text and '"text"' not in text


def _with_placeholders(message: dict[str, Any], placeholder: str, *, interleaves: bool) -> dict[str, Any]:
    """Return a message whose content is text, with a placeholder for each image."""
    if not isinstance(message["content"], list):
        return message
    parts = cast("list[dict[str, Any]]", message["content"])
    texts = [placeholder if isinstance(part, ImagePlace) else str(part["text"]) for part in parts]
    if not interleaves:
        texts.sort(key=lambda text: text is not placeholder)
    return {**message, "content": "\n".join(texts)}


def _mark_end(messages: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message=True continues the last message, add_generation_prompt=True begins a new one: "
            "set only one of them"
        )
    content: Any = messages[-1]["content"]
    if not isinstance(content, list):
        messages[-1]["content"] = content + _CONTINUE_HERE
        return
    *parts, last = cast("list[dict[str, Any]]", content)
    if isinstance(last, ImagePlace):
        raise InvalidRequest("continue_final_message=True, but the last message ends with an image")
    messages[-1]["content"] = [*parts, {**last, "text": last["text"] + _CONTINUE_HERE}]


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_CONTINUE_HERE.rstrip())
    if end < 0:
        raise InvalidRequest(
            "continue_final_message=True, but the chat template changes the last message's content or leaves it out"
        )
    return text[:end] if text.startswith(_CONTINUE_HERE, end) else text[:end].rstrip()
