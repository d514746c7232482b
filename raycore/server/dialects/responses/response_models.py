"""Models of what `/v1/responses` answers, for the OpenAPI document. The server itself sends plain values."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[ResponseText]


class OutputReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    id: str
    type: Literal["reasoning"]
    summary: list[dict[str, Any]]
    content: list[OutputReasoningText]
    encrypted_content: None
    status: Literal["completed", "incomplete"]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"]
    status: Literal["completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class ResponseAnswer(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    presence_penalty: float
    frequency_penalty: float
    kv_transfer_params: dict[str, Any] | None = None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: bool


class ResponseItems(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
