"""Whoever watches the requests of an engine: the request log, and traces.

Nobody wraps an engine for that. `Streams` has each request watched, whichever method of `AsyncLLM` asked for it, and so
has whoever submits those of `LLM`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType

import msgspec

from raycore.client.ask import Ask
from raycore.client.updates import Sink, Update
from raycore.outputs import RequestOutput
from raycore.pooling_params import PoolingParams
from raycore.system import threading

Note = Callable[[RequestOutput], object]
"""Called with outputs, before the caller gets them. Each has the whole output so far. A `PooledOutput` is a result."""


def nothing(output: RequestOutput) -> None:
    """A `Note` that does nothing."""


class Watcher:
    """What somebody does around the requests of an engine. By default, nothing.

    The methods are called on the callers' event loops and threads, and on the client's. They must return quickly.
    """

    needs_all_tokens: bool = False
    """Whether streams have an output for each new token, also where the caller wants only those with new text."""

    def watching(self, asks: Sequence[Ask]) -> AbstractContextManager[Note]:
        """Watch a call, whose requests run while the context lasts. Their prompts are parsed.

        There is one request, or there are several that pool. An error leaves the context: why they failed.
        """
        return nullcontext(nothing)


class Watch:
    """What watchers do around one call. This one: nothing, because nobody watches."""

    def note(self, output: RequestOutput) -> None:
        """Tell all of an output."""

    def end(self, error: BaseException | None = None) -> None:
        """Tell all that the call has ended. Idempotent."""

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(error)


class _Watch(Watch):
    """What some watchers do around one call."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Note]]) -> None:
        self._stack = ExitStack()
        with self._stack:  # leaves those that are entered, if another one fails
            self._notes = [self._stack.enter_context(each) for each in contexts]
            self._stack = self._stack.pop_all()

    def note(self, output: RequestOutput) -> None:
        for note in self._notes:
            note(output)

    def end(self, error: BaseException | None = None) -> None:
        kind, traceback = (None, None) if error is None else (type(error), error.__traceback__)
        self._stack.pop_all().__exit__(kind, error, traceback)


UNWATCHED = Watch()
"""The watch of a call that nobody watches."""


class _WatchedSink:
    """Passes updates on, and tells watchers of them. Thread-safe."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._watches: dict[str, Watch] = {}
        """Of the requests that haven't ended."""
        self._num_left: Counter[Watch] = Counter()
        """How many requests of each watch haven't ended."""

    def add(self, watch: Watch, asks: Sequence[Ask]) -> None:
        self._watches |= {ask.request_id: watch for ask in asks}
        self._num_left[watch] = len(asks)

    def __call__(self, updates: list[Update]) -> None:
        for update in updates:
            self._tell(update)
        self._sink(updates)

    def end(self, error: BaseException) -> None:
        with self._lock:
            left, self._watches = self._watches, {}
        for watch in dict.fromkeys(left.values()):
            watch.end(error)

    def _tell(self, update: Update) -> None:
        with self._lock:
            watch = self._watches.get(update.request_id, UNWATCHED)
            if update.output is not None:
                watch.note(update.output)
            if not update.is_last:
                return
            self._watches.pop(update.request_id, None)
            self._num_left[watch] -= 1
            has_ended = update.error is not None or self._num_left[watch] == 0
        if has_ended:
            watch.end(update.error)


class Watchers:
    """Those who watch the requests of one engine."""

    def __init__(self) -> None:
        self._watchers: list[Watcher] = []

    def add(self, watcher: Watcher) -> None:
        """Have one more watch the requests that come from now on. It replaces one of its class: there is one log."""
        self._watchers = [*(each for each in self._watchers if type(each) is not type(watcher)), watcher]

    def watch(self, asks: Sequence[Ask]) -> Watch:
        """Begin to watch a call."""
        return _Watch([each.watching(asks) for each in self._watchers]) if self._watchers else UNWATCHED

    @contextmanager
    def around(self, asks: Sequence[Ask], sink: Sink) -> Generator[Sink]:
        """Watch requests whose updates go to a sink. The context gets the sink to submit them with.

        An error that leaves the context ends the watch of those that haven't ended. Requests that pool are one call.
        """
        if not self._watchers:
            yield sink
            return
        calls = [asks] if isinstance(asks[0].params, PoolingParams) else [[ask] for ask in asks]
        watched = _WatchedSink(sink)
        try:
            for call in calls:
                watched.add(self.watch(call), call)
            yield watched
        except BaseException as error:
            watched.end(error)
            raise

    def wanted(self, ask: Ask) -> Ask:
        """The request with the outputs that its caller and all watchers want."""
        if ask.stream == "text" and any(each.needs_all_tokens for each in self._watchers):
            return msgspec.structs.replace(ask, stream=True)
        return ask


NOBODY = Watchers()
"""Those who watch requests that nobody sees, such as the steps of a beam search."""
