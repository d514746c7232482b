"""The LoRA adapters that a server offers as models. They are loaded when it starts, and by requests.

`OfferedAdapters` is in the process that owns the engine, and is the only place where the offered adapters change.
Whoever subscribes gets all of them after each change: an application in this process, or the API servers' processes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from raycore.checkpoint.gguf.header import is_gguf
from raycore.checkpoint.hub_cache import find_directory
from raycore.config import resolve
from raycore.control.calls import AsyncCalls
from raycore.errors import InvalidCheckpoint, InvalidConfig, InvalidRequest
from raycore.json_fields import shortened
from raycore.lora.request import LoRARequest
from raycore.node.threads import on_own_thread
from raycore.parts.adapters.checkpoint.spec import ADAPTER_FILE, CONFIG_FILE
from raycore.parts.adapters.client import AdapterChecks
from raycore.server.http.errors import NotAllowed, NotFound
from raycore.server.options import LoraModule, ServerOptions
from raycore.system import Future, futures, os, threading, time

logger = logging.getLogger(__name__)

_STUCK_S = 40.0
"""A subscriber that takes so many seconds to reply is stuck. Whoever watches it replaces it sooner."""

ids = itertools.count(1)
"""Numbers of adapters. Each name gets another one, so that an engine never takes an adapter for an older one."""


class OfferedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that requests may name as their model."""

    request: LoRARequest
    parent: str
    """The served model name that the list of models shows as the adapter's parent."""
    created: int
    """When the adapter was loaded, as Unix time in seconds."""


Subscriber = Callable[[Sequence[OfferedAdapter]], Future[None] | None]
"""Gets all offered adapters, in the order in which they were loaded. Doesn't block. The future, if there is one, is
done when requests that arrive from then on find exactly these adapters."""


class LoadsAdapters(Protocol):
    """What requests may do with the offered adapters: see `OfferedAdapters`."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> None: ...
    async def unload_lora_adapter(self, lora_name: str, lora_int_id: int | None = None) -> None: ...


ADAPTER_CALLS = frozenset(name for name in vars(LoadsAdapters) if not name.startswith("_"))
"""The names of the methods of `LoadsAdapters`."""


class AdapterSource(LoadsAdapters, Protocol):
    """Where an application gets the offered adapters from."""

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with the adapters, and again after each change."""
        ...


def check_adapters(engine_options: Mapping[str, Any], options: ServerOptions) -> None:
    """Check the adapters that `options.lora_modules` lists, before an engine starts, which can take minutes.

    `engine_options`: keyword arguments of `LLM`.

    Raises:
        InvalidConfig: one of them can't be used, or an engine option is invalid. The message names it.
    """
    if options.lora_modules:
        config = resolve(**engine_options)
        checks = AdapterChecks(config.model.spec, config.lora)
        for module in options.lora_modules:
            with _naming(module):
                checks.check_new(LoRARequest(module.name, 1, _path_of(module)))


async def load_adapters(engine: AsyncCalls, options: ServerOptions) -> OfferedAdapters:
    """Load the adapters that `options.lora_modules` lists, for `build_app`.

    Raises:
        InvalidConfig: one of them can't be used. The message names it.
    """
    adapters = OfferedAdapters(engine, options)
    for module in options.lora_modules:
        with _naming(module):
            await adapters.load(module.name, _path_of(module), module.base_model_name)
    return adapters


@contextmanager
def _naming(module: LoraModule) -> Generator[None, None, None]:
    try:
        yield
    except (InvalidRequest, InvalidCheckpoint) as error:
        raise InvalidConfig(f"lora_modules: {shortened(module.name)}: {error}") from error


def _path_of(module: LoraModule) -> str:
    return os.path.abspath(find_directory(module.path, CONFIG_FILE, of="path"))


