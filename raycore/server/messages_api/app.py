"""The endpoints of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

from raycore.server.handlers import answers, named_events, runs
from raycore.server.messages_api.answer import MessageAnswer, count_tokens
from raycore.server.messages_api.protocol import CountTokensRequest, MessagesRequest
from raycore.server.messages_api.response_models import MessageBody, TokenCount
from raycore.server.messages_api.translation import has_images
from raycore.server.service import Context
from raycore.server.token_api.rendering import rendered
from raycore.server.token_api.response_models import RenderedRequest


@runs(MessageBody, streams=True, events=named_events, has_images=has_images)
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
