"""The endpoints of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

from raycore.server.contract.handlers import answers, runs
from raycore.server.contract.service import Context
from raycore.server.dialects.messages.answer import MessageAnswer, count_tokens
from raycore.server.dialects.messages.protocol import CountTokensRequest, MessagesRequest
from raycore.server.dialects.messages.response_models import MessageBody, TokenCount
from raycore.server.dialects.messages.translation import has_images
from raycore.server.dialects.tokens.rendering import rendered
from raycore.server.dialects.tokens.response_models import RenderedRequest


@runs(MessageBody, streams=True, names_events=True, has_images=has_images)
def messages(context: Context, body: MessagesRequest) -> MessageAnswer:
    """Generate the next message of a conversation, as Anthropic's Messages API does."""
    return MessageAnswer.prepare(context, body)


@answers(RenderedRequest, has_images=has_images)
def render_messages(context: Context, body: MessagesRequest) -> dict[str, Any]:
    """What a request for a message becomes: the body for /inference/v1/generate."""
    return rendered(MessageAnswer.prepare(context, body).run.job, body)


@answers(TokenCount, has_images=has_images)
def tokens_of_messages(context: Context, body: CountTokensRequest) -> dict[str, Any]:
    """Count the tokens of a conversation, as Anthropic's Messages API does."""
    return count_tokens(context, body)
