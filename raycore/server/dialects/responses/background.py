"""Runs responses whose clients don't wait for them, and streams the events of such responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from raycore.server.contract.service import RequestsInProgress
from raycore.server.dialects.responses.output import Event
from raycore.server.dialects.responses.run import ResponseRun
from raycore.server.dialects.responses.store import ResponseStore
from raycore.server.http.errors import NotFound, as_api_error
from raycore.server.http.json_text import to_json

logger = logging.getLogger(__name__)

TELL_S = 0.5
"""How often a response in the background tells the store of its progress, in seconds. If another process cancels it, it
ends that soon."""


async def numbered(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Add the events' numbers, from 0 on."""
    number = 0
    async with aclosing(events):
        async for event in events:
            yield {"type": event["type"], "sequence_number": number, **event}
            number += 1


class _Live:
    """A response that this process runs in the background."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.has_ended = False
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Wake up all that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Wait for more events, or for the end."""
        await self._changed.wait()


class BackgroundRuns:
    """The responses that this process runs in the background. They count as requests in progress."""

    def __init__(self, store: ResponseStore, in_progress: RequestsInProgress) -> None:
        self._store = store
        self._in_progress = in_progress
        self._live: dict[str, _Live] = {}

    async def start(self, run: ResponseRun) -> dict[str, Any]:
        """Start a response. Returns it as it is now."""
        response = run.head.response("queued")
        await self._store.add_response(to_json(run.record(response)), bool(run.head.body.stream))
        live = self._live[run.head.id] = _Live()
        self._in_progress.count += 1
        live.task = asyncio.ensure_future(self._run(run, live))
        return response

    def stop(self, response_id: str) -> None:
        """Stop a response if this process runs it. In any other process, the store's answers stop it."""
        live = self._live.get(response_id)
        if live is not None and live.task is not None:
            live.task.cancel()

    async def follow(self, response_id: str, start: int) -> AsyncGenerator[Event, None]:
        """The events of a response from number `start` on, as they come.

        Raises:
            NotFound: the response isn't stored, or has no stored events.
        """
        live = self._live.get(response_id)
        if live is None:
            async for event in self._follow_stored(response_id, start):
                yield event
            return
        while True:
            for event in live.events[start:]:
                yield event
                start += 1
            if live.has_ended and start >= len(live.events):
                return
            if start >= len(live.events):
                await live.wait()

    async def _follow_stored(self, response_id: str, start: int) -> AsyncGenerator[Event, None]:
        events, may_follow = await self._store.response_events(response_id, start)
        while True:
            for event in events:
                yield msgspec.json.decode(event)
            start += len(events)
            if not may_follow:
                return
            await asyncio.sleep(TELL_S)
            try:
                events, may_follow = await self._store.response_events(response_id, start)
            except NotFound as error:
                told = as_api_error(error)
                fields = {"code": told.code, "message": told.message, "param": told.param}
                yield {"type": "error", "sequence_number": start, **fields}
                return

    async def _run(self, run: ResponseRun, live: _Live) -> None:
        working = asyncio.ensure_future(_collect(run, live))
        try:
            await self._tell_store(run, live, working)
        except Exception:
            logger.exception("the store didn't take response %s, which ends", run.head.id)
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
            live.has_ended = True
            live.tell()
            if self._live[run.head.id] is live:  # not another one with this id, since this one was cancelled
                del self._live[run.head.id]
            self._in_progress.count -= 1

    async def _tell_store(self, run: ResponseRun, live: _Live, working: asyncio.Future[None]) -> None:
        """Tell the store of the progress until the response has ended or was cancelled."""
        num_told, is_last = 0, False
        while not is_last:
            await asyncio.wait([working], timeout=TELL_S)
            is_last = working.done()
            events = live.events[num_told:]
            num_told += len(events)
            response = next((each["response"] for each in reversed(events) if "response" in each), None)
            record = None if response is None else to_json(run.record(response))
            if not await self._store.advance_response(run.head.id, [to_json(each) for each in events], record):
                return


async def _collect(run: ResponseRun, live: _Live) -> None:
    async with aclosing(numbered(run.events())) as events:
        async for event in events:
            live.events.append(event)
            live.tell()
