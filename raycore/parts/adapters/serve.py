"""Adapters that a replica offers while requests name them, beside those that it was started with. No Ray here."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any, Protocol

from raycore.errors import InvalidConfig
from raycore.extras import needing
from raycore.json_fields import shortened
from raycore.lora.request import LoRARequest
from raycore.parts.adapters.checkpoint.spec import ADAPTER_FILE, CONFIG_FILE
from raycore.parts.adapters.client import AdapterChecks
from raycore.parts.adapters.server.adapters import (
    LoadsAdapters,
    OfferedAdapter,
    OfferedAdapters,
    Subscriber,
    allowed_directory,
    ids,
)
from raycore.serve.config import LoraConfig
from raycore.server.http.errors import APIError, NotAllowed


class Multiplexed(Protocol):
    """What `serve.multiplexed(...)` returns: keeps so many adapters, and drops the one used longest ago."""

    def __call__(self, load: Callable[[str], Awaitable[HeldAdapter]]) -> Callable[[str], Awaitable[HeldAdapter]]: ...


class HeldAdapter:
    """An adapter that Serve's multiplexing holds, until it calls `__del__`."""

    def __init__(self, offered: OfferedAdapter, on_drop: Callable[[HeldAdapter], None]) -> None:
        self.offered = offered
        self.num_users = 0
        """How many requests have named it that aren't answered yet."""
        self.is_dropped = False
        self._on_drop = on_drop

    def __del__(self) -> None:
        # Serve calls this in a thread, and the garbage collector once more
        if not self.is_dropped:
            self.is_dropped = True
            self._on_drop(self)


class DynamicAdapters(LoadsAdapters):
    """Loads the adapters that requests name as `MODEL_ID:ADAPTER`. An `AdapterSource`, for one event loop.

    The engine reads an adapter with its first request, and then holds as many as Serve's multiplexing does.
    """

    def __init__(
        self, own: OfferedAdapters, model_id: str, config: LoraConfig, checks: AdapterChecks, multiplexed: Multiplexed
    ) -> None:
        """
        Args:
            own: those that the replica was started with.
            checks: what the engine can use.
            multiplexed: decides which adapters are held. The most it holds is `max_num_adapters_per_replica`.
        """
        self._own = own
        self._model_id = model_id
        self._config = config
        self._checks = checks

        async def load(name: str) -> HeldAdapter:  # Serve sets an attribute of it, which a bound method can't have
            return await self._load(name)

        self._hold = multiplexed(load)
        self._loop = asyncio.get_running_loop()
        self._started: Sequence[OfferedAdapter] = ()
        self._held: dict[str, HeldAdapter] = {}
        """By name: those that are offered."""
        self._loading = asyncio.Lock()
        self._prepared: OfferedAdapter | None = None
        """The adapter that `_load` will be called for next."""
        self._subscribers: list[Subscriber] = []
        self._cache: tempfile.TemporaryDirectory[str] | None = None
        own.subscribe(self._set_started)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with the adapters, and again after each change."""
        self._subscribers.append(subscriber)
        subscriber(self._all())

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` no more. Idempotent."""
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> None:
        """See `OfferedAdapters`."""
        await self._own.load_lora_adapter(lora_name, lora_path, load_inplace)

    async def unload_lora_adapter(self, lora_name: str, lora_int_id: int | None = None) -> None:
        """See `OfferedAdapters`."""
        await self._own.unload_lora_adapter(lora_name, lora_int_id)

    @asynccontextmanager
    async def offering(self, name: str) -> AsyncGenerator[None, None]:
        """Offer an adapter while the block runs, for a request that names it.

        Raises:
            APIError: there is no such adapter, or it can't be downloaded.
            InvalidRequest: the engine can't use it.
        """
        held = await self._held_adapter(name)
        held.num_users += 1
        self._offer(held)
        try:
            yield
        finally:
            held.num_users -= 1
            self._note_drop(held)

    def close(self) -> None:
        """Remove what was downloaded. Idempotent."""
        if self._cache is not None:
            self._cache.cleanup()

    async def _held_adapter(self, name: str) -> HeldAdapter:
        held = self._held.get(name)
        if held is not None and not held.is_dropped:
            return await self._hold(name)
        # Serve drops an adapter before it calls `_load`: one that can't be used must not cost another its place
        async with self._loading:
            self._prepared = await self._prepare(name)
            return await self._hold(name)

    async def _load(self, name: str) -> HeldAdapter:
        offered, self._prepared = self._prepared, None
        if offered is None or offered.request.lora_name != name:
            offered = await self._prepare(name)
        return HeldAdapter(offered, self._on_drop)

    async def _prepare(self, name: str) -> OfferedAdapter:
        """Find and check an adapter. Raises the errors of `offering()`."""
        seconds = self._config.download_timeout_s
        limit_s = seconds if seconds is not None and seconds > 0 else None
        try:
            path = await asyncio.wait_for(asyncio.to_thread(self._path_of, name), limit_s)
        except asyncio.TimeoutError:
            late = f"model={shortened(name)}: its files didn't arrive within {limit_s:g} s"
            raise APIError(503, late, code="adapter_unavailable", kind="service_unavailable_error") from None
        request = LoRARequest(name, next(ids), path)
        await asyncio.to_thread(self._checks.check_new, request)
        return OfferedAdapter(request, self._model_id, int(time.time()))

    def _path_of(self, name: str) -> str:
        """The directory of an adapter. Downloads it if it is elsewhere."""
        root, adapter = self._config.dynamic_lora_loading_path, name.removeprefix(f"{self._model_id}:")
        missing = no_such_adapter(name, self._model_id)
        if root is None or not adapter or adapter.startswith(".") or "/" in adapter or "\0" in adapter:
            raise missing
        if "://" in root:
            return self._download(f"{root.rstrip('/')}/{adapter}", adapter, missing)
        path = os.path.join(os.path.abspath(root), adapter)
        if not os.path.isfile(os.path.join(path, CONFIG_FILE)):
            raise missing
        try:
            return allowed_directory(path, [root])
        except NotAllowed:  # a link leads elsewhere
            raise missing from None

    def _download(self, uri: str, adapter: str, missing: APIError) -> str:
        if self._cache is None:
            self._cache = tempfile.TemporaryDirectory(prefix="raycore-adapters-")
        for last in range(self._config.max_download_tries - 1, -1, -1):
            folder = tempfile.mkdtemp(prefix=f"{adapter}-", dir=self._cache.name)
            try:
                copy_folder(uri, folder)
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                if not last:
                    raise missing from error
            else:
                return folder
        raise missing

    def _on_drop(self, held: HeldAdapter) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note_drop, held)

    def _note_drop(self, held: HeldAdapter) -> None:
        """Offer an adapter no more that is neither held nor used."""
        if held.is_dropped and not held.num_users:
            if self._cache is not None:
                shutil.rmtree(held.offered.request.lora_path, ignore_errors=True)
            name = held.offered.request.lora_name
            if self._held.get(name) is held:
                del self._held[name]
                self._tell()

    def _offer(self, held: HeldAdapter) -> None:
        name = held.offered.request.lora_name
        if self._held.get(name) is not held:
            self._held[name] = held
            self._tell()

    def _set_started(self, offered: Sequence[OfferedAdapter]) -> Future[None] | None:
        self._started = offered
        self._tell()
        return None

    def _all(self) -> list[OfferedAdapter]:
        return [*self._started, *(held.offered for held in self._held.values())]

    def _tell(self) -> None:
        for subscriber in self._subscribers:
            subscriber(self._all())


