"""Runs the requests of one blocking call, and collects their updates. Thread-safe. Does not depend on Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from raycore.client.ask import Ask
from raycore.client.updates import Update
from raycore.client.watchers import NOBODY, Watchers
from raycore.display.progress_bars import BAR_S, RequestBar, request_bar
from raycore.errors import RequestFailed
from raycore.outputs import RequestOutput
from raycore.system import threading, time

if TYPE_CHECKING:
    from raycore.client.client import EngineClient  # imports Ray

_WAIT_S = 1.0
"""Interval, in seconds, at which a blocked caller wakes up to handle signals. Results and failures wake it at once."""


class Collector:
    """Waits until all requests of a call have ended, and holds their outputs and errors."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._finished: dict[str, RequestOutput] = {}
        self._failed: dict[str, RequestFailed] = {}
        self._error: BaseException | None = None

    def run(
        self,
        client: EngineClient,
        asks: Sequence[Ask],
        use_tqdm: bool | Callable[..., Any],
        num_tokens: Callable[[], int],
        work: str = "Generating",
        watchers: Watchers = NOBODY,
    ) -> list[RequestOutput]:
        """Submit requests, and wait until all have ended. Returns their outputs, in order. If that fails, all end.

        Args:
            use_tqdm: show a progress bar, which this makes if it can be called.
            num_tokens: returns the number of tokens so far, for the rate in the progress bar.
            work: what is done with them, for the bar.
            watchers: who sees the requests.
        """
        ids = [ask.request_id for ask in asks]
        try:
            with watchers.around(asks, self.put) as sink:
                client.submit(asks, sink)
            with request_bar(len(asks), use_tqdm, work) as bar:
                self.wait(len(asks), bar, num_tokens)
        except BaseException:
            # also after an interrupt: the engine stays usable, and must not compute requests that nobody waits for
            client.abort(ids, notify=True)  # tells those who watch
            raise
        return self.outputs(ids)

    def put(self, updates: list[Update]) -> None:
        """Store updates. Called on the client's threads."""
        with self._changed:
            for update in updates:
                if isinstance(update.error, RequestFailed):
                    self._failed[update.request_id] = update.error
                else:
                    self._error = self._error or update.error
                if update.output is not None and update.output.finished:
                    self._finished[update.request_id] = update.output
            self._changed.notify()

    def wait(self, count: int, bar: RequestBar, num_tokens: Callable[[], int]) -> None:
        """Block until `count` requests have ended. Raises the first error that isn't a RequestFailed.

        `num_tokens`: returns the number of tokens so far, for the rate in the progress bar.
        """
        started_s, num_before = time.perf_counter(), num_tokens()
        while True:
            with self._changed:
                if self._error is None and self.num_ended < count:
                    self._changed.wait(_WAIT_S if bar.disable else BAR_S)
                if self._error is not None:
                    raise self._error
                done = self.num_ended
            if not bar.disable:
                rate = (num_tokens() - num_before) / (time.perf_counter() - started_s)
                bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                bar.n = done
                bar.refresh()
            if done == count:
                return

    def outputs(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """The outputs of these requests, all of which have ended. Raises RequestFailed if any of them failed."""
        if self._failed:
            error = next(iter(self._failed.values()))
            error.outputs = [self._finished.get(request_id) for request_id in request_ids]
            raise error
        return [self._finished[request_id] for request_id in request_ids]

    def result(self, request_id: str) -> RequestOutput | RequestFailed:
        """The output of a request that has ended, or why it failed."""
        return self._failed.get(request_id) or self._finished[request_id]

    @property
    def num_ended(self) -> int:
        """Number of requests that have ended."""
        return len(self._finished) + len(self._failed)
