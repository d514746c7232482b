"""OpenAI's endpoints for completions and chats."""

from __future__ import annotations

from itertools import chain

from raycore.parts.images.server import has_images
from raycore.server.chat.batched import BatchedChats
from raycore.server.chat.chat import Chat
from raycore.server.contract.handlers import runs
from raycore.server.contract.service import Context
from raycore.server.dialects.openai.completions import Completion
from raycore.server.dialects.openai.response_models import ChatAnswer, CompletionAnswer
from raycore.server.protocol import BatchChatCompletionRequest, ChatCompletionRequest, CompletionRequest


@runs(CompletionAnswer, errors=(409,), streams=True)
def completions(context: Context, body: CompletionRequest) -> Completion:
    """Complete one or more prompts."""
    return Completion.prepare(context, body)


@runs(ChatAnswer, errors=(409,), streams=True, has_images=lambda body: has_images(body.messages))
def chat_completions(context: Context, body: ChatCompletionRequest) -> Chat:
    """Generate the next message of a conversation."""
    return Chat.prepare(context, body, context.models.find(body.model), context.new_id("chatcmpl", body))


@runs(ChatAnswer, errors=(409,), has_images=lambda body: has_images(chain.from_iterable(body.messages)))
def batched_chat_completions(context: Context, body: BatchChatCompletionRequest) -> BatchedChats:
    """Generate the next message of each of several conversations: a choice for each, in their order."""
    return BatchedChats.prepare(context, body)
