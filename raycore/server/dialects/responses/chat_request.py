"""Turns a request to `/v1/responses` into the chat request that runs it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raycore.server.dialects.responses.protocol import (
    AllowedTools,
    ChosenFunction,
    FunctionTool,
    ResponsesRequest,
)
from raycore.server.generation.sampling import check_stream_options
from raycore.server.http.errors import APIError, unsupported
from raycore.server.http.ignored_fields import ignore
from raycore.server.protocol import ChatCompletionRequest

ABSENT = {
    "conversation": "conversations aren't stored; use previous_response_id, or send all items as input",
    "prompt": "prompt templates aren't stored; send instructions and input",
    "previous_input_messages": "use previous_response_id, or send all items as input",
}
"""Fields that OpenAI or vLLM document but this server doesn't support, each with the reason for its refusal."""

HINTS = {
    "access_programs": "there are no access programs",
    "background_options": "responses in the background run at once",
    "context_management": "conversations aren't compacted; truncation='auto' leaves out the oldest messages",
    "image": "the model's image processor decides; use mm_processor_kwargs",
}
"""The same for fields that are ignored: a client can use the response anyway."""

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""What the fields of the chat request are called in the request itself."""

_OTHERWISE = frozenset({"tools", "tool_choice", "top_logprobs", "stream_options", "store", "service_tier"})
"""Fields of both requests that differ in their meaning or form."""
SAME = frozenset(ResponsesRequest.model_fields.keys() & ChatCompletionRequest.model_fields.keys()) - _OTHERWISE
"""Fields of both requests that mean the same."""
LOGPROBS = "message.output_text.logprobs"


def check(body: ResponsesRequest, *, can_store: bool) -> None:
    """Raise APIError if fields of the request aren't supported, or contradict each other."""
    for name, why in ABSENT.items():
        if getattr(body, name) is not None:
            raise unsupported(name, why)
    for name, why in HINTS.items():
        if getattr(body, name) is not None and not ignore(name):
            raise unsupported(name, why)
    check_stream_options(body.stream, body.stream_options)
    if body.background and body.store is False:
        raise APIError(400, "background=true needs store=true", param="background")
    if body.background and not can_store:
        raise APIError(
            400, "background=true: this server stores no responses (max_stored_responses=0)", param="background"
        )
    if not body.input and body.previous_response_id is None:
        raise APIError(400, "input is empty: there is nothing to answer", param="input")
    form = None if body.text is None else body.text.format
    if form is not None and form.type == "json_schema" and form.json_schema is None:
        raise APIError(400, "text.format.schema is missing", param="text.format")


def chat_request(
    body: ResponsesRequest, messages: Sequence[Mapping[str, Any]], *, continues: bool
) -> ChatCompletionRequest:
    """The chat request.

    Args:
        messages: the conversation.
        continues: whether the model continues the last message.

    Raises:
        APIError: `tool_choice` names a function that isn't one of the tools.
    """
    fields = {name: value for name in SAME & body.model_fields_set if (value := getattr(body, name)) is not None}
    fields |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    if continues:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    fields |= _tool_fields(body)
    form = None if body.text is None else body.text.format
    if form is not None and form.type == "json_schema":
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": form.name or "answer", "schema": form.json_schema},
        }
    elif form is not None:
        fields["response_format"] = {"type": form.type}
    given = {name: _plain(value) for name, value in fields.items() if value is not None}
    return ChatCompletionRequest.model_validate(given)


def _tool_fields(body: ResponsesRequest) -> dict[str, Any]:
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = [_tool_named(each.name, tools) for each in choice.tools]
        tools, choice = [each for each in tools if each in allowed], choice.mode
    elif isinstance(choice, ChosenFunction):
        choice = {"type": "function", "function": {"name": _tool_named(choice.name, tools).name}}
    return {"tools": [_chat_tool(each) for each in tools] or None, "tool_choice": choice}


def _tool_named(name: str, tools: Sequence[FunctionTool]) -> FunctionTool:
    found = next((each for each in tools if each.name == name), None)
    if found is None:
        known = ", ".join(each.name for each in tools) or "there are none"
        raise APIError(400, f"tool_choice names {name!r}, which isn't one of tools: {known}", param="tool_choice")
    return found


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    fields = ("name", "description", "parameters", "strict")
    function = {name: value for name in fields if (value := getattr(tool, name)) is not None}
    return {"type": "function", "function": function}


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True, by_alias=True) if hasattr(value, "model_dump") else value
