"""The Ray actor that hosts one API server: an HTTP server and its own client of the engine's ranks.

The driver sends rank events to this actor. The actor sends requests directly to the ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from raycore.client.client import EngineClient, make_tokenizer
from raycore.client.rank_connections import Sent
from raycore.config import EngineConfig
from raycore.engine.rank_events import RankEvent
from raycore.errors import RaycoreError
from raycore.messages import NO_LOAD, EngineInfo
from raycore.metrics.counts import RankCounts
from raycore.parts.adapters.server.adapters import OfferedAdapter
from raycore.parts.adapters.server.client_adapters import ClientAdapters
from raycore.plugins import load_general_plugins
from raycore.ray_api import MAX_STREAMED, actor_class, end_with_raylet, endpoint, title_process
from raycore.server.app import build_app
from raycore.server.http.counts import total
from raycore.server.listen_options import ListenOptions
from raycore.server.multi_process.client_engine import ClientEngine
from raycore.server.multi_process.client_store import ClientStore
from raycore.server.multi_process.driver_calls import READ_METRICS, DriverCalls
from raycore.server.multi_process.reports import RankView, Report
from raycore.server.operations.metrics import Metrics
from raycore.server.options import ServerOptions
from raycore.server.process.connection_log import configure_logging
from raycore.server.process.listening import listen, take_over
from raycore.server.process.serving import HttpServer, prepare_process
from raycore.system import os, threading, time

logger = logging.getLogger(__name__)

_REPORT_S = 1.0
"""Interval of reports, in seconds. A broken output stream and a call on the driver's engine are reported at once."""

_MAX_COUNTS_PER_S = 100
"""Reports have some 4 KB of counts for each rank. With more ranks, counts are reported more rarely."""


