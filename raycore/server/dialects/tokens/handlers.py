"""The endpoints that take and give tokens."""

from __future__ import annotations

from typing import Any

from raycore.parts.images.server import has_images
from raycore.server.chat.chat import Chat
from raycore.server.contract.handlers import answers, runs
from raycore.server.contract.service import Context
from raycore.server.dialects.openai.completions import Completion
from raycore.server.dialects.tokens.derendering import derender_chat, derender_completion
from raycore.server.dialects.tokens.generation import Generation
from raycore.server.dialects.tokens.protocol import (
    AbortGenerationsRequest,
    DerenderChatRequest,
    DerenderCompletionRequest,
    GenerateRequest,
)
from raycore.server.dialects.tokens.rendering import rendered
from raycore.server.dialects.tokens.response_models import (
    Derendered,
    GeneratedTokens,
    RenderedCompletion,
    RenderedRequest,
)
from raycore.server.protocol import ChatCompletionRequest, CompletionRequest


@runs(GeneratedTokens, errors=(409,), streams=True, has_images=lambda body: bool(body.content_parts))
def generate(context: Context, body: GenerateRequest) -> Generation:
    """Continue a prompt of tokens, with tokens."""
    return Generation.prepare(context, body)


@answers(None, errors=(400, 500, 503))
async def abort_generations(context: Context, body: AbortGenerationsRequest) -> None:
    """End requests with their output so far."""
    await context.engine.abort_requests(body.request_ids)


@answers(RenderedRequest, has_images=lambda body: has_images(body.messages))
def render_chat(context: Context, body: ChatCompletionRequest) -> dict[str, Any]:
    """What a chat request becomes: the body for /inference/v1/generate."""
    chat = Chat.prepare(context, body, context.models.find(body.model), context.new_id("chatcmpl", body))
    return rendered(chat.message.job, body)


@answers(RenderedCompletion)
def render_completion(context: Context, body: CompletionRequest) -> list[dict[str, Any]]:
    """What the prompts of a completion request become: bodies for /inference/v1/generate."""
    return [rendered(job, body) for job in Completion.prepare(context, body).jobs]


@answers(Derendered, has_images=lambda body: bool(body.chat_request) and has_images(body.chat_request.messages))
def derender_chat_tokens(context: Context, body: DerenderChatRequest) -> dict[str, Any]:
    """The chat response for tokens, or the event of a stream for the next tokens."""
    return derender_chat(context, body)


@answers(Derendered)
def derender_completion_tokens(context: Context, body: DerenderCompletionRequest) -> dict[str, Any]:
    """The response of completions for tokens, or the event of a stream for the next tokens."""
    return derender_completion(context, body)
