"""Requests whose outputs a caller fetches step by step. Thread-safe. Does not depend on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from raycore.client.ask import Ask
from raycore.client.inputs import checked_params
from raycore.client.output_kinds import OutputKinds
from raycore.client.request_state import PooledOutput
from raycore.client.updates import Update
from raycore.errors import InvalidRequest, RequestFailed
from raycore.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from raycore.system import threading

if TYPE_CHECKING:
    from raycore.client.client import EngineClient  # imports Ray

Output: TypeAlias = RequestOutput | PoolingRequestOutput[PoolingOutput]

STEP_WAIT_S = 1.0
"""How long a step waits for an output, in seconds."""


class StepQueue:
    """The requests of a caller that have been added, and whose last output it hasn't fetched."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._kinds: dict[str, OutputKinds | None] = {}
        """What makes each request's outputs, by its id, in the order in which requests were added."""
        self._updates: dict[str, Update] = {}
        """The newest update of each request that has one which the caller hasn't fetched."""
        self._errors: list[BaseException] = []
        """Those of requests that have failed, which steps raise one after the other."""

    def add(self, asks: Sequence[Ask]) -> None:
        """Submit requests. Steps return outputs before the last one of those whose `stream` says so.

        Raises:
            InvalidRequest: a request is invalid; the message says why. None was submitted.
            EngineDeadError: the engine has failed, or is draining.
        """
        interval = self._client.stream_interval
        kinds = {
            ask.request_id: OutputKinds.of(checked_params(ask.params), interval) if ask.stream else None for ask in asks
        }
        with self._changed:
            used = next((each for each in kinds if each in self._kinds), None)
            if used is not None:
                raise InvalidRequest(f"request_id={used!r} is already in use")
            self._kinds |= kinds  # before an output can come
        try:
            with self._client.watchers.around(asks, self._put) as sink:
                self._client.submit(asks, sink)
        except BaseException:
            self._forget(list(kinds))
            raise

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose last output hasn't been fetched, or whose error hasn't been raised."""
        with self._changed:  # a step turns one into the other
            return len(self._kinds) + len(self._errors)

    @property
    def request_ids(self) -> list[str]:
        """The ids of the requests whose last output hasn't been fetched, in the order in which they were added."""
        return list(self._kinds)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests, from which no more outputs come. Ignores unknown ids."""
        with self._changed:
            own = [each for each in request_ids if each in self._kinds]
        self._forget(own)
        self._client.abort(own, notify=True)  # tells those who watch

    def step(self, wait_s: float | None = STEP_WAIT_S) -> list[Output]:
        """Return what has come since the previous step: at most one output for each request.

        If nothing has come, but there are unfinished requests, wait for an output. A slow caller doesn't get every
        output. With `RequestOutputKind.DELTA`, it still gets everything that they contain.

        Args:
            wait_s: how long to wait, in seconds, before returning nothing. None: as long as it takes.

        Raises:
            RequestFailed, InvalidRequest: a request has failed. The outputs of the others come in the next steps.
            EngineDeadError: the engine has failed, and with it all requests.
        """
        with self._changed:
            if self._errors:
                raise self._errors.pop(0).with_traceback(None)  # other callers may get the same object
            if self._kinds and not self._updates:
                self._changed.wait(wait_s)
            updates, self._updates = self._updates, {}
            outputs: list[Output] = []
            for request_id, update in updates.items():
                kinds = self._kinds.pop(request_id) if update.is_last else self._kinds[request_id]
                output = self._output(update, kinds)
                if output is not None:
                    outputs.append(output)
            if self._errors and not outputs:
                raise self._errors.pop(0).with_traceback(None)
        return outputs

    def _output(self, update: Update, kinds: OutputKinds | None) -> Output | None:
        if update.error is not None:
            if isinstance(update.error, RequestFailed | InvalidRequest) or not self._errors:
                self._errors.append(update.error)  # the failure of an engine is raised once, not for each request
            return None
        whole: Any = update.output
        if not isinstance(whole, PooledOutput):
            return whole if kinds is None else kinds.take(whole)
        try:
            return whole.result()
        except RequestFailed as error:
            self._errors.append(error)
            return None

    def _put(self, updates: list[Update]) -> None:
        """Store updates. Called on the client's threads."""
        with self._changed:
            for update in updates:
                before = self._updates.get(update.request_id)
                if update.request_id in self._kinds and not (before is not None and before.is_last):
                    self._updates[update.request_id] = update
            self._changed.notify_all()

    def _forget(self, request_ids: Sequence[str]) -> None:
        with self._changed:
            for request_id in request_ids:
                self._kinds.pop(request_id, None)
                self._updates.pop(request_id, None)
            self._changed.notify_all()