def no_such_adapter(name: str, model_id: str) -> APIError:
    """The error for a request that names an adapter that a model doesn't have."""
    message = f"the model {shortened(name)} doesn't exist: {model_id!r} has no such adapter"
    return APIError(404, message, param="model", code="model_not_found")


def copy_folder(uri: str, folder: str) -> None:
    """Copy the files of an adapter to a local folder. `uri`: of a file system that pyarrow knows.

    Raises:
        OSError: they can't be read.
        InvalidConfig: pyarrow isn't installed, or doesn't know the file system.
    """
    files = _file_systems(uri)
    try:
        system, path = files.FileSystem.from_uri(uri)
    except (ValueError, NotImplementedError) as error:
        raise InvalidConfig(f"dynamic_lora_loading_path: {uri}: {error}") from error
    for name in (CONFIG_FILE, ADAPTER_FILE):
        files.copy_files(
            f"{path}/{name}",
            os.path.join(folder, name),
            source_filesystem=system,
            destination_filesystem=files.LocalFileSystem(),
        )


def adapter_names(path: str | None) -> list[str]:
    """The adapters below a folder. Empty if that can't be read.

    `path`: a directory, or a URI of a file system that pyarrow knows.
    """
    if path is None:
        return []
    try:
        if "://" not in path:
            return sorted(each.name for each in os.scandir(path) if os.path.isfile(os.path.join(each, CONFIG_FILE)))
        files = _file_systems(path)
        system, folder = files.FileSystem.from_uri(path)
        infos: Any = system.get_file_info(files.FileSelector(folder))
        return sorted(info.base_name for info in infos if info.type == files.FileType.Directory)
    except (OSError, ValueError, NotImplementedError):
        return []


def _file_systems(uri: str) -> Any:
    """pyarrow's. Raises MissingPackage if it isn't installed."""
    with needing(f"{uri} needs", "data"):
        return import_module("pyarrow.fs")
