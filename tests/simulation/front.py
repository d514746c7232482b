"""Stands in for HTTP: requests come to a server that listens, and what it gets is what its caller gets.

The modules of `raycore.server` that speak HTTP aren't imported. All that a server's process does with the engine is
real.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from simulation.world.kernel import Process, World
from simulation.world.threads import world

if TYPE_CHECKING:
    from simulation.cluster.records import Deed, Record

_AGAIN_S = 0.02
"""Virtual seconds after which a caller whom no server takes connects again."""


class Caller(Protocol):
    """Makes calls on an engine, in the process that runs."""

    def request(self, engine: Any, record: Record) -> Coroutine[Any, Any, None]:
        """Make a request at its time, and note what comes."""
        ...

    def operation(self, engine: Any, deed: Deed) -> Coroutine[Any, Any, None]:
        """Do what an operator asks, and note how it ends."""
        ...

    def due_in_s(self, record: Record) -> float:
        """Seconds until a request comes. Not more than 0: now."""
        ...


class Disconnected(Exception):
    """The server's process has ended while an operator waited."""


class Front:
    """The address at which servers listen. Outside of the world, as what it notes is."""

    def __init__(self, here: World, caller: Caller, records: list[Record]) -> None:
        self.caller = caller
        self.records = records
        self.num_ends = 0
        """Of servers that have ended while they listened."""
        self._world = here
        self._listening: list[HttpServer] = []
        self._owners: dict[int, HttpServer] = {}
        """By the number of a request: the server that has taken it."""
        self._deeds: list[tuple[HttpServer, Deed]] = []
        here.systems["front"] = self

    @property
    def listening(self) -> list[HttpServer]:
        """The servers whose processes listen, though they may be stopped."""
        return list(self._listening)

    def engines(self) -> Iterator[Any]:
        """The engines of servers that run."""
        return (each.engine for each in self._listening if not each.process.is_stopped)

    def open(self, server: HttpServer) -> None:
        self._listening.append(server)
        server.process.on_end.append(lambda _: self._end(server))

    def close(self, server: HttpServer) -> None:
        if server in self._listening:
            self._listening.remove(server)

    def take(self, server: HttpServer, record: Record) -> bool:
        """Whether a request's connection is to this server, which then has it for good. The kernel spreads them."""
        if self._listening[record.number % len(self._listening)] is not server:
            return False
        self._owners[record.number] = server
        return True

    def is_taken(self, record: Record) -> bool:
        return record.number in self._owners

    def operate(self, deed: Deed, number: int) -> None:
        """Have a server do what an operator asks. Returns when it has ended, or the server has."""
        while not self._listening:
            self._world.park("a server that listens", _AGAIN_S)
        server = self._listening[number % len(self._listening)]
        self._deeds.append((server, deed))
        server.start_operation(deed)
        while deed.ended_s is None:
            self._world.park("the answer of a server", _AGAIN_S)

    def _end(self, server: HttpServer) -> None:
        """Its connections are lost."""
        if server not in self._listening:
            return
        self.close(server)
        self.num_ends += 1
        for record in self.records:
            if self._owners.get(record.number) is server and record.ended_s is None:
                record.submitted_s = self._world.now_s if record.submitted_s is None else record.submitted_s
                record.is_aborted, record.ended_s = True, self._world.now_s
                self._world.tell(f"{record.name}: its connection is lost")
        for deed in [deed for own, deed in self._deeds if own is server and deed.ended_s is None]:
            deed.error, deed.ended_s = Disconnected("the server has ended"), self._world.now_s


def _front() -> Front:
    return world().systems["front"]


class _Handlers:
    """What callers of `AsyncLLM` find at a server. Real: handlers of HTTP, which ask its engine in one way."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def generate(
        self,
        prompt: Any,
        params: Any,
        request_id: str,
        priority: int = 0,
        *,
        stream: Any = True,
        data_parallel_rank: int | None = None,
        lora_request: Any = None,
    ) -> Any:
        # imported lazily: the world has to be in its place before the product
        from raycore.client.ask import Ask, id_or_new

        name = id_or_new(request_id)
        return self._engine.ask([Ask(prompt, params, name, priority, stream, data_parallel_rank, lora_request)])

    async def encode_all(
        self,
        prompts: Sequence[Any],
        params: Any,
        request_ids: Sequence[str],
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        lora_request: Any = None,
    ) -> list[Any]:
        from raycore.client.ask import Ask  # imported lazily, as above

        asks = [
            Ask(prompt, params, name, priority, False, data_parallel_rank, lora_request)
            for prompt, name in zip(prompts, request_ids, strict=True)
        ]
        return [output async for output in self._engine.ask(asks)]


class HttpServer:
    """Real: uvicorn's, on a thread of its own."""

    def __init__(self, app: Any, listener: object, options: object = None) -> None:
        self.engine = app.engine
        here = world()
        assert here.current is not None
        self.process: Process = here.current.process
        self._loop: Any = None
        self._thread: Any = None
        self._stopping: Any = None

    def start(self) -> None:
        from raycore.system import asyncio, threading

        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="raycore-http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        _front().close(self)
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10.0)

    def start_operation(self, deed: Deed) -> None:
        """Called from another process: a message comes."""
        caller = _front().caller
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(caller.operation(self.engine, deed)))

    async def _serve(self) -> None:
        from raycore.system import asyncio

        front = _front()
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        tasks = [self._loop.create_task(self._answer(record)) for record in front.records]
        front.open(self)
        await self._stopping.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, record: Record) -> None:
        from raycore.system import asyncio

        front = _front()
        while (left_s := front.caller.due_in_s(record)) > 0:
            await asyncio.sleep(left_s)
        while not front.is_taken(record):
            if self in front.listening and front.take(self, record):
                try:
                    await front.caller.request(_Handlers(self.engine), record)
                except Exception as error:  # nobody else would hear of it
                    record.problems.append(f"its handler raised {error!r}")
                    record.ended_s = world().now_s
                return
            await asyncio.sleep(_AGAIN_S)


def _build_app(engine: Any, options: object, adapters: object, store: object = None) -> Any:
    """Real: FastAPI's."""
    from raycore.server.http.counts import HttpCounts

    service = types.SimpleNamespace(http_counts=HttpCounts(), own=lambda kind: types.SimpleNamespace())
    return types.SimpleNamespace(engine=engine, state=types.SimpleNamespace(service=service))


@contextmanager
def _listening(*_: object, **__: object) -> Generator[Any, None, None]:
    """Real: a socket, or what answers on it while an engine starts."""
    yield types.SimpleNamespace(getsockname=lambda: ("127.0.0.1", 8000), stop=lambda: None)


STAND_INS: dict[str, dict[str, Any]] = {
    "raycore.server.app": {"build_app": _build_app},
    "raycore.server.process.connection_log": {"configure_logging": lambda _: None},
    "raycore.server.process.loading": {"answering_while_loading": _listening},
    "raycore.server.process.serving": {
        "HttpServer": HttpServer,
        "prepare_process": lambda: None,
        "serve": lambda *_: None,  # real: until a signal comes
        "GOODBYE_S": 5,
    },
    "raycore.server.process.listening": {
        "listen": lambda *_, **__: None,
        "take_over": lambda _: None,
        "listening": _listening,
        "handed_over": _listening,
        "shown_address": lambda *_: "here",
    },
}
"""What takes the place of the modules that speak HTTP, by name."""


def install() -> None:
    """To be called before anything of `raycore.server` is imported."""
    for name, values in STAND_INS.items():
        made = types.ModuleType(name)
        made.__dict__.update(values)
        sys.modules[name] = made
