"""The endpoints below `/v1/responses`."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query

from raycore.errors import RaycoreError
from raycore.parts.images.server import has_images
from raycore.server.contract.handlers import answers
from raycore.server.contract.service import Context, Service
from raycore.server.dialects.responses.background import BackgroundRuns, numbered
from raycore.server.dialects.responses.chat_request import check
from raycore.server.dialects.responses.conversation import Item
from raycore.server.dialects.responses.output import Event
from raycore.server.dialects.responses.protocol import ResponsesRequest
from raycore.server.dialects.responses.response_models import DeletedResponse, ResponseAnswer, ResponseItems
from raycore.server.dialects.responses.run import ResponseRun, given_items, gives_images, prepare_response
from raycore.server.dialects.responses.store import Record
from raycore.server.dialects.tokens.rendering import rendered
from raycore.server.dialects.tokens.response_models import RenderedRequest
from raycore.server.http.bodies import handle_body
from raycore.server.http.errors import APIError, NotFound
from raycore.server.http.json_text import to_json
from raycore.server.http.streaming import unless_client_leaves

logger = logging.getLogger(__name__)

_STORED_ERRORS = (400, 404, 500)


class Responses:
    """Makes responses, and keeps those that requests want to be stored."""

    def __init__(self, service: Service) -> None:
        assert service.response_store is not None, "build_app() gives models that generate a store"
        self._store = service.response_store
        self.background = BackgroundRuns(self._store, service.in_progress)

    async def prepare(self, context: Context, body: ResponsesRequest) -> ResponseRun:
        """Check a request and prepare its prompt.

        Raises:
            APIError: the request can't be run.
            ClientLeft: its client closed the connection.
        """
        request, options = context.http, context.options
        can_store = options.max_stored_responses > 0
        check(body, can_store=can_store)
        is_stored = can_store and body.store is not False
        num_bytes = len(await request.body())
        most = options.max_stored_response_bytes
        if is_stored and num_bytes > most:
            raise APIError(
                400, f"store: the request has {num_bytes} bytes, and at most {most} are stored", param="store"
            )
        model = context.models.find(body.model)
        given = body.request_id
        response_id = f"resp_{(given or uuid.uuid4().hex).removeprefix('resp_')}"
        before = await self._history(body.previous_response_id, response_id)
        items = await self._resolved(before, given_items(body))
        if not before and not items:
            raise APIError(400, "input is empty: there is nothing to answer", param="input")
        chat = ResponseRun.chat(body, [*before, *items])
        return await handle_body(
            request,
            ResponseRun.prepare,
            context,
            body,
            chat,
            items,
            model,
            (response_id, context.new_id("resp", body)),
            is_stored,
            executor=context.engine.images.executor if has_images(chat.messages) else None,
            more_bytes=sum(len(str(item)) for item in before),
        )

    async def answer(self, run: ResponseRun) -> dict[str, Any]:
        """Run a response and, if it is to be stored, store it."""
        response = await run.answer()
        await self._keep(run, response)
        return response

    async def events(self, run: ResponseRun) -> AsyncGenerator[Event, None]:
        """Run a response, and yield its events. If it is to be stored, it is when the last event comes."""
        async for event in numbered(run.events()):
            if "response" in event and event["response"]["status"] != "in_progress":
                await self._keep(run, event["response"])
            yield event

    async def load(self, response_id: str, *, with_previous: bool = False) -> list[Record]:
        """A stored response, after those that it continues if `with_previous`. Raises NotFound if it isn't stored."""
        found = await self._store.load_responses(response_id, with_previous)
        return [msgspec.json.decode(each, type=Record) for each in found]

    async def cancel(self, response_id: str) -> dict[str, Any]:
        """Cancel a response in the background. Returns it. One that has ended stays as it is."""
        (record,) = await self.load(response_id)
        if not record.response["background"]:
            message = f"response {response_id!r} wasn't created with background=true, so it can't be cancelled"
            raise APIError(400, message)
        cancelled = msgspec.json.decode(await self._store.cancel_response(response_id), type=Record)
        self.background.stop(response_id)
        return cancelled.response

    async def delete(self, response_id: str) -> None:
        """Delete a stored response. One that runs in the background is cancelled."""
        await self._store.delete_response(response_id)
        self.background.stop(response_id)

    async def input_items(self, response_id: str) -> list[Item]:
        """The items from which a response was made, the oldest first."""
        *before, own = await self.load(response_id, with_previous=True)
        return [*(item for record in before for item in record.items()), *own.input]

    async def _keep(self, run: ResponseRun, response: dict[str, Any]) -> None:
        if not run.head.is_stored:
            return
        try:
            await self._store.add_response(to_json(run.record(response)), keeps_events=False)
        except RaycoreError:  # the client gets its response nevertheless
            logger.exception("response %s couldn't be stored", run.head.id)

    async def _history(self, previous: str | None, response_id: str) -> list[Item]:
        """The conversation up to and including the response that a request continues. Its own will be `response_id`."""
        if previous is None:
            return []
        try:
            records = await self.load(previous, with_previous=True)
        except NotFound as error:
            message = f"previous_response_id: {error}"
            raise APIError(400, message, param="previous_response_id", code="previous_response_not_found") from error
        if records[-1].is_running:
            message = f"previous_response_id: response {previous!r} hasn't ended yet"
            raise APIError(400, message, param="previous_response_id")
        if any(record.response["id"] == response_id for record in records):
            message = f"request_id: response {response_id!r} is part of the conversation that the request continues"
            raise APIError(400, message, param="request_id")
        return [item for record in records for item in record.items()]

    async def _resolved(self, before: list[Item], items: list[Item]) -> list[Item]:
        """The items of a request, with the items themselves in place of references to them."""
        wanted = [item["id"] for item in items if item["type"] == "item_reference"]
        try:
            found = iter(await self._store.find_items(wanted) if wanted else [])
        except NotFound as error:
            raise APIError(404, f"input: {error}", param="input") from error
        resolved = [msgspec.json.decode(next(found)) if item["type"] == "item_reference" else item for item in items]
        known = {item["id"] for item in before}
        for item in resolved:
            if item["id"] in known:
                raise APIError(400, f"input: item {item['id']!r} is already part of the conversation", param="input")
            known.add(item["id"])
        return resolved


