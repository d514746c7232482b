"""Models of bodies of the endpoints that take and give tokens. The fields are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from raycore.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Fields,
    List,
    Routed,
    StreamOptions,
    Text,
    TokenIds,
)


class AbortGenerationsRequest(Fields):
    """Body of `POST /inference/v1/abort_requests`."""

    request_ids: List[Text]
    """As in the answers of `/inference/v1/generate`. Unknown ones are ignored."""


class GenerateRequest(Routed):
    """Body of `POST /inference/v1/generate`, and what a request is rendered to."""

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    """The prompt."""
    sampling_params: dict[str, Any]
    """Sampling parameters by name. What is left out has the default of `SamplingParams`. Without `max_tokens`, only the
    model's context limits the answer."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    """`text`: the answer has the text, too."""
    return_token_ids: bool | None = None
    """Whether the answer has the prompt's tokens."""
    content_parts: List[dict[str, Any]] | None = None
    """The prompt's images, each as `{"type": "image_url", "url": ...}`. The prompt has one placeholder for each."""

    features: dict[str, Any] | None = None
    token_offsets: List[Any] | None = None
    """Accepted and ignored."""
    reasoning_ended: bool | None = None
    """Accepted and ignored: `sampling_params` say where the reasoning ends."""
    reasoning_parser_kwargs: dict[str, Any] | None = None
    """Accepted and ignored, too."""
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class TokenEntry(BaseModel):
    """A token's log probability."""

    token_id: Annotated[int, Field(ge=0)]
    logprob: float
    rank: int | None = None


class TokenLogprobs(TokenEntry):
    """Those at a position: of the token, and of the most likely ones."""

    top_logprobs: List[TokenEntry] = []


class GivenLogprobs(BaseModel):
    content: List[TokenLogprobs] | None = None


class GivenChoice(BaseModel):
    """A choice of `/inference/v1/generate`, or what is new of it."""

    index: Annotated[int, Field(ge=0)] = 0
    token_ids: List[Annotated[int, Field(ge=0)]] | None = None
    logprobs: GivenLogprobs | None = None
    finish_reason: Literal["stop", "length", "repetition", "abort"] | None = None
    stop_reason: int | str | None = None


class GivenUsage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class GivenResponse(BaseModel):
    """A response of `/inference/v1/generate`, or an event of its stream."""

    request_id: str
    output_mode: Literal["tokens"] = "tokens"
    """Texts need no detokenization."""
    choices: List[GivenChoice]
    usage: GivenUsage | None = None
    prompt_token_ids: TokenIds | None = None


class StreamState(BaseModel):
    """How much of a stream has been detokenized. The client sends it back with the next event."""

    output_token_ids: List[Annotated[int, Field(ge=0)]] = []
    """All tokens of the choice so far."""
    output_chunk_lens: List[Annotated[int, Field(gt=0)]] = []
    """How many of them each event had."""
    role_sent: bool = False
    """Whether the client has got the choice's role."""

    @model_validator(mode="after")
    def _check_lengths(self) -> StreamState:
        if sum(self.output_chunk_lens) != len(self.output_token_ids):
            raise PydanticCustomError(
                "lengths",
                "output_chunk_lens sums up to {total}, and output_token_ids has {count} tokens",
                {"total": sum(self.output_chunk_lens), "count": len(self.output_token_ids)},
            )
        return self


class Derendering(Fields):
    """What requests to detokenize have in common."""

    model: str | None = None
    stream: bool = False
    """Whether `generate_chunk` is an event of a stream. Otherwise the whole response is given."""
    generate_chunk: GivenResponse | None = None
    stream_state: StreamState | None = None
    """null: the event is the first one of its choice."""


class DerenderChatRequest(Derendering):
    """Body of `POST /v1/chat/completions/derender`."""

    generate_response: GivenResponse | None = None
    prompt_tokens: int | None = None
    """The number of the prompt's tokens, for the usage."""
    prompt_token_ids: TokenIds | None = None
    """The prompt's tokens, or the last ones, for the text of the first tokens."""
    chat_request: ChatCompletionRequest | None = None
    """The chat request that was rendered."""


class DerenderCompletionRequest(Derendering):
    """Body of `POST /v1/completions/derender`. Lists have an entry for each prompt. A stream has one prompt."""

    generate_responses: List[GivenResponse] | None = None
    prompt_tokens: int | List[int] | None = None
    prompt_token_ids: TokenIds | List[TokenIds | None] | None = None
    completion_request: CompletionRequest | None = None
    """The completion request that was rendered."""
