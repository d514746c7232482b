"""The stored responses, in the process of an API server. The driver keeps them, so that all processes share them."""

from __future__ import annotations

from raycore.server.multi_process.driver_calls import DriverCalls


class ClientStore:
    """A `ResponseStore` that another process, the driver, keeps."""

    def __init__(self, driver: DriverCalls) -> None:
        self._driver = driver

    async def add_response(self, record: bytes, keeps_events: bool) -> None:
        await self._driver.call("add_response", record=record, keeps_events=keeps_events)

    async def advance_response(self, response_id: str, events: list[bytes], record: bytes | None) -> bool:
        return await self._driver.call("advance_response", response_id=response_id, events=events, record=record)

    async def load_responses(self, response_id: str, with_previous: bool) -> list[bytes]:
        return await self._driver.call("load_responses", response_id=response_id, with_previous=with_previous)

    async def response_events(self, response_id: str, start: int) -> tuple[list[bytes], bool]:
        return await self._driver.call("response_events", response_id=response_id, start=start)

    async def find_items(self, item_ids: list[str]) -> list[bytes]:
        return await self._driver.call("find_items", item_ids=item_ids)

    async def cancel_response(self, response_id: str) -> bytes:
        return await self._driver.call("cancel_response", response_id=response_id)

    async def delete_response(self, response_id: str) -> None:
        await self._driver.call("delete_response", response_id=response_id)
