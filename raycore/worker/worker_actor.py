"""The Ray actor that hosts one worker. It makes no decisions of its own.

All methods of the worker run in the concurrency group `work`, whose single thread owns the device. The group `watch` is
for `hold`, which blocks. Calls in the default group must never block, because `close` and calls from the channels of
Ray's compiled graphs run in this group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.structs import replace

from raycore.config import EngineConfig
from raycore.node import lifeline, listeners
from raycore.node.logs import log_as
from raycore.node.niceness import run_yielding
from raycore.ray_api import actor_class, end_with_raylet, endpoint, node_id, node_ip, own_gpus, title_process
from raycore.rpc.endpoint import Invitation, TransportClosed, WorkerEndpoint
from raycore.rpc.server import RpcServer
from raycore.rpc.start_phases import note_process
from raycore.rpc.worker_steps import takes_masks
from raycore.system import os, threading
from raycore.worker.protocol import WorkerProtocol
from raycore.worker.rank import WorkerRank, load_worker_class, preload_worker


class WorkerAddress(NamedTuple):
    """The process and the node of a worker."""

    pid: int
    node_id: str


class WorkerActor:
    """Hosts one worker in a process of its own."""

    def __init__(self, config_bytes: bytes, name: str) -> None:
        self._config = EngineConfig.decode(config_bytes)
        self._name = name
        self._stopping = threading.Event()
        self._endpoint: WorkerEndpoint | None = None
        self._worker: WorkerProtocol | None = None
        title_process(name)
        note_process()
        end_with_raylet()
        lifeline.lock()

    def __repr__(self) -> str:
        return self._name

    @endpoint()
    def address(self) -> WorkerAddress:
        """Return this worker's address."""
        return WorkerAddress(os.getpid(), node_id())

    @endpoint()
    def offer_meeting(self) -> str:
        """Listen at a new address, `tcp://host:port`, at which this worker and others will meet."""
        return listeners.offer(node_ip())

    @endpoint("work")
    def preload(self, yields: bool) -> None:
        """Import the worker class, which takes seconds, while other processes start.

        With `yields`, threads that compute go before the import.
        """
        if yields:
            run_yielding(lambda: preload_worker(self._config))
        else:
            preload_worker(self._config)

    @endpoint("work")
    def join(self, invitation: Invitation) -> Any:
        """Connect to the engine. Returns the `answer` that the engine's `Transport.accept()` takes."""
        self._endpoint, answer = invitation.join()
        return answer

    @endpoint("work")
    def start(self, rank: WorkerRank) -> bool:
        """Create the worker and load its model, unless it will get its weights from workers that already run.

        Called after `join()` has returned on all workers of the engine.

        Returns: whether the worker can be given masks.
        """
        if self._endpoint is not None:
            self._endpoint.finish_joining()
        log_as(rank.label, self._config.log_level)
        title_process(f"raycore_{self._config.engine_name}_{rank.label.replace(' ', '_')}")
        if rank.gpu_id is None and self._config.device == "cuda":
            rank = replace(rank, gpu_id=next(iter(own_gpus()), None))
        rank.take_gpu()
        worker = self._worker = load_worker_class(self._config.parallel)(self._config, rank)
        self._server = RpcServer(worker, rank.worker)
        worker.init_device()
        if not rank.is_new:
            worker.load_model()
        return takes_masks(worker)

    @endpoint()
    def load_progress(self) -> float:
        """Fraction of the weights that has been read, 0 to 1. 0 if the worker does not report it."""
        return getattr(self._worker, "load_progress", 0.0)

    @endpoint("work")
    def serve(self) -> None:
        """Handle requests from the channel, until the engine asks the worker to stop or the channel is closed."""
        assert self._endpoint is not None, "join() comes first"
        server = self._server
        try:
            while not server.stopped:
                message = self._endpoint.receive(server.is_due if server.has_unfinished else None)
                reply = server.finish_step() if message is None else server.handle(message)
                if reply is not None:
                    self._endpoint.send(reply)
        except TransportClosed:
            return  # the engine closed the channel, or has ended
        finally:
            self._endpoint.close()

    @endpoint("work")
    def call(self, message: bytes) -> bytes | None:
        """Handle one request, and return its reply or None. Used by the transport that has no channels."""
        reply = self._server.handle(message)
        if self._server.has_unfinished:
            reply = self._server.finish_step()  # the call's result is the reply
        if self._server.stopped:
            self._stopping.set()
        return reply

    @endpoint("watch")
    def wait_until_stopped(self) -> None:
        """Block until the worker has stopped. The transport that has no channels calls this instead of `serve()`."""
        self._stopping.wait()

    @endpoint()
    def close(self) -> None:
        """Make `serve()` or `wait_until_stopped()` return."""
        self._stopping.set()
        if self._endpoint is not None:
            self._endpoint.close()


WORKER_ACTOR = actor_class(WorkerActor, concurrency_groups={"work": 1, "watch": 1})
"""`WorkerActor` as a Ray actor class."""
