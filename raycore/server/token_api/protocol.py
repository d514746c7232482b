"""Models of bodies of the endpoints that take and give tokens. The fields are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from raycore.server.protocol import List, Routed, StreamOptions, TokenIds


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
