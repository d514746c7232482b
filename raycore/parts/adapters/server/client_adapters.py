"""The offered adapters, in an API server's process. The driver's `OfferedAdapters` sends them, and changes them."""

from __future__ import annotations

from collections.abc import Sequence

from raycore.parts.adapters.server.adapters import OfferedAdapter, Subscriber
from raycore.server.multi_process.driver_calls import DriverCalls


class ClientAdapters:
    """An `AdapterSource` for adapters that another process, the driver, loads."""

    def __init__(self, driver: DriverCalls) -> None:
        self._driver = driver
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` after each change. The driver sends the first adapters before the server serves."""
        self._subscribers.append(subscriber)

    def set_adapters(self, adapters: Sequence[OfferedAdapter]) -> None:
        """Pass the adapters that the driver has sent to the subscribers."""
        for subscriber in self._subscribers:
            subscriber(adapters)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> None:
        await self._driver.call(
            "load_lora_adapter", lora_name=lora_name, lora_path=lora_path, load_inplace=load_inplace
        )

    async def unload_lora_adapter(self, lora_name: str, lora_int_id: int | None = None) -> None:
        await self._driver.call("unload_lora_adapter", lora_name=lora_name, lora_int_id=lora_int_id)
