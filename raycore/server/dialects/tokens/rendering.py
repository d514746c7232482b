"""Says what a request becomes: token ids and sampling parameters, as `/inference/v1/generate` takes them.

So a router can tokenize in one place, and generate in another.
"""

from __future__ import annotations

from typing import Any

from raycore.server.dialects.messages.protocol import MessagesRequest
from raycore.server.dialects.tokens.parameters import as_json
from raycore.server.generation.jobs import Job
from raycore.server.http.errors import APIError
from raycore.server.protocol import Generating, SamplingRequest


def rendered(job: Job, request: Generating | MessagesRequest, param: str = "messages") -> dict[str, Any]:
    """The body for `/inference/v1/generate` that runs a job of a request. `param`: the field that has the conversation.

    Raises:
        APIError: the prompt has images.
    """
    if job.prompt.features:
        raise APIError(400, f"{param} has images, which can't be rendered", param=param)
    options = request.stream_options if isinstance(request, SamplingRequest) else None
    return {
        "request_id": job.request_id,
        "model": request.model,
        "token_ids": job.prompt.token_ids,
        "features": None,
        "sampling_params": as_json(job.params),
        "stream": bool(request.stream),
        "stream_options": None if options is None else options.model_dump(),
        "cache_salt": job.prompt.cache_salt,
        "priority": job.ask.priority,
    }
