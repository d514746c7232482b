"""Turns the bodies of Anthropic's Messages API into chat requests. Pure.

A turn of the user becomes the results of tools, each a message of its own, and then a message with the rest. Images in
results are in that message, too, because chat templates take only texts as results. If the last turn is the
assistant's, the answer continues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from raycore.server.dialects.messages.protocol import (
    Block,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    MessagesRequest,
    PlainTextSource,
    RedactedThinkingBlock,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolDefinition,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UrlSource,
)
from raycore.server.http.errors import APIError, invalid_body
from raycore.server.protocol import ChatCompletionRequest

_BILLING = "x-anthropic-billing-header"
"""Claude Code's first block of the system prompt begins so, and differs with every request. Without it, requests share
cached prefixes."""

_COPIED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "cache_salt",
    "priority",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "watermarking",
)
"""The fields that a chat request has under the same name."""

ORIGINS = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "thinking_token_budget": "thinking",
    "user": "metadata",
}
"""By field of the chat request: the field that it comes from, if that has another name."""

_BLOCKS: dict[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ImageBlock, DocumentBlock, SearchResultBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
"""What a turn may have, by its role."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""By `tool_choice.type`: `tool_choice` of a chat request."""


def chat_request(body: CountTokensRequest, *, has_one_system: bool) -> ChatCompletionRequest:
    """The chat request that stands for a body, without a limit of the answer's length.

    Args:
        has_one_system: whether the chat template takes only one system message, at the beginning. The others become a
            part of that one.

    Raises:
        APIError: the body is invalid.
    """
    _check_blocks(body.messages)
    fields = {name: value for name in _COPIED if (value := getattr(body, name, None)) is not None}
    fields["messages"] = _conversation(body, has_one_system)
    if body.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields["tools"] = [_tool(index, tool) for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    fields |= _thinking(body)
    if isinstance(body, MessagesRequest):
        if body.stop_sequences:
            fields["stop"] = body.stop_sequences
        if body.metadata is not None and body.metadata.user_id is not None:
            fields["user"] = body.metadata.user_id
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error.errors()) from error


def has_images(body: CountTokensRequest) -> bool:
    """Whether a body has images, so that preparing it may take seconds."""
    blocks = [block for turn in body.messages for block in turn.content]
    inner = [part for block in blocks if isinstance(block, ToolResultBlock) for part in block.content or ()]
    return any(isinstance(block, ImageBlock) for block in [*blocks, *inner])


def _check_blocks(turns: Sequence[Turn]) -> None:
    for index, turn in enumerate(turns):
        for number, block in enumerate(turn.content):
            if not isinstance(block, _BLOCKS[turn.role]):
                where = f"messages.{index}.content.{number}"
                raise APIError(
                    400, f"{where}: a message of the {turn.role} has no {block.type} blocks", param="messages"
                )
    if turns[-1].role == "assistant" and any(isinstance(block, ToolUseBlock) for block in turns[-1].content):
        where = f"messages.{len(turns) - 1}"
        raise APIError(400, f"{where}: a message with the tool_result of each tool_use must follow", param="messages")


def _conversation(body: CountTokensRequest, has_one_system: bool) -> list[dict[str, Any]]:
    turns = [(role, [block for turn in group for block in turn.content]) for role, group in _by_role(body.messages)]
    system: list[Block] = [*(body.system or ())]
    if has_one_system:
        system += [block for role, blocks in turns if role == "system" for block in blocks]
        turns = [(role, blocks) for role, blocks in turns if role != "system"]
    messages = _of_system(system)
    for role, blocks in turns:
        messages += {"user": _of_user, "assistant": _of_assistant, "system": _of_system}[role](blocks)
    if not messages:
        raise APIError(400, "messages has no content", param="messages")
    return messages


def _by_role(turns: Sequence[Turn]):
    """Consecutive turns of a role are one turn."""
    return groupby(turns, key=lambda turn: turn.role)


def _of_system(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock) and block.text]
    kept = [text for text in texts if not text.startswith(_BILLING)]
    return [{"role": "system", "content": "\n".join(kept)}] if kept else []


def _of_assistant(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return [message]


def _of_user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            parts = [_part(part) for part in block.content or ()]
            text = "\n".join(part["text"] for part in parts if part["type"] == "text")
            if block.is_error and not text.casefold().startswith("error"):
                text = f"Error: {text}"
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            rest += [part for part in parts if part["type"] != "text"]
        elif not isinstance(block, ThinkingBlock | RedactedThinkingBlock | ToolUseBlock):
            rest.append(_part(block))
    return [*messages, {"role": "user", "content": rest}] if rest or not messages else messages


def _part(block: ResultBlock) -> dict[str, Any]:
    """A part of a chat message: a text or an image."""
    if isinstance(block, ImageBlock):
        source = block.source
        url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "text", "text": _text(block)}


def _text(block: TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ToolReferenceBlock):
        return block.tool_name
    if isinstance(block, SearchResultBlock):
        return "\n".join([block.title, block.source, *(each.text for each in block.content)])
    source = block.source
    texts = [source.data] if isinstance(source, PlainTextSource) else [each.text for each in source.content]
    return "\n".join([*(text for text in (block.title, block.context) if text), *texts])


def _tool(index: int, tool: ToolDefinition) -> dict[str, Any]:
    if tool.input_schema is None:
        raise APIError(400, f"tools.{index}.input_schema is missing", param="tools")
    function: dict[str, Any] = {"name": tool.name, "parameters": {"type": "object", **tool.input_schema}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": _CHOICES.get(choice.type, named)}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _thinking(body: CountTokensRequest) -> dict[str, Any]:
    """The fields for the reasoning, and for the format of what follows it."""
    fields: dict[str, Any] = {}
    variables = body.chat_template_kwargs or {}
    config = body.output_config
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if body.thinking is not None and body.thinking.type == "disabled":
        fields["reasoning_effort"] = "none"
    elif body.thinking is not None and body.thinking.type == "enabled":
        variables = {"enable_thinking": True} | variables
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if variables:
        fields["chat_template_kwargs"] = variables
    format_ = body.output_format if config is None or config.format is None else config.format
    if format_ is not None:
        schema = {"name": "output", "schema": format_.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields
