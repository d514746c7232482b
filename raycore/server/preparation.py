"""Turns request bodies into runnable requests, for the HTTP server and for batches."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from raycore.server.chat.batched import BatchedChats
from raycore.server.chat.chat import Chat
from raycore.server.completions import Completion
from raycore.server.generation import ServingEngine
from raycore.server.models import Models
from raycore.server.options import ServerOptions
from raycore.server.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
)

T = TypeVar("T")

_SHORT_BYTES = 8_000
"""Bodies up to this size are handled on the event loop's thread. Rendering and tokenizing such a body takes no longer
than switching threads."""


async def off_loop(num_bytes: int, work: Callable[..., T], *args: Any, executor: Executor | None = None) -> T:
    """Run `work(*args)`, which handles a request body of `num_bytes` bytes. With an `executor`, it runs there.

    For a large body, the work runs on another thread, so that it doesn't delay streams. A body of a megabyte takes a
    second or more.
    """
    if executor is not None:
        return await asyncio.get_running_loop().run_in_executor(executor, partial(copy_context().run, work, *args))
    if num_bytes <= _SHORT_BYTES:
        return work(*args)
    return await asyncio.to_thread(work, *args)


def prepare_completion(
    engine: ServingEngine, body: CompletionRequest, options: ServerOptions, models: Models
) -> Completion:
    """Check and prepare a completion request. Raises APIError if the request is invalid."""
    return Completion.prepare(engine, body, options, models.find(body.model), _new_id("cmpl", body))


def prepare_chat(engine: ServingEngine, body: ChatCompletionRequest, options: ServerOptions, models: Models) -> Chat:
    """Check and prepare a chat completion request. Raises APIError if the request is invalid."""
    return Chat.prepare(engine, body, options, models.find(body.model), _new_id("chatcmpl", body))


def prepare_batched_chats(
    engine: ServingEngine, body: BatchChatCompletionRequest, options: ServerOptions, models: Models
) -> BatchedChats:
    """Check and prepare a request with several conversations. Raises APIError if the request is invalid."""
    return BatchedChats.prepare(engine, body, options, models.find(body.model), _new_id("chatcmpl", body))


def _new_id(prefix: str, body: SamplingRequest) -> str:
    return f"{prefix}-{body.request_id or uuid.uuid4().hex}"
