"""OpenAI's API under Ray Serve, through its proxy, with OpenAI's client."""

from __future__ import annotations

import asyncio
import os
import signal
from threading import Event, Thread

import httpx
import openai
import pytest
import ray
import shared_memory
from fake_engine import FakeEngine
from job_cluster import free_ports
from number_formats import DTYPE
from peft_adapters import save_demo_adapter
from ray import serve
from ray.serve._private.thirdparty.get_asgi_route_name import extract_route_patterns, get_asgi_route_name
from slow_worker import STEP_S
from waiting import eventually

from raycore.control.commands import ACTOR_PREFIX
from raycore.control.remote import RemoteEngine
from raycore.errors import ControlError, InvalidConfig
from raycore.server import ServerOptions, build_app
from raycore.server.serve_app import build_serve_app
from raycore.status import RankStatus

pytestmark = pytest.mark.timeout(240)  # Serve has processes of its own to start
KEY = "a-key"
ARGUMENTS = {
    "served_model_name": "sums",
    "engine_name": "served",
    "num_threads": "1",  # as text, which is what the command line gives
    "max_model_len": 1000,
    "dtype": DTYPE,
    "standby_delay_s": None,
    "max_rank_restarts": 0,
    "worker_cls": "slow_worker.SlowWorker",
}
ENDLESS = {"model": "sums", "prompt": "1 2 3", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
LONG_S = 900 * STEP_S
"""What that takes, at least."""

RAY_OPTIONS = {"num_cpus": 0, "runtime_env": {"env_vars": {"RAYCORE_API_KEY": KEY}}}


@pytest.fixture(scope="module")
def url(ray_cluster, tmp_path_factory: pytest.TempPathFactory):
    """The application's address, below a prefix as where it shares a proxy with others."""
    shared_before = shared_memory.files()
    (port,) = free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    adapter, _ = save_demo_adapter(tmp_path_factory.mktemp("adapters"), 1)
    app = build_serve_app({**ARGUMENTS, "enable_lora": True, "lora_modules": f"adapted={adapter}"})
    options = app._bound_deployment.options(health_check_period_s=0.5, ray_actor_options=RAY_OPTIONS)
    serve.run(options.bind(*app._bound_deployment.init_args), name="sums", route_prefix="/sums")
    yield f"http://127.0.0.1:{port}/sums"
    serve.shutdown()
    eventually(
        lambda: not [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    )
    eventually(lambda: "served" not in str(ray.util.list_named_actors(all_namespaces=True)))
    assert shared_memory.abandoned_since(shared_before) == []


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=60, max_retries=0) as client:
        yield client


def the_rank() -> RankStatus | None:
    """The engine's only rank, once it can be asked."""
    prefix = f"{ACTOR_PREFIX}{ARGUMENTS['engine_name']}-"
    actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    names = [name.removeprefix(ACTOR_PREFIX) for name in actors if name.startswith(prefix)]
    if not names:
        return None
    try:
        status, _ = RemoteEngine(names[0]).status()
    except ControlError:
        return None
    return status.ranks[0] if status.ranks else None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_parallel_sizes": 2}, "unknown option 'data_parallel_sizes'; did you mean data_parallel_size?"),
        ({"data_parallel_size": "two"}, "data_parallel_size='two'"),
        ({"api_keys": ["in a manifest"]}, "unknown option 'api_keys'"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests=0"),
        ({"lora_modules": "a=/a"}, "needs an engine with enable_lora=True"),
        ({"lora_modules": "a", "enable_lora": "true"}, "lora_modules='a': expected name=path"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_starts(arguments, message):
    with pytest.raises(InvalidConfig, match=message):
        build_serve_app(arguments)


def test_a_ray_serve_application_answers_completions_chats_and_adapters(client):
    completion = client.completions.create(model="sums", prompt="27 + 58 =", temperature=0)
    assert completion.choices[0].text == " 85"
    chat = client.chat.completions.create(
        model="sums", messages=[{"role": "user", "content": "27 + 58 ="}], temperature=0, max_tokens=8
    )
    assert chat.choices[0].message.content
    assert [model.id for model in client.models.list()] == ["sums", "adapted"]
    adapted = client.completions.create(model="adapted", prompt="27 + 58 =", temperature=0)
    assert adapted.model == "adapted"


def test_api_keys_and_probes_work_below_the_route_prefix(url, client):
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
    answer = httpx.get(f"{url}/health", headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (200, ["mine"])
    assert httpx.get(f"{url}/version").json()["version"]
    assert httpx.get(f"{url.removesuffix('/sums')}/-/healthz").text == "success"


def test_ray_serve_delivers_events_as_they_are_made_and_aborts_a_request_when_its_client_disconnects(url, client):
    eventually(the_rank)
    with client.completions.create(**ENDLESS, stream=True) as stream:
        assert next(stream).choices[0].finish_reason is None
        eventually(lambda: the_rank().num_running == 1)
    eventually(lambda: the_rank().num_running == 0, timeout_s=LONG_S / 2)

    is_seen = Event()
    impatient = Thread(target=lambda: asyncio.run(leave_when(is_seen, url)))
    impatient.start()
    eventually(lambda: the_rank().num_running == 1, lambda: f"{the_rank()}; asked: {asked_of_replica(url)}")
    is_seen.set()
    impatient.join()
    eventually(lambda: the_rank().num_running == 0, timeout_s=LONG_S / 2)


def asked_of_replica(url: str) -> list[str]:
    """What the replica says of its requests: it has got them, or Serve's proxy still has."""
    metrics = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=10).text
    return [line for line in metrics.splitlines() if "request" in line and not line.startswith("#")]


async def leave_when(is_seen: Event, url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        request = asyncio.ensure_future(client.completions.create(**ENDLESS))
        await asyncio.to_thread(is_seen.wait, LONG_S)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request


def test_a_replica_whose_engine_fails_is_replaced(url, client):
    old = the_rank()
    os.kill(old.pid, signal.SIGKILL)  # it may not be restarted, so the engine fails
    eventually(lambda: (rank := the_rank()) is not None and rank.state == "serving" and rank.pid != old.pid)
    completion = client.completions.create(model="sums", prompt="27 + 58 =", temperature=0)
    assert completion.choices[0].text == " 85"
    assert client.completions.create(model="adapted", prompt="27 + 58 =").model == "adapted"


def test_a_replica_that_is_stopped_finishes_its_requests(client):
    """The last one, since nothing is served after it."""
    with client.completions.create(**ENDLESS | {"max_tokens": 150}, stream=True) as stream:
        next(stream)
        deletion = Thread(target=serve.delete, args=("sums",))
        deletion.start()
        *_, last = stream
    assert last.choices[0].finish_reason == "length"
    deletion.join(90)
    assert not deletion.is_alive()


def test_ray_finds_the_names_of_the_applications_routes():
    """Serve's metrics and logs have them."""
    app = build_app(FakeEngine(), ServerOptions(("fake",)))
    patterns = {pattern.path for pattern in extract_route_patterns(app)}
    assert {"/v1/chat/completions", "/v1/models/{model:path}"} <= patterns
    for path, name in (("/v1/models", "/v1/models"), ("/v1/models/a", "/v1/models/{model:path}")):
        scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []}
        assert get_asgi_route_name(app, scope) == name
