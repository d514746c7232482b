"""Models of responses of the token endpoints, for the OpenAPI document. The server itself sends plain values."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, RootModel

from raycore.server.openapi.response_models import FinishReason, Usage


class WeightVersion(BaseModel):
    version: str
    start: int
    end: int


class GeneratedChoice(BaseModel):
    index: int
    token_ids: list[int]
    text: str | None = None
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    weight_versions: list[WeightVersion] | None
    routed_experts: str | None = None
    """With `enable_return_routed_experts`, at the end: a file of `numpy.save` in base64."""
    kv_transfer_params: dict[str, Any] | None = None


class GeneratedTokens(BaseModel):
    request_id: str
    output_mode: Literal["tokens", "text"]
    model: str
    created: int
    choices: list[GeneratedChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None


class RenderedRequest(BaseModel):
    request_id: str
    model: str | None
    token_ids: list[int]
    features: None
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int


class RenderedCompletion(RootModel[list[RenderedRequest]]):
    pass


class Derendered(RootModel[dict[str, Any]]):
    """The response that belongs to the tokens; of a stream, `chunk` and `stream_state`."""


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