class APIServer:
    """An API server: one of several processes that serve the same port."""

    def __init__(
        self,
        config_bytes: bytes,
        client_index: int,
        limits: EngineInfo,
        options: ServerOptions,
        environment: Mapping[str, str],
        name: str,
    ) -> None:
        """`environment`: the driver's variables that this process needs and doesn't inherit."""
        self._name = name
        os.environ.update(environment)
        title_process(name)
        end_with_raylet()
        config = EngineConfig.decode(config_bytes)
        load_general_plugins(config.plugins)
        self._client = EngineClient(config, make_tokenizer(config.model), client_index, limits)
        self._client.on_broken_stream = self._note_broken
        self._changed = threading.Condition()
        self._broken: list[tuple[int, str]] = []
        self._reported = Report()
        """The last report, without what is reported once."""
        self._counts: dict[int, RankCounts] = {}
        """The counts that have been reported."""
        self._counts_due_s = 0.0
        """When counts are reported next."""
        self._driver = DriverCalls(self._note_call)
        self._engine = ClientEngine(config, self._client, self._driver)
        self._adapters = ClientAdapters(self._driver)
        self._store = ClientStore(self._driver)
        self._app = build_app(self._engine, options, self._adapters, self._store)
        self._engine.on_http_counts = partial(setattr, self._app.state.service.own(Metrics), "all_http_counts")
        self._server: HttpServer | None = None

    def __repr__(self) -> str:
        return self._name

    @endpoint("ranks")
    def serve(self, address: ListenOptions, handed_at: str | None) -> int:
        """Start to serve. Sends requests to the ranks announced so far, and to later ones. Returns the process's pid.

        Args:
            handed_at: where the driver hands a listening socket over; None: this process opens one of its own.

        Raises:
            OSError: the address can't be bound.
        """
        prepare_process()
        if address.log_config_file is not None:
            configure_logging(address.log_config_file)
        own = listen(address.host, address.port, is_shared=True) if handed_at is None else take_over(handed_at)
        self._server = HttpServer(self._app, own, address)
        self._server.start()
        return os.getpid()

    @endpoint("control")
    def stop(self) -> None:
        """Stop accepting connections, wait up to 10 s for responses in progress, and send the remaining traces."""
        if self._server is not None:
            self._server.stop()
        self._engine.traces.stop()

    @endpoint("reports")
    def reports(self) -> Iterator[bytes]:
        """Yield an encoded `Report` whenever the report has changed. Ends after `MAX_STREAMED` of them."""
        for report in islice(self._changed_reports(), MAX_STREAMED):  # noqa: UP028 - Ray sends to the generator
            yield report

    def _changed_reports(self) -> Iterator[bytes]:
        while True:
            report = self._report()
            if report != self._reported:
                self._reported = msgspec.structs.replace(report, counts={}, broken=[], calls=[])
                yield msgspec.msgpack.encode(report)
            with self._changed:
                self._changed.wait_for(lambda: self._broken or self._driver.has_unsent(), _REPORT_S)

    # ---- the methods of `RemoteClient`

    @endpoint("ranks")
    def on_rank_event(self, event: RankEvent) -> None:
        """Handle a rank event."""
        self._client.on_rank_event(event)

    @endpoint("leaving")
    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float, come_back: bool = False) -> None:
        """Send no more requests to these ranks: see `RankListener`.

        Returns once this API server no longer needs the ranks.
        """
        self._client.ranks_leaving(dp_ranks, timeout_s, come_back)

    @endpoint("control")
    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait up to `timeout_s` seconds for unfinished ones. Returns whether all finished."""
        return self._client.drain(timeout_s)

    @endpoint("control")
    def abort_all(self) -> None:
        """Abort all requests of this API server. Callers get the output so far."""
        self._client.abort_all()

    @endpoint("control")
    def abort_requests(self, request_ids: Sequence[str] | None) -> int:
        """Call `EngineClient.abort_groups`."""
        return self._client.abort_groups(request_ids)

    @endpoint("control")
    def forget_images(self) -> None:
        """Drop the images that this API server keeps."""
        self._client.forget_images()

    @endpoint("ranks")
    def pause_new(self) -> None:
        """Pause new requests, because the engine pauses."""
        self._client.pause_new()

    @endpoint("leaving")
    def wait_for_older(self) -> bool:
        """Wait until the requests that came before the pause have finished."""
        return self._client.wait_for_older()

    @endpoint("leaving")
    def complete_pause(self, sent: Sent, aborts: bool, timeout_s: float) -> bool:
        """Wait for the outputs that ranks have sent, and end unfinished requests if the pause aborts them."""
        return self._client.complete_pause(sent, aborts, timeout_s)

    @endpoint("ranks")
    def resume_new(self) -> None:
        """Pause no more requests."""
        self._client.resume_new()

    @endpoint("ranks")
    def set_adapters(self, adapters: Sequence[OfferedAdapter]) -> None:
        """Offer exactly these adapters."""
        self._adapters.set_adapters(adapters)

    @endpoint("control")
    def finish_call(self, number: int, result: Any, error: RaycoreError | None) -> None:
        """Complete a call on the driver with its result or error."""
        self._driver.finish(number, result, error)

    def _note_broken(self, dp_rank: int, reason: str) -> None:
        with self._changed:
            self._broken.append((dp_rank, reason))
            self._changed.notify_all()

    def _note_call(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _report(self) -> Report:
        with self._changed:
            broken, self._broken = self._broken, []
        num_own, links = self._client.num_on_ranks(), self._client.links()
        loads = {dp_rank: link.load for dp_rank, link in links.items()}
        ranks = {dp_rank: RankView(count, loads.get(dp_rank, NO_LOAD)) for dp_rank, count in sorted(num_own.items())}
        client, calls = self._client, self._driver.take()
        asks_for_metrics = any(call.method == READ_METRICS for call in calls)
        return Report(
            client.num_unfinished_requests,
            ranks,
            client.num_waiting_for_rank,
            self._changed_counts(len(links)) if asks_for_metrics or time.monotonic() >= self._counts_due_s else {},
            total([self._app.state.service.http_counts]),
            broken,
            calls,
        )

    def _changed_counts(self, num_ranks: int) -> dict[int, RankCounts]:
        self._counts_due_s = time.monotonic() + num_ranks / _MAX_COUNTS_PER_S
        before, self._counts = self._counts, self._client.counts()
        return {dp_rank: counts for dp_rank, counts in self._counts.items() if counts != before.get(dp_rank)}


API_SERVER = actor_class(
    APIServer,
    num_cpus=0,
    # `ranks` has one thread, which keeps rank events and changes of the adapters in order
    concurrency_groups={"ranks": 1, "leaving": 8, "control": 4, "reports": 1},
)
"""The Ray actor class."""
