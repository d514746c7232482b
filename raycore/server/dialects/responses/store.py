"""Keeps responses in memory, so that clients can have them again, continue their conversations, and cancel them.

Several API servers share the store of the driver: a process that runs a response in the background tells the store of
its progress, and learns from the answer whether the response has been cancelled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from raycore.errors import InvalidRequest
from raycore.server.http.errors import NotFound

logger = logging.getLogger(__name__)

SILENT_S = 60.0
"""A response in the background whose process hasn't told of it for so many seconds has failed."""


class Record(msgspec.Struct):
    """A response as it is stored."""

    response: dict[str, Any]
    """The response object."""
    input: list[dict[str, Any]]
    """The items that the request added to the conversation."""

    def items(self) -> list[dict[str, Any]]:
        """What the response adds to the conversation."""
        return [*self.input, *self.response["output"]]

    @property
    def is_running(self) -> bool:
        return self.response["status"] in ("queued", "in_progress")


class ResponseStore(Protocol):
    """The calls on a store. Each may raise NotFound, if a response isn't stored (any more)."""

    async def add_response(self, record: bytes, keeps_events: bool) -> None:
        """Store a response, as an encoded `Record`. Raises InvalidRequest if another one with its id runs."""
        ...

    async def advance_response(self, response_id: str, events: list[bytes], record: bytes | None) -> bool:
        """Tell of the progress of a response that runs in the background.

        Args:
            events: its next events, as JSON.
            record: the response, if it has ended.

        Returns: whether to go on. False: the response was cancelled or deleted.
        """
        ...

    async def load_responses(self, response_id: str, with_previous: bool) -> list[bytes]:
        """The encoded `Record` of a response, after those of the responses whose conversation it continues."""
        ...

    async def response_events(self, response_id: str, start: int) -> tuple[list[bytes], bool]:
        """The events of a response from number `start` on, and whether more may follow.

        Raises:
            NotFound: the response has no stored events.
        """
        ...

    async def find_items(self, item_ids: list[str]) -> list[bytes]:
        """The items with these ids, as JSON, in this order."""
        ...

    async def cancel_response(self, response_id: str) -> bytes:
        """Cancel a response, if it runs in the background. Returns its `Record`."""
        ...

    async def delete_response(self, response_id: str) -> None:
        """Delete a response. One that runs in the background is cancelled."""
        ...


STORE_CALLS = frozenset(name for name in vars(ResponseStore) if not name.startswith("_"))


class _Entry:
    def __init__(self, record: bytes, decoded: Record, keeps_events: bool, now_s: float) -> None:
        self.record = record
        self.previous = decoded.response["previous_response_id"]
        self.is_running = decoded.is_running
        self.events: list[bytes] | None = [] if keeps_events else None
        self.item_ids = _item_ids(decoded)
        self.told_s = now_s

    @property
    def num_bytes(self) -> int:
        return len(self.record) + sum(map(len, self.events or ()))


