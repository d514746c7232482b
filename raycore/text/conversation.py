"""Normalizes a conversation's messages to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.text.media_parts import ImagePlace

Message = Mapping[str, Any]

_TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of a message's content parts that are text, in OpenAI's APIs."""


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Return copies of the messages, in the form that chat templates expect. Idempotent.

    Content becomes a string, or a list if it has images (`raycore.text.media_parts`). Null fields are left out. If an
    assistant's message has no content, its refusal becomes the content. Reasoning is stored under both names in use,
    `reasoning` and `reasoning_content`, and where there is no content also as `thinking`. The arguments of tool calls
    become objects. A tool's result gets the name of the function that was called.

    Raises:
        InvalidRequest: a message is invalid. The error says which.
    """
    normal: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for index, message in enumerate(_check_list(messages)):
        fields = _normalize(index, message)
        names.update({str(call.get("id")): call["function"]["name"] for call in fields.get("tool_calls", [])})
        name = names.get(str(fields.get("tool_call_id")))
        if fields["role"] == "tool" and name is not None:
            fields.setdefault("name", name)
        normal.append(fields)
    return normal


def content_text(role: str, content: str | Sequence[object] | None, where: str = "message") -> str:
    """Return a message's content as a string. Text parts are joined by newlines.

    Args:
        where: the message's name in errors.

    Raises:
        InvalidRequest: the content is neither text nor a list of text parts. An assistant's content may also have
            refusal parts.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{where} has content {content!r}: it must be a string or a list of text parts")
    return "\n".join(_part_text(role, part, where) for part in content)


def _check_list(messages: object) -> Sequence[object]:
    if not isinstance(messages, list | tuple):
        kind = type(messages).__name__
        raise InvalidRequest(f"messages is a {kind}: it must be a list of mappings with 'role' and 'content'")
    if not messages:
        raise InvalidRequest("messages is empty: there is nothing to answer")
    return cast("Sequence[object]", messages)


def _normalize(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is {message!r}: it must be a mapping with 'role' and 'content'")
    given = cast("Message", message)
    role: object = given.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where} has role {role!r}: it must be a string, such as 'user'")
    fields = {name: value for name, value in given.items() if name == "content" or value is not None}
    if fields.get("content") is not None:
        given: Any = fields["content"]
        parts = list(cast("list[object]", given)) if isinstance(given, list) else []
        if any(isinstance(part, ImagePlace) for part in parts):
            fields["content"] = [_part(role, part, where) for part in parts]
        else:
            fields["content"] = content_text(role, cast("Any", given), where)
    if role == "assistant":
        _normalize_assistant(where, fields)
    calls = _calls(where, fields.get("tool_calls", []))
    if calls:
        # some templates use the content without checking that the message has any
        fields |= {"content": fields.get("content") or "", "tool_calls": calls}
    else:
        # templates check whether a message has this field, not whether the field is empty
        fields.pop("tool_calls", None)
    if fields.get("content") is None:
        raise InvalidRequest(f"{where} (role {role!r}) has no 'content'")
    return fields


def _normalize_assistant(where: str, fields: dict[str, Any]) -> None:
    for name in ("refusal", "reasoning", "reasoning_content"):
        if not isinstance(fields.get(name, ""), str):
            raise InvalidRequest(f"{where}.{name} is {fields[name]!r}: it must be a string")
    refusal = fields.pop("refusal", None)
    if refusal is not None:
        fields["content"] = fields.get("content") or refusal
    reasoning = fields.get("reasoning", fields.get("reasoning_content"))
    if reasoning is not None:
        fields |= {"reasoning": reasoning, "reasoning_content": reasoning, "content": fields.get("content") or ""}
        if not fields["content"]:
            # gpt-oss' template refuses a call with both
            fields["thinking"] = reasoning


def _calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(f"{where}.tool_calls is {calls!r}: it must be a list")
    return [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(cast("Sequence[object]", calls))]


def _call(where: str, call: object) -> dict[str, Any]:
    fields: Message = cast("Message", call) if isinstance(call, Mapping) else {}
    given: object = fields.get("function")
    function: dict[str, Any] = dict(cast("Message", given)) if isinstance(given, Mapping) else {}
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} has no function with a name: {call!r}")
    if isinstance(function.get("arguments"), str):
        function["arguments"] = _arguments(function["arguments"])
    return {**fields, "function": function}


def _arguments(text: str) -> dict[str, Any] | str:
    """Return a call's arguments as an object, or the text if it isn't one, so that the model sees its mistake."""
    try:
        value: object = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return cast("dict[str, Any]", value) if isinstance(value, dict) else text


def _part(role: str, part: object, where: str) -> dict[str, Any]:
    """Return a part of a content with images, as chat templates expect it."""
    return part if isinstance(part, ImagePlace) else {"type": "text", "text": _part_text(role, part, where)}


def _part_text(role: str, part: object, where: str) -> str:
    fields = cast("Message", part) if isinstance(part, Mapping) else {"text": part}
    kind = fields.get("type", "text")
    text: object = None
    if kind in _TEXT_PARTS:
        text = fields.get("text")
    elif kind == "refusal" and role == "assistant":
        text = fields.get("refusal")
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{where} has a content part {shortened(cast('Any', part))}: only text parts are supported"
        )
    return text
