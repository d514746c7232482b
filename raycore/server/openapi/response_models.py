"""Models of responses, for the OpenAPI document. The server itself sends plain values.

`tests/ray/test_openai.py` compares these with the models, except on paths that need `enable_admin_endpoints`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "repetition", "tool_calls", "abort"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


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


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


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


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """All fields of tokenizer_config.json."""

    tokenizer_class: str


class Version(BaseModel):
    version: str


class Load(BaseModel):
    server_load: int


class Success(BaseModel):
    success: bool


class Status(BaseModel):
    status: str


class SleepStatus(Status):
    level: int


class WakeStatus(Status):
    tags: list[str] | None


class Paused(BaseModel):
    is_paused: bool


class Sleeping(BaseModel):
    is_sleeping: bool


class ServerInfo(BaseModel):
    vllm_config: dict[str, Any] | str
    vllm_env: dict[str, str]
    system_env: dict[str, str]


class Aborted(Status):
    aborted: int


class RpcResults(BaseModel):
    results: list[Any]


class Told(BaseModel):
    message: str


class Renamed(Success):
    new_version: str


class WeightInfo(BaseModel):
    weight_version: str


class WorldSize(BaseModel):
    world_size: int


class Scaling(BaseModel):
    is_scaling_elastic_ep: bool
