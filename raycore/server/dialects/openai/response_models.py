"""Models of what completions and chats answer, for the OpenAPI document. The server itself sends plain values."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from raycore.server.openapi.response_models import FinishReason, Usage


class CompletionChoiceLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionChoiceLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    """With `enable_return_routed_experts`, at the end: a file of `numpy.save` in base64."""
    kv_transfer_params: dict[str, Any] | None = None


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: dict[str, Any] | None = None


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatChoiceLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    role: str
    reasoning: str | None = None
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatChoiceLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    """With `enable_return_routed_experts`, at the end: a file of `numpy.save` in base64."""
    kv_transfer_params: dict[str, Any] | None = None


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