class OfferedAdapters:
    """The offered adapters of an engine in this process. Thread-safe: several event loops may use it."""

    def __init__(self, engine: AsyncCalls, options: ServerOptions) -> None:
        self._engine = engine
        self._served_names = options.served_model_names
        self._allowed = options.allowed_lora_directories
        self._lock = threading.Lock()
        self._offered: dict[str, OfferedAdapter] = {}
        self._changing: set[str] = set()
        """Names of adapters that are being loaded or unloaded."""
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with the adapters, and again after each change, until `unsubscribe(subscriber)`."""
        with self._lock:
            self._subscribers.append(subscriber)
            subscriber(tuple(self._offered.values()))

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` no more. Idempotent."""
        with self._lock:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> None:
        """Load an adapter for a request. Returns when all subscribers offer it.

        Args:
            lora_path: the absolute path of a directory, or of a GGUF file, below an allowed directory.
            load_inplace: replace the adapter with this name, if there is one. Requests in progress finish with the old
                one. If the new one can't be used, the old one stays.

        Raises:
            NotAllowed: the directory, or a file in it, isn't below an allowed directory. Says nothing of what exists.
            InvalidRequest: the name is taken, or the adapter can't be used.
        """
        with self._changing_name(lora_name):
            if lora_name in self._offered and not load_inplace:
                raise InvalidRequest(
                    f"lora_name={shortened(lora_name)} is already loaded: give another name, or load_inplace=true"
                )
            path = await on_own_thread(allowed_directory, lora_path, self._allowed)
            await self._load(lora_name, path, None)

    async def load(self, name: str, path: str, parent: str | None) -> None:
        """Load an adapter from any directory. Raises InvalidRequest if it can't be used."""
        with self._changing_name(name):
            await self._load(name, path, parent)

    async def unload_lora_adapter(self, lora_name: str, lora_int_id: int | None = None) -> None:
        """Offer an adapter no more. Returns when no subscriber offers it. Requests that use it finish.

        Args:
            lora_int_id: the adapter's number, if the caller wants it to be checked.

        Raises:
            NotFound: there is no adapter with this name.
            InvalidRequest: it has another number.
        """
        with self._changing_name(lora_name):
            with self._lock:
                adapter = self._offered.get(lora_name)
                if adapter is None:
                    raise NotFound(f"lora_name={shortened(lora_name)} isn't loaded")
                number = adapter.request.lora_int_id
                if lora_int_id not in (None, number):
                    raise InvalidRequest(f"lora_int_id={lora_int_id}: {shortened(lora_name)} has number {number}")
                del self._offered[lora_name]
                told = self._tell()
            await _until_known(told)
            await self._engine.remove_lora(number)
        logger.info("unloaded the LoRA adapter %r", lora_name)

    @contextmanager
    def _changing_name(self, name: str) -> Generator[None, None, None]:
        """Have only one call at a time change what has this name. Raises InvalidRequest if there is another."""
        with self._lock:
            if name in self._changing:
                raise InvalidRequest(f"lora_name={shortened(name)} is being loaded or unloaded by another request")
            self._changing.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._changing.remove(name)

    async def _load(self, name: str, path: str, parent: str | None) -> None:
        if name in self._served_names:
            raise InvalidRequest(f"lora_name={shortened(name)} is a name of the served model: give another name")
        replaced = self._offered.get(name)
        number = await self._new_number() if replaced is None else replaced.request.lora_int_id
        await self._engine.add_lora(LoRARequest(name, number, path, load_inplace=replaced is not None))
        if parent is None:
            parent = self._served_names[0] if replaced is None else replaced.parent
        with self._lock:
            self._offered[name] = OfferedAdapter(LoRARequest(name, number, path), parent, int(time.time()))
            told = self._tell()
        await _until_known(told)
        logger.info("loaded the LoRA adapter %r from %s", name, path)

    async def _new_number(self) -> int:
        # the program may have added adapters of its own
        taken = await self._engine.list_loras()
        return next(number for number in ids if number not in taken)

    def _tell(self) -> list[Future[None]]:
        """Tell all subscribers of a change. With the lock held, so that all get the changes in the same order."""
        adapters = tuple(self._offered.values())
        return [told for subscriber in self._subscribers if (told := subscriber(adapters)) is not None]


async def _until_known(told: list[Future[None]]) -> None:
    """Wait until the subscribers know of a change. One whose process has ended doesn't count."""
    if told:
        await on_own_thread(futures.wait, told, _STUCK_S)


def allowed_directory(path: str, allowed: Sequence[str]) -> str:
    """The path of an adapter that a request may load, with links to directories resolved. Waits for the file system.

    Raises:
        NotAllowed: the path, or a file in the directory that would be read, isn't below an allowed one. Whether it
            exists makes no difference.
        InvalidRequest: the path isn't an absolute one.
    """
    if not os.path.isabs(path) or "\0" in path:
        raise InvalidRequest(f"lora_path={shortened(path)} isn't an absolute path")
    if not allowed:
        raise NotAllowed(
            f"lora_path={shortened(path)}: this server allows no directory. Start it with --allowed-lora-directories"
        )
    roots = [os.path.realpath(root) for root in allowed]
    real = os.path.realpath(path)
    # caches of models have files under other names, and the name says that it is a GGUF file
    named = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    found = named if is_gguf(Path(path)) else real
    if not (_is_below(real, roots) and _is_below(found, roots)):
        raise NotAllowed(
            f"lora_path={shortened(path)} isn't below a directory that this server allows (--allowed-lora-directories)"
        )
    for name in (CONFIG_FILE, ADAPTER_FILE):
        if not _is_below(os.path.realpath(os.path.join(found, name)), roots):
            raise NotAllowed(
                f"lora_path={shortened(path)}: {name} is a link that leads out of the directories that this server "
                "allows (--allowed-lora-directories)"
            )
    return found


def _is_below(path: str, roots: Sequence[str]) -> bool:
    return any(os.path.commonpath([path, root]) == root for root in roots)
