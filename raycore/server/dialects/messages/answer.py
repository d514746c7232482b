"""Answers `POST /v1/messages`, and counts the tokens for `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from raycore.errors import InvalidInput
from raycore.outputs import RequestOutput
from raycore.parts.transfers.server import told
from raycore.server.chat.message import MessageRun, TotalsCounter
from raycore.server.chat.parts import MessageDelta
from raycore.server.chat.prompt import prompt_ids, shown_tools, template_kwargs
from raycore.server.contract.service import Context
from raycore.server.dialects.messages.blocks import BlockWriter, Event
from raycore.server.dialects.messages.protocol import CountTokensRequest, MessagesRequest
from raycore.server.dialects.messages.systems import has_one_system
from raycore.server.dialects.messages.translation import ORIGINS, chat_request
from raycore.server.http.errors import APIError, as_api_error
from raycore.server.protocol import ChatCompletionRequest

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""By finish reason of a chat."""


@dataclass(frozen=True)
class MessageAnswer:
    """A checked request for a message. `answer()` runs it and returns the whole message; `events()` streams it."""

    run: MessageRun
    id: str
    model: str
    is_shortened: bool
    """Whether the answer may have fewer tokens than the request allows, because the model's context ends there."""

    @staticmethod
    def prepare(context: Context, body: MessagesRequest) -> MessageAnswer:
        """Check a request and prepare its prompt. Raises APIError if the request can't be run."""
        model = context.models.find(body.model)
        message_id = f"msg_{context.request_id}"
        with _renamed():
            run = MessageRun.prepare(context, _chat_request(context, body), model, message_id)
        room = context.engine.max_model_len - len(run.job.prompt.token_ids)
        params = msgspec.structs.replace(run.job.params, max_tokens=min(body.max_tokens, room))
        param = ORIGINS.get(run.job.constraint_param, run.job.constraint_param)
        run = replace(run, job=run.job.with_params(params, param))
        return MessageAnswer(run, message_id, model.name, room < body.max_tokens)

    async def answer(self) -> dict[str, Any]:
        """Run the request, and return the whole message."""
        (delta,) = await self.run.whole()
        writer = BlockWriter()
        writer.write(delta.parts)
        stop = self._stop(delta, writer)
        writer.finish(is_cut_off=stop["stop_reason"] != "tool_use")
        used = _usage(self.run.counter(), delta.output)
        return self._message(writer.blocks, used, **stop) | told(delta.output)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Run the request, and yield the events of the streamed message."""
        writer, counter = BlockWriter(), self.run.counter()
        is_begun = False
        reader = self.run.reader()
        async with aclosing(self.run.stream()) as outputs:
            async for output in outputs:
                for delta in reader.read(output):
                    if not is_begun:
                        is_begun = True
                        begun = replace(output, outputs=[])
                        yield {"type": "message_start", "message": self._message([], _usage(counter, begun))}
                        yield {"type": "ping"}
                    for event in writer.write(delta.parts):
                        yield event
                    if delta.finish_reason is not None:
                        stop = self._stop(delta, writer)
                        for event in writer.finish(is_cut_off=stop["stop_reason"] != "tool_use"):
                            yield event
                        used = _usage(counter, output)
                        yield {"type": "message_delta", "delta": stop, "usage": used, **told(output)}
        yield {"type": "message_stop"}

    def _message(
        self,
        content: list[dict[str, Any]],
        used: dict[str, Any],
        stop_reason: str | None = None,
        stop_sequence: str | None = None,
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": used,
        }

    def _stop(self, delta: MessageDelta, writer: BlockWriter) -> dict[str, Any]:
        """Why the message ends. Raises APIError if the engine aborted it."""
        if delta.finish_reason not in _STOP_REASONS:
            raise APIError(
                503, "the engine aborted the request", code="request_aborted", kind="service_unavailable_error"
            )
        if isinstance(delta.stop_reason, str) and not writer.is_call_complete:
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        reason = _STOP_REASONS[delta.finish_reason]
        if reason == "max_tokens" and self.is_shortened:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}


def count_tokens(context: Context, body: CountTokensRequest) -> dict[str, Any]:
    """The answer to a request to count a prompt's tokens. The prompt may be longer than the model's context."""
    context.models.find(body.model)
    with _renamed():
        request = _chat_request(context, body)
        tools, variables = shown_tools(request, context.options), template_kwargs(request)
        ids = prompt_ids(context.engine, context.options, request.messages, tools, request, variables)
    return {"input_tokens": len(ids)}


def _chat_request(context: Context, body: CountTokensRequest) -> ChatCompletionRequest:
    later = any(turn.role == "system" for turn in body.messages)
    merges = later and has_one_system(context.engine.get_tokenizer(), context.options.chat_template)
    request = chat_request(body, has_one_system=merges)
    if context.options.reasoning_parser is None:
        request.thinking_token_budget = None  # nothing says where reasoning ends
    return request


@contextmanager
def _renamed() -> Generator[None, None, None]:
    """Make errors name the field of the Messages API that a field of the chat request comes from."""
    try:
        yield
    except (APIError, InvalidInput) as error:
        told = as_api_error(error)
        name, message = told.param, told.message
        if name in ORIGINS:
            message = f"{ORIGINS[name]}{message.removeprefix(name)}" if message.startswith(name) else message
            name = ORIGINS[name]
        if told.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # clients look for these words
        raise APIError(told.status, message, param=name, code=told.code, kind=told.kind) from error


def _usage(counter: TotalsCounter, output: RequestOutput) -> dict[str, Any]:
    totals = counter.totals(output)
    used: dict[str, Any] = {
        "input_tokens": totals.prompt - totals.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.cached,
        "output_tokens": totals.output,
    }
    if totals.reasoning is not None:
        used["output_tokens_details"] = {"thinking_tokens": totals.reasoning}
    return used | {"service_tier": "standard"}
