"""From a request's body to something that can be run, however the body came here."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from raycore.server.chat.chat import Chat
from raycore.server.completions import Completion
from raycore.server.errors import APIError
from raycore.server.generation import ServingEngine
from raycore.server.options import ServerOptions
from raycore.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingRequest

T = TypeVar("T")

_SHORT_BYTES = 8_000
"""A body of this size is rendered and tokenized in about the time that a change of threads may take."""


async def off_loop(num_bytes: int, work: Callable[..., T], *args: Any) -> T:
    """What `work` gives for a body of this size: on a thread of its own if that is long, since streams go on meanwhile.

    A megabyte takes a second or more.
    """
    if num_bytes <= _SHORT_BYTES:
        return work(*args)
    return await asyncio.to_thread(work, *args)


def prepare_completion(engine: ServingEngine, body: CompletionRequest, options: ServerOptions) -> Completion:
    """Raises APIError when it can't be run."""
    return Completion.prepare(engine, body, options, check_model(options, body.model), _new_id("cmpl", body))


def prepare_chat(engine: ServingEngine, body: ChatCompletionRequest, options: ServerOptions) -> Chat:
    """Raises APIError when it can't be run."""
    return Chat.prepare(engine, body, options, check_model(options, body.model), _new_id("chatcmpl", body))


def check_model(options: ServerOptions, asked: str | None) -> str:
    """The name that the answer carries. Raises APIError when it isn't served."""
    if asked is None:
        return options.served_model_names[0]
    if asked not in options.served_model_names:
        served = ", ".join(options.served_model_names)
        raise APIError(
            404, f"the model {asked!r} does not exist; served here: {served}", param="model", code="model_not_found"
        )
    return asked


def _new_id(prefix: str, body: SamplingRequest) -> str:
    return f"{prefix}-{body.request_id or uuid.uuid4().hex}"