@answers(ResponseAnswer, errors=(*_STORED_ERRORS, 409), streams=True, takes_rank=True, in_batches=prepare_response)
async def create_response(context: Context, body: ResponsesRequest) -> Any:
    """Generate the next items of a conversation: reasoning, a message, calls of functions."""
    service = context.service.own(Responses)
    run = await service.prepare(context, body)
    if body.background:
        response = await service.background.start(run)
        if body.stream:
            return context.stream(service.background.follow(run.head.id, 0), has_names=True)
        return response
    if body.stream:
        return context.stream(service.events(run), has_names=True)
    return await unless_client_leaves(context.http, service.answer(run))


@answers(RenderedRequest, has_images=gives_images)
def render_response(context: Context, body: ResponsesRequest) -> dict[str, Any]:
    """What a request for a response becomes: the body for /inference/v1/generate. Its input is the whole conversation:
    stored responses aren't read."""
    return rendered(prepare_response(context, body).message.job, body, "input")


@answers(ResponseAnswer, errors=_STORED_ERRORS, streams=True)
async def retrieve_response(
    context: Context, response_id: str, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0)] = None
) -> Any:
    """Return a stored response, or the events of one that was created with background and stream.

    `starting_after`: the number of the last event that the client has already got.
    """
    service = context.service.own(Responses)
    if stream:
        start = 0 if starting_after is None else starting_after + 1
        return context.stream(service.background.follow(response_id, start), has_names=True)
    (record,) = await service.load(response_id)
    return record.response


@answers(DeletedResponse, errors=_STORED_ERRORS)
async def delete_response(context: Context, response_id: str) -> dict[str, Any]:
    """Delete a stored response."""
    await context.service.own(Responses).delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@answers(ResponseAnswer, errors=_STORED_ERRORS)
async def cancel_response(context: Context, response_id: str) -> dict[str, Any]:
    """Cancel a response that was created with background."""
    return await context.service.own(Responses).cancel(response_id)


@answers(ResponseItems, errors=_STORED_ERRORS)
async def list_input_items(
    context: Context,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """List the items from which a stored response was made, those of earlier responses included.

    `after`: the id of the item after which the list begins.
    """
    items = await context.service.own(Responses).input_items(response_id)
    return _page(items if order == "asc" else items[::-1], limit, after)


def _page(items: list[Item], limit: int, after: str | None) -> dict[str, Any]:
    start = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise APIError(400, f"after={after!r} isn't one of the items", param="after")
        start = ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }
