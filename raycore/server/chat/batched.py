"""Answers `POST /v1/chat/completions/batch`: several conversations in one request, each with a choice of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raycore.server.chat.chat import Chat
from raycore.server.contract.service import Context
from raycore.server.generation.jobs import gathered
from raycore.server.http.errors import APIError, unsupported
from raycore.server.protocol import BatchChatCompletionRequest, ChatCompletionRequest

_ONLY: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "stream": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "return_prompt_text": (None, False),
}
"""The values that fields of a chat may have, if not all values make sense for several conversations."""


@dataclass(frozen=True)
class BatchedChats:
    """The checked chats of a request. `answer()` runs them at once."""

    id: str
    chats: list[Chat]

    @staticmethod
    def prepare(context: Context, request: BatchChatCompletionRequest) -> BatchedChats:
        """Check a request and prepare its prompts. Raises APIError if a conversation can't be run."""
        model, request_id = context.models.find(request.model), context.new_id("chatcmpl", request)
        for name, values in _ONLY.items():
            if getattr(request, name) not in values:
                raise unsupported(name, "not for several conversations; send a chat of its own for each")
        most = context.options.max_sequences
        if len(request.messages) > most:
            message = f"messages has {len(request.messages)} conversations; at most {most} are allowed"
            raise APIError(400, message, param="messages")
        chats: list[Chat] = []
        for number, messages in enumerate(request.messages):
            one: ChatCompletionRequest = request.model_copy(update={"messages": messages})
            chats.append(Chat.prepare(context, one, model, f"{request_id}_{number}"))
        return BatchedChats(request_id, chats)

    async def answer(self) -> dict[str, Any]:
        """Run the chats, and return the body of the response. If one fails, all are aborted."""
        bodies = await gathered([chat.answer() for chat in self.chats])
        choices = [{**body["choices"][0], "index": number} for number, body in enumerate(bodies)]
        envelope = self.chats[0].envelope.around("chat.completion", choices, _sum([body["usage"] for body in bodies]))
        return envelope | {"id": self.id}


def _sum(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """The usage of all together. Numbers are added, also those in objects."""
    return {
        name: _sum([each[name] for each in usages]) if isinstance(value, dict) else sum(each[name] for each in usages)
        for name, value in usages[0].items()
    }
