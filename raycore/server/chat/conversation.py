"""A request's messages in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from raycore.server.errors import APIError
from raycore.server.protocol import Message


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As templates take them.

    Without fields that are null, with thoughts by either name, the arguments of calls as objects, and results by their
    function's name.

    Raises:
        APIError: a call has no function.
    """
    names: dict[str, str] = {}
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        fields = message.model_dump(exclude_unset=True)
        # templates ask whether a message has calls, not whether it has any
        kept = {name: value for name, value in fields.items() if name == "content" or value is not None}
        thought = kept.get("reasoning", kept.get("reasoning_content"))
        if message.role == "assistant" and thought is not None:
            kept |= {"reasoning": thought, "reasoning_content": thought, "content": kept.get("content") or ""}
        if not kept.get("tool_calls"):
            kept.pop("tool_calls", None)
        else:
            # some look into the content without asking whether there is any
            kept["content"] = kept.get("content") or ""
            where = f"messages[{index}].tool_calls"
            kept["tool_calls"] = [_call(f"{where}[{i}]", call) for i, call in enumerate(kept["tool_calls"])]
            names.update({str(call.get("id")): call["function"]["name"] for call in kept["tool_calls"]})
        name = names.get(str(kept.get("tool_call_id")))
        if message.role == "tool" and name is not None:
            kept.setdefault("name", name)
        plain.append(kept)
    return plain


def _call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function: object = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(cast("Mapping[str, Any]", function).get("name"), str):
        raise APIError(400, f"{where} has no function with a name: {call!r}", param="messages")
    function = dict(cast("Mapping[str, Any]", function))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function["arguments"] = _arguments(arguments)
    return {**call, "function": function}


def _arguments(text: str) -> dict[str, Any] | str:
    """As an object; as they are where a model wrote them as something else, so that it can be shown its mistake."""
    try:
        value: object = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return cast("dict[str, Any]", value) if isinstance(value, dict) else text
