"""How vLLM's trainers tell an engine of weights in memory that both have."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from raycore.compat import weight_transfer
from raycore.compat.weight_transfer import IPCTrainerSendWeightsArgs, IPCWeightTransferEngine
from raycore.errors import InvalidConfig, RaycoreError
from raycore.parts.weights.config import WeightTransferConfig
from raycore.parts.weights.transfer.ways import make_way

WEIGHTS = {"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}


class Worker:
    """Keeps what comes, as a worker on this node reads it."""

    def __init__(self) -> None:
        config = WeightTransferConfig(backend="ipc")
        self.way = make_way(config, 0, torch.device("cpu"))
        self.tensors = {}

    def update(self, info):
        self.way.receive(info, self.load, lambda described: None)

    def load(self, pairs):
        self.tensors |= {name: tensor.clone() for name, tensor in pairs}

    def check(self):
        assert self.tensors.keys() == WEIGHTS.keys()
        assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in self.tensors.items())


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", ["mode", "send_mode"])
def test_an_actor_is_told(name):
    class Method:
        def remote(self, request):
            worker.update(request["update_info"])
            return SimpleNamespace(future=lambda: SimpleNamespace(result=lambda timeout_s: None))

    worker = Worker()
    args = IPCTrainerSendWeightsArgs(**{name: "ray"}, llm_handle=SimpleNamespace(update_weights=Method()))
    IPCWeightTransferEngine.trainer_init()
    IPCWeightTransferEngine.trainer_send_weights(iterator=iter(WEIGHTS.items()), trainer_args=args)
    worker.check()


def actor(future):
    method = SimpleNamespace(remote=lambda request: SimpleNamespace(future=lambda: future))
    return {"mode": "ray", "llm_handle": SimpleNamespace(update_weights=method)}


def test_an_actor_that_doesnt_answer_is_named(monkeypatch):
    monkeypatch.setattr(weight_transfer, "_TIMEOUT_S", 0.0)
    with pytest.raises(RaycoreError, match=r"llm_handle hasn't answered update_weights\(\) within 0 s"):
        IPCWeightTransferEngine.trainer_send_weights(WEIGHTS.items(), actor(Future()))


def test_a_timeout_of_the_engine_is_raised_as_it_is():
    future = Future()
    future.set_exception(TimeoutError("the engine's"))
    with pytest.raises(TimeoutError, match="the engine's"):
        IPCWeightTransferEngine.trainer_send_weights(WEIGHTS.items(), actor(future))


@pytest.mark.parametrize(
    ("chosen", "sizes"), [({}, ()), ({"packed": True}, (1 << 30,)), ({"packed_buffer_size_bytes": 64}, ())]
)
@pytest.mark.parametrize("num_trainers", [None, 1, 2])
def test_a_trainer_with_a_gpu_lends_its_memory_with_all_trainers(monkeypatch, num_trainers, chosen, sizes):
    calls, future = [], Future()
    future.set_result("done")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        weight_transfer, "send_weights_cuda_ipc", lambda *args, **options: calls.append((args, options))
    )
    if num_trainers is not None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_trainers)
    try:
        iterator = iter(WEIGHTS.items())
        IPCWeightTransferEngine.trainer_send_weights(iterator, {**actor(future), **chosen})
        (((update, given, *rest), options),) = calls
        assert (given, tuple(rest)) == (iterator, sizes)
        assert options == {"group": dist.group.WORLD if num_trainers == 2 else None}
        assert update({}) == "done"
    finally:
        if num_trainers is not None:
            dist.destroy_process_group()


@pytest.fixture
def server():
    """A server that keeps what is posted, and answers with a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            kept.posts.append((self.path, self.headers.get("Authorization")))
            if kept.status == 200:
                kept.worker.update(body["update_info"])
            self.send_response(kept.status)
            self.end_headers()
            self.wfile.write(b"because")

        def log_message(self, *args): ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        kept = SimpleNamespace(posts=[], status=200, worker=Worker(), url=f"http://127.0.0.1:{http.server_port}/")
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield kept
        http.shutdown()
        thread.join()


def test_a_server_is_told(server, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    args = {"send_mode": "http", "url": server.url}
    IPCWeightTransferEngine.trainer_send_weights(WEIGHTS.items(), args)
    server.worker.check()
    assert server.posts == [("/update_weights", "Bearer secret")]


def test_what_a_server_refuses_is_raised_with_its_answer(server):
    server.status = 400
    with pytest.raises(RaycoreError, match=r"POST http://127.0.0.1:\d+/update_weights: status 400: because"):
        IPCWeightTransferEngine.trainer_send_weights(WEIGHTS.items(), {"mode": "http", "url": server.url})


@pytest.mark.parametrize("args", [{}, {"mode": "ray"}, {"mode": "http"}, {"mode": "other", "url": "http://x"}])
def test_it_has_to_be_said_how_the_engine_is_told(args):
    with pytest.raises(InvalidConfig, match="give 'ray' and an llm_handle, or 'http' and a url"):
        IPCWeightTransferEngine.trainer_send_weights(WEIGHTS.items(), args)
