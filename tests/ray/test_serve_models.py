"""Two models of one application under Ray Serve, one of them with adapters that requests name."""

from __future__ import annotations

import os
import signal
from threading import Event, Thread
from typing import Any

import openai
import pytest
import ray
import shared_memory
from job_cluster import free_ports
from number_formats import DTYPE
from peft_adapters import save_demo_adapter
from ray import serve
from ray.serve.context import _get_global_client
from waiting import eventually

from raycore.demo import demo_model_path
from raycore.serve import build_openai_app

pytestmark = pytest.mark.timeout(240)  # Serve has processes of its own to start
KEY = "a-key"
APP = "models"
ACTOR = {"runtime_env": {"env_vars": {"RAYCORE_API_KEY": KEY}}}


def model(model_id: str, **fields: Any) -> dict[str, Any]:
    kwargs = {"num_threads": 1, "max_model_len": 1000, "dtype": DTYPE, "standby_delay_s": None}
    return {
        "model_loading_config": {"model_id": model_id, "model_source": str(demo_model_path())},
        "engine_kwargs": kwargs | fields.pop("engine_kwargs", {}),
        "deployment_config": {"health_check_period_s": 0.5, "ray_actor_options": ACTOR},
        "placement_group_config": {"bundle_per_worker": {"CPU": 0.5}},
        **fields,
    }


def deploy(adapters: str, **plain: Any) -> None:
    lora = {"dynamic_lora_loading_path": adapters, "max_num_adapters_per_replica": 2}
    ingress = {"ray_actor_options": {"num_cpus": 0, **ACTOR}}
    models = [model("adapted", lora_config=lora), model("plain", engine_kwargs=plain)]
    serve.run(
        build_openai_app({"llm_configs": models, "ingress_deployment_config": ingress}),
        name=APP,
        route_prefix="/models",
    )


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        adapter, _ = save_demo_adapter(tmp_path_factory.mktemp(name), seed)
        adapter.rename(folder / name)
    return str(folder)


@pytest.fixture(scope="module")
def url(ray_cluster, adapters):
    shared_before = shared_memory.files()
    (port,) = free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deploy(adapters)
    yield f"http://127.0.0.1:{port}/models/v1"
    serve.shutdown()
    eventually(
        lambda: not [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    )
    assert shared_memory.abandoned_since(shared_before) == []


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key=KEY, timeout=60, max_retries=0) as client:
        yield client


def replicas(deployment: str) -> list[dict[str, Any]]:
    """The replicas that serve."""
    details = _get_global_client().get_serve_details()["applications"][APP]["deployments"][deployment]
    return [each for each in details["replicas"] if each["state"] == "RUNNING"]


def logprob(client: openai.OpenAI, name: str) -> float:
    """Of the first token that a model or an adapter gives."""
    answer = client.completions.create(model=name, prompt="27 + 58 =", temperature=0, max_tokens=1, logprobs=0)
    assert answer.model == name
    return answer.choices[0].logprobs.token_logprobs[0]


def test_requests_go_to_the_model_that_they_name(url, client):
    for name in ("adapted", "plain"):
        answer = client.completions.create(model=name, prompt="27 + 58 =", temperature=0)
        assert (answer.model, answer.choices[0].text) == (name, " 85")
    with client.completions.create(model="plain", prompt="27 + 58 =", temperature=0, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == " 85"
    found = {card.id: card.to_dict().get("parent") for card in client.models.list()}
    assert found == {
        "adapted": None,
        "plain": None,
        **dict.fromkeys(map("adapted:{}".format, ("one", "two", "three")), "adapted"),
    }
    with pytest.raises(openai.NotFoundError, match="'another' doesn't exist; served here: adapted, plain"):
        client.completions.create(model="another", prompt="1")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").completions.create(model="another", prompt="1")


def test_adapters_are_loaded_when_requests_name_them_and_make_room_for_others(client):
    found = {name: logprob(client, name) for name in ("adapted", "adapted:one", "adapted:two", "adapted:three")}
    assert len(set(found.values())) == 4
    assert logprob(client, "adapted:one") == found["adapted:one"]  # dropped, and loaded again
    for name in ("adapted:four", "adapted:..", "adapted:", "plain:one"):
        with pytest.raises(openai.NotFoundError):
            logprob(client, name)


def test_a_killed_replica_leaves_nothing_and_is_replaced(client):
    (killed,) = replicas("raycore:plain")
    groups = live_groups()
    os.kill(killed["pid"], signal.SIGKILL)
    eventually(lambda: [each for each in replicas("raycore:plain") if each["pid"] != killed["pid"]])
    assert client.completions.create(model="plain", prompt="27 + 58 =", temperature=0).choices[0].text == " 85"
    eventually(lambda: len(live_groups()) == len(groups) and live_groups() != groups)


def live_groups() -> set[str]:
    table = ray.util.placement_group_table()
    return {name for name, group in table.items() if group["state"] != "REMOVED"}


def test_an_update_costs_no_request_and_streams_finish(client, adapters):
    (before,) = replicas("raycore:plain")
    is_over, answers, errors = Event(), [], []

    def ask() -> None:
        while not is_over.is_set():
            try:
                with client.completions.create(
                    model="plain", prompt="27 + 58 =", max_tokens=50, stream=True, extra_body={"ignore_eos": True}
                ) as stream:
                    *_, last = stream
                answers.append(last.choices[0].finish_reason)
            except Exception as error:
                errors.append(error)

    threads = [Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        deploy(adapters, max_num_seqs=7)
        (after,) = replicas("raycore:plain")
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    assert errors == []
    assert set(answers) == {"length"}
    assert after["pid"] != before["pid"]
