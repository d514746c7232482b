"""Prepares and runs one response: whole, or as the events of its stream."""

from __future__ import annotations

import logging
import uuid
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from raycore.errors import RaycoreError
from raycore.parts.transfers.server import told
from raycore.server.chat.message import MessageRun
from raycore.server.chat.parts import MessageDelta, Totals
from raycore.server.contract.models import RequestModel
from raycore.server.contract.service import Context
from raycore.server.dialects.responses.chat_request import LOGPROBS, NAMES, chat_request, check
from raycore.server.dialects.responses.conversation import (
    Item,
    continues_last,
    messages_of,
    starts_of_turns,
    with_ids,
    without_oldest,
)
from raycore.server.dialects.responses.output import Event, OutputItems
from raycore.server.dialects.responses.protocol import (
    FunctionCallOutput,
    InputImage,
    InputMessage,
    ResponsesRequest,
)
from raycore.server.dialects.responses.response import ResponseHead
from raycore.server.dialects.responses.store import Record
from raycore.server.dialects.responses.text_logprobs import TextLogprobs
from raycore.server.http.errors import APIError, as_api_error, unsupported, with_names
from raycore.server.protocol import ChatCompletionRequest, Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResponseRun:
    """A checked request. `answer()` runs it and returns the whole response; `events()` streams the response."""

    head: ResponseHead
    items: list[dict[str, Any]]
    """What the request adds to the conversation."""
    message: MessageRun

    @staticmethod
    def chat(body: ResponsesRequest, items: Sequence[dict[str, Any]]) -> ChatCompletionRequest:
        """The chat request for a conversation. Raises APIError if the request is invalid."""
        messages = messages_of(body.instructions, items)
        return chat_request(body, messages, continues=continues_last(items))

    @staticmethod
    def prepare(
        context: Context,
        body: ResponsesRequest,
        chat: ChatCompletionRequest,
        items: list[dict[str, Any]],
        model: RequestModel,
        ids: tuple[str, str],
        is_stored: bool,
    ) -> ResponseRun:
        """Prepare the prompt.

        Args:
            chat: the request as a chat request.
            items: what the request adds to the conversation.
            ids: the response's, and the engine's of the request.

        Raises:
            APIError: the request can't be run.
        """

        def prepared(request: ChatCompletionRequest) -> MessageRun:
            return MessageRun.prepare(context, request, model, ids[1])

        try:
            message = _truncated(chat, prepared) if body.truncation == "auto" else prepared(chat)
        except Exception as error:
            raise with_names(as_api_error(error), NAMES) from error
        return ResponseRun(ResponseHead.of(body, ids[0], model.name, message.job.params, is_stored), items, message)

    async def answer(self) -> dict[str, Any]:
        """Run the request, and return the response. Cancelling the call aborts the request.

        Raises:
            APIError: the request failed.
        """
        output, last = self._output(), None
        try:
            async with aclosing(self._deltas()) as stream:
                async for last in stream:
                    output.read(last)
        except Exception as error:
            raise with_names(as_api_error(error), NAMES) from error
        assert last is not None
        _, response = self._finished(output, last)
        if response["error"] is not None:
            raise APIError(500, response["error"]["message"], code="request_aborted", kind="server_error")
        return response

    async def events(self) -> AsyncGenerator[Event, None]:
        """Run the request, and yield the events of its stream, without their numbers.

        The last event has the response as it is at the end, whether or not it has failed. Closing the iterator aborts
        the request.
        """
        head, output = self.head, self._output()
        begun = "queued" if head.body.background else "in_progress"
        yield {"type": "response.created", "response": head.response(begun)}
        if head.body.background:
            yield {"type": "response.queued", "response": head.response(begun)}
        last: MessageDelta | None = None
        try:
            async with aclosing(self._deltas()) as stream:
                if not head.body.background:
                    yield {"type": "response.in_progress", "response": head.response("in_progress")}
                async for delta in stream:
                    if last is None and head.body.background:
                        yield {"type": "response.in_progress", "response": head.response("in_progress")}
                    last = delta
                    for event in output.read(delta):
                        yield event
            assert last is not None
            events, response = self._finished(output, last)
        except Exception as error:  # the status has been sent, so that any error is an event
            told = with_names(as_api_error(error), NAMES)
            log = logger.exception if told.status == 500 and not isinstance(error, APIError) else logger.warning
            log("response %s failed: %s", head.id, error)
            events = [{"type": "error", "code": told.code, "message": told.message, "param": told.param}]
            code = "server_error" if told.status >= 500 else "invalid_prompt"
            failure = {"code": code, "message": told.message}
            response = head.response("failed", output.done, self._totals(last), failure)
        for event in events:
            yield event
        yield {"type": f"response.{response['status']}", "response": response}

    def record(self, response: dict[str, Any]) -> Record:
        """What to store when the response is as given."""
        return Record(response, self.items)

    async def _deltas(self) -> AsyncGenerator[MessageDelta, None]:
        body = self.head.body
        if not body.stream and not body.background:
            for delta in await self.message.whole():
                yield delta
            return
        reader = self.message.reader()
        async with aclosing(self.message.stream()) as outputs:
            async for output in outputs:
                for delta in reader.read(output):
                    yield delta

    def _output(self) -> OutputItems:
        body = self.head.body
        asked = LOGPROBS in (body.include or ())
        num_top = None if body.top_logprobs == -1 else body.top_logprobs or 0
        logprobs = TextLogprobs(self.message, num_top) if asked else None
        return OutputItems(logprobs, includes_reasoning=body.include_reasoning)

    def _finished(self, output: OutputItems, last: MessageDelta) -> tuple[list[Event], dict[str, Any]]:
        """The last events of the output, and the response."""
        reason = last.completion.finish_reason
        error = None
        status = "incomplete" if reason == "length" else "completed"
        if reason == "abort":
            status, error = "failed", {"code": "server_error", "message": "the request was aborted"}
        events = output.finish("completed" if status == "completed" else "incomplete")
        return events, self.head.response(status, output.done, self._totals(last), error) | told(last.output)

    def _totals(self, last: MessageDelta | None) -> Totals | None:
        return None if last is None else self.message.counter().totals(last.output)


