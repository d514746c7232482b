"""Turns the items of a conversation into chat messages. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from raycore.server.http.errors import APIError

Item = dict[str, Any]

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def new_id(kind: str) -> str:
    """A new id for an item of this type."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def with_ids(items: Sequence[Item]) -> list[Item]:
    """Items as they are stored and listed: each has a type and an id."""
    return [_complete(item) for item in items]


def _complete(item: Item) -> Item:
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "item_reference":
        return {**item, "type": kind}
    complete = {**item, "type": kind, "id": item.get("id") or new_id(kind)}
    if kind == "message" and isinstance(item["content"], str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        complete["content"] = [{"type": part, "text": item["content"]}]
    if kind in ("message", "function_call", "function_call_output"):
        complete["status"] = item.get("status") or "completed"
    return complete


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The chat messages for a conversation.

    Consecutive items of the assistant become one message: its reasoning, its content and its calls.

    Args:
        items: without references to other items.

    Raises:
        APIError: an output belongs to none of the calls before it, or an item can't be read.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions is not None else []
    call_ids: set[str] = set()
    for number, item in enumerate(items):
        kind = item["type"]
        if kind == "function_call":
            call_ids.add(item["call_id"])
            call = {"name": item["name"], "arguments": item["arguments"]}
            _assistants(messages).setdefault("tool_calls", []).append(
                {"id": item["call_id"], "type": "function", "function": call}
            )
        elif kind == "function_call_output":
            if item["call_id"] not in call_ids:
                raise _invalid(f"input: item {number} is the output of {item['call_id']!r}, and no call has this id")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "reasoning":
            text = _reasoning(number, item)
            _assistants(messages, "content", "tool_calls", "reasoning").setdefault("reasoning", text)
        elif item["role"] == "assistant":
            _assistants(messages, "content")["content"] = item["content"]
        else:
            messages.append({"role": item["role"], "content": item["content"]})
    return messages


def continues_last(items: Sequence[Item]) -> bool:
    """Whether the last item is a message of the assistant that isn't complete, so that the model continues it."""
    last = items[-1]
    return last.get("role") == "assistant" and last.get("status") in ("incomplete", "in_progress")


def starts_of_turns(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Where a conversation may begin when its oldest messages are left out: at each message of the user."""
    return [index for index, message in enumerate(messages) if message["role"] == "user"]


def without_oldest(messages: Sequence[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """The messages from `start` on, and the instructions before them."""
    return [each for each in messages[:start] if each["role"] in ("system", "developer")] + [*messages[start:]]


def _assistants(messages: list[dict[str, Any]], *taken: str) -> dict[str, Any]:
    """The assistant's message to which an item belongs: the last one, or a new one if that has any of the fields."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(name in last for name in taken):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _reasoning(number: int, item: Item) -> str:
    texts: Iterable[dict[str, Any]] = item.get("content") or item.get("summary") or ()
    text = "\n".join(each["text"] for each in texts)
    if not text and item.get("encrypted_content"):
        raise _invalid(f"input: item {number} has only encrypted_content, which this server can't read; send content")
    return text


def _invalid(message: str) -> APIError:
    return APIError(400, message, param="input")
