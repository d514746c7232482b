"""Whoever watches the requests of an engine: the request log, and traces.

Nobody wraps an engine for that. `Streams` has each request watched, whichever of the public methods asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType

import msgspec

from raycore.client.ask import Ask
from raycore.outputs import RequestOutput

Note = Callable[[RequestOutput], object]
"""Called with outputs, before the caller gets them. Each has the whole output so far. A `PooledOutput` is a result."""


def nothing(output: RequestOutput) -> None:
    """A `Note` that does nothing."""


class Watcher:
    """What somebody does around the requests of an engine. By default, nothing.

    The methods are called on the callers' event loops, and must return quickly.
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

    def wanted(self, ask: Ask) -> Ask:
        """The request with the outputs that its caller and all watchers want."""
        if ask.stream == "text" and any(each.needs_all_tokens for each in self._watchers):
            return msgspec.structs.replace(ask, stream=True)
        return ask