def given_items(body: ResponsesRequest) -> list[Item]:
    """The items of a request's input, each with a type and an id."""
    if body.input is None:
        return []
    if isinstance(body.input, str):
        return with_ids([{"role": "user", "content": body.input}])
    return with_ids([item.model_dump(exclude_unset=True) for item in body.input])


def gives_images(body: ResponsesRequest) -> bool:
    """Whether a request's own input has images, so that preparing it may take seconds."""
    contents = [
        item.content if isinstance(item, InputMessage) else item.output
        for item in (body.input if isinstance(body.input, list) else ())
        if isinstance(item, InputMessage | FunctionCallOutput)
    ]
    return any(isinstance(part, InputImage) for content in contents if isinstance(content, list) for part in content)


def prepare_response(context: Context, body: ResponsesRequest) -> ResponseRun:
    """Check and prepare a request without stored responses: it isn't stored, and continues none.

    Raises:
        APIError: the request can't be run.
    """
    check(body, can_store=False)
    items = given_items(body)
    is_referring = any(item["type"] == "item_reference" for item in items)
    if is_referring or body.previous_response_id is not None:
        param = "input" if is_referring else "previous_response_id"
        raise unsupported(param, "no responses are stored here; send all items as input")
    name = body.request_id or uuid.uuid4().hex
    ids = f"resp_{name.removeprefix('resp_')}", f"resp-{name}"
    chat = ResponseRun.chat(body, items)
    return ResponseRun.prepare(context, body, chat, items, context.models.find(body.model), ids, is_stored=False)


def _truncated(chat: ChatCompletionRequest, prepare: Callable[[ChatCompletionRequest], MessageRun]) -> MessageRun:
    """Prepare the request, if necessary without its oldest messages: as many turns as fit are kept.

    Raises an error if even the last turn doesn't fit, or for another reason.
    """
    dumped = [each.model_dump(exclude_unset=True) for each in chat.messages]
    starts = [0, *(start for start in starts_of_turns(dumped) if start)]
    found: dict[int, MessageRun] = {}

    def fits(start: int) -> bool:
        kept = [Message.model_validate(each) for each in without_oldest(dumped, start)]
        request = chat.model_copy(update={"messages": kept})
        try:
            found[start] = prepare(request)
        except (APIError, RaycoreError) as error:
            if as_api_error(error).code != "context_length_exceeded" or start == starts[-1]:
                raise
            return False
        return True

    first = 0 if fits(0) else bisect_left(starts, True, key=fits)
    return found[starts[first]]
