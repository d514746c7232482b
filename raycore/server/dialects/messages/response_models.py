"""Models of responses of Anthropic's Messages API, for the OpenAPI document. The server itself sends plain values."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class TextOfMessage(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingOfMessage(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseOfMessage(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageTokensDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails | None = None
    service_tier: Literal["standard"]


class MessageBody(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextOfMessage | ThinkingOfMessage | ToolUseOfMessage]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage
    kv_transfer_params: dict[str, Any] | None = None


class TokenCount(BaseModel):
    input_tokens: int
