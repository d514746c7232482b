"""A worker that sends back what it gets: the other side of the transport tests."""

import threading
import time

import ray

from raycore.rpc import doorbell
from raycore.rpc.endpoint import TransportClosed


@ray.remote(num_cpus=0, concurrency_groups={"work": 1, "watch": 1})
class EchoActor:
    def node_id(self):
        return ray.get_runtime_context().get_node_id()

    def join(self, invitation):
        doorbell.FIRST_NAP_S = doorbell.LONGEST_NAP_S = 1e4  # only a ring wakes it
        self._stopping = threading.Event()
        self._rank = getattr(invitation, "rank", None)
        self._endpoint, answer = invitation.join()
        return answer

    def finish_joining(self):
        if self._endpoint is not None:
            self._endpoint.finish_joining()

    @ray.method(concurrency_group="work")
    def serve(self):
        is_due = None
        try:
            while True:
                message = self._endpoint.receive(is_due)
                is_due = None
                if message is not None and message.startswith(b"due in"):
                    due_s = time.monotonic() + float(message.split()[2])
                    is_due = lambda due_s=due_s: time.monotonic() >= due_s  # noqa: E731
                    continue
                reply = b"due" if message is None else self._reply(message)
                if reply is not None:
                    self._endpoint.send(reply)
        except TransportClosed:
            return "closed"

    @ray.method(concurrency_group="work")
    def call(self, message):
        return self._reply(message)

    @ray.method(concurrency_group="watch")
    def wait_until_stopped(self):
        self._stopping.wait()
        return "closed"

    def close(self):
        self._stopping.set()
        if self._endpoint is not None:
            self._endpoint.close()

    def _reply(self, message):
        if message == b"rank 1 is busy" and self._rank == 1:
            time.sleep(0.5)
        return None if message == b"silence" else message