class MemoryStore:
    """A `ResponseStore` in this process. Thread-safe. If it is full, the responses used longest ago are dropped."""

    def __init__(self, max_responses: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_bytes`: of all responses together."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """The one used longest ago first."""
        self._holders: dict[str, str] = {}
        """The response that has an item, by the item's id."""
        self._num_bytes = 0

    async def add_response(self, record: bytes, keeps_events: bool) -> None:
        decoded = msgspec.json.decode(record, type=Record)
        with self._lock:
            response_id = decoded.response["id"]
            if response_id in self._entries and self._find(response_id).is_running:
                raise InvalidRequest(f"request_id: response {response_id!r} hasn't ended yet: give another id")
            self._remove(response_id)
            self._insert(response_id, _Entry(record, decoded, keeps_events, self._clock()))
            self._make_room(response_id)

    async def advance_response(self, response_id: str, events: list[bytes], record: bytes | None) -> bool:
        with self._lock:
            entry = self._entries.get(response_id)
            if entry is None or not entry.is_running:
                return False
            self._remove(response_id)
            entry.told_s = self._clock()
            if entry.events is not None:
                entry.events += events
            if record is not None:
                _replace(entry, record)
            self._insert(response_id, entry)
            self._make_room(response_id)
            return True

    async def load_responses(self, response_id: str, with_previous: bool) -> list[bytes]:
        with self._lock:
            chain = [response_id]
            entry = self._find(response_id)
            while with_previous and entry.previous is not None:
                # a later response may have the id of one that was dropped
                if entry.previous not in self._entries or entry.previous in chain:
                    raise NotFound(f"response {entry.previous!r} is no longer stored, and {chain[-1]!r} continues it")
                chain.append(entry.previous)
                entry = self._entries[entry.previous]
            for each in reversed(chain):
                self._entries.move_to_end(each)
            return [self._entries[each].record for each in reversed(chain)]

    async def response_events(self, response_id: str, start: int) -> tuple[list[bytes], bool]:
        with self._lock:
            entry = self._find(response_id)
            if entry.events is None:
                raise NotFound(f"response {response_id!r} has no events: it wasn't created with background and stream")
            return entry.events[start:], entry.is_running

    async def find_items(self, item_ids: list[str]) -> list[bytes]:
        with self._lock:
            for each in item_ids:
                if each not in self._holders:
                    raise NotFound(f"item {each!r} isn't stored")
            holders = {self._holders[each] for each in item_ids}
            records = [msgspec.json.decode(self._entries[each].record, type=Record) for each in holders]
        found = {item["id"]: item for record in records for item in record.items()}
        return [msgspec.json.encode(found[each]) for each in item_ids]

    async def cancel_response(self, response_id: str) -> bytes:
        with self._lock:
            entry = self._find(response_id)
            if entry.is_running:
                self._end(response_id, entry, "cancelled", None)
            return entry.record

    async def delete_response(self, response_id: str) -> None:
        with self._lock:
            self._find(response_id)
            self._remove(response_id)

    def _find(self, response_id: str) -> _Entry:
        entry = self._entries.get(response_id)
        if entry is None:
            raise NotFound(
                f"response_id {response_id!r} isn't stored: it doesn't exist, was deleted, or made room for others"
            )
        if entry.is_running and self._clock() > entry.told_s + SILENT_S:
            self._end(response_id, entry, "failed", "the process that ran the response has ended")
        return entry

    def _end(self, response_id: str, entry: _Entry, status: str, error: str | None) -> None:
        record = msgspec.json.decode(entry.record, type=Record)
        record.response["status"] = status
        record.response["error"] = None if error is None else {"code": "server_error", "message": error}
        self._remove(response_id)
        _replace(entry, msgspec.json.encode(record))
        self._insert(response_id, entry)

    def _insert(self, response_id: str, entry: _Entry) -> None:
        self._entries[response_id] = entry
        self._num_bytes += entry.num_bytes
        self._holders.update(dict.fromkeys(entry.item_ids, response_id))

    def _remove(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return
        self._num_bytes -= entry.num_bytes
        for item_id in entry.item_ids:
            if self._holders.get(item_id) == response_id:
                del self._holders[item_id]

    def _make_room(self, newest: str) -> None:
        """Drop responses until the rest fits. One that runs stays: its process still tells of it."""
        entry = self._entries[newest]
        if entry.num_bytes > self._max_bytes and not entry.is_running:
            logger.warning("response %s has %d bytes, which is too large to be stored", newest, entry.num_bytes)
            self._remove(newest)
        for response_id in [each for each, entry in self._entries.items() if not entry.is_running]:
            if len(self._entries) <= self._max_responses and self._num_bytes <= self._max_bytes:
                return
            self._remove(response_id)


def _replace(entry: _Entry, record: bytes) -> None:
    decoded = msgspec.json.decode(record, type=Record)
    entry.record, entry.is_running, entry.item_ids = record, decoded.is_running, _item_ids(decoded)


def _item_ids(record: Record) -> Sequence[str]:
    return [item["id"] for item in record.items()]
