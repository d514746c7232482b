"""The paths that control the engine: served only on request, and only with an API key."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig, InvalidInput, PlacementShortage
from raycore.server import ServerOptions

KEY = "secret"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def admin(serve):
    return serve(headers=AUTHORIZED, api_keys=(KEY,), enable_admin_endpoints=True)


POSTS = ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache")
POSTS += ("/abort_requests", "/collective_rpc", "/scale_elastic_ep", "/is_scaling_elastic_ep")
POSTS += ("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update")
POSTS += ("/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/cancel_weight_update")
POSTS += ("/reload_weights", "/update_weight_version")
GETS = ("/is_paused", "/is_sleeping", "/server_info", "/weight_info", "/get_world_size")


def test_admin_paths_say_that_enable_admin_endpoints_is_off(serve):
    client = serve(headers=AUTHORIZED, api_keys=(KEY,))
    loras = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    answers = {path: client.post(path) for path in (*POSTS, *loras)} | {path: client.get(path) for path in GETS}
    for path, answer in answers.items():
        assert answer.error == (404, "invalid_request_error", None)
        told = f"{path} isn't served: enable_admin_endpoints is off. Start the server with --enable-admin-endpoints "
        assert answer.json["error"]["message"] == f"{told}--api-key KEY"


def test_enable_admin_endpoints_without_an_api_key_is_refused():
    with pytest.raises(InvalidConfig, match=r"--enable-admin-endpoints.*--api-key"):
        ServerOptions(("fake",), enable_admin_endpoints=True)


def test_admin_endpoints_refuse_requests_without_the_api_key(serve, engine):
    client = serve(api_keys=(KEY,), enable_admin_endpoints=True)
    assert {client.post(path).status for path in POSTS} | {client.get(path).status for path in GETS} == {401}
    assert engine.calls == []


def test_the_admin_endpoints_pause_and_resume_the_engine(admin, engine):
    assert admin.post("/pause").json == {"status": "paused"}
    assert admin.post("/pause?mode=keep&clear_cache=false").json == {"status": "paused"}
    assert admin.get("/is_paused").json == {"is_paused": True}
    assert admin.post("/resume").json == {"status": "resumed"}
    assert admin.get("/is_paused").json == {"is_paused": False}
    assert admin.post("/pause?mode=stop").error[0] == 400
    expected = [("pause_generation", "abort", True), ("pause_generation", "keep", False), ("resume_generation",)]
    assert engine.calls == expected


def test_the_admin_endpoints_put_the_engine_to_sleep_and_wake_it_up(admin, engine):
    assert admin.post("/sleep").json == {"status": "sleeping", "level": 1}
    assert admin.post("/sleep?level=0&mode=wait").json == {"status": "sleeping", "level": 0}
    assert admin.get("/is_sleeping").json == {"is_sleeping": True}
    tags = ["weights", "kv_cache"]
    assert admin.post("/wake_up?tags=weights&tags=kv_cache").json == {"status": "sleeping", "tags": tags}
    assert admin.post("/wake_up?reads_weights=false").json == {"status": "awake", "tags": None}
    assert admin.post("/wake_up").json == {"status": "awake", "tags": None}
    assert admin.get("/is_sleeping").json == {"is_sleeping": False}
    woken = [("wake_up", tags, True), ("wake_up", None, False), ("wake_up", None, True)]
    assert engine.calls == [("sleep", 1, "abort"), ("sleep", 0, "wait"), *woken]


def test_errors_of_admin_endpoints_have_the_status_of_other_endpoints(admin):
    assert admin.post("/sleep?level=3").error[0] == 400
    assert admin.post("/sleep?level=2").error[:2] == (503, "service_unavailable_error")
    assert admin.post("/wake_up?tags=all").error[0] == 400


def test_the_admin_endpoint_resets_the_prefix_cache(admin, engine):
    assert admin.post("/reset_prefix_cache").json == {"success": False}
    query = "?reset_running_requests=true&reset_external=true"
    assert admin.post(f"/reset_prefix_cache{query}").json == {"success": True}
    assert engine.calls == [("reset_prefix_cache", False, False), ("reset_prefix_cache", True, True)]
    assert admin.post("/reset_prefix_cache?reset_running_requests=perhaps").status == 400


def test_the_admin_endpoints_reset_the_caches_of_images(admin, engine):
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        assert admin.post(path).status == 200
    assert engine.calls == [("reset_mm_cache",), ("reset_encoder_cache",)]


def test_the_admin_endpoints_start_and_stop_profiles(admin, engine):
    assert admin.post("/start_profile").status == 200
    assert admin.post("/start_profile", {"profile_prefix": "run", "max_iterations": 3}).status == 200
    assert admin.post("/stop_profile").status == 200
    assert engine.calls == [
        ("start_profile", None, None, None),
        ("start_profile", "run", None, 3),
        ("stop_profile",),
    ]
    for body in ({"max_iterations": "many"}, {"profile_prefix": "../up"}, [3]):
        assert admin.post("/start_profile", body).status == 400


def test_the_admin_endpoint_shows_the_configuration_without_keys(admin, monkeypatch):
    monkeypatch.setenv("RAYCORE_API_KEY", "s3cret")
    monkeypatch.setenv("RAYCORE_LOG_LEVEL", "debug")
    info = admin.get("/server_info?config_format=json").json
    assert info["vllm_config"]["model"]["model"] == str(demo_model_path())
    assert info["vllm_env"].get("RAYCORE_LOG_LEVEL") == "debug"
    assert "s3cret" not in str(info)
    assert "raycore" in info["system_env"]["versions"]
    assert isinstance(admin.get("/server_info").json["vllm_config"], str)
    assert admin.get("/server_info?config_format=xml").status == 400


def test_the_admin_endpoint_aborts_requests(admin, engine):
    assert admin.post("/abort_requests", {"request_ids": ["a", "b"]}).json == {"status": "aborted", "aborted": 2}
    for body in ({}, {"request_ids": []}, {"request_ids": None}):
        assert admin.post("/abort_requests", body).json == {"status": "aborted", "aborted": 0}
    assert engine.calls == [("abort_requests", ["a", "b"]), *[("abort_requests", None)] * 3]
    assert admin.post("/abort_requests", {"request_ids": 5}).error[2] == "request_ids"
    assert admin.post("/abort_requests", [1]).status == 400


def test_the_admin_endpoint_calls_workers(admin, engine, monkeypatch):
    async def rpc(method, timeout, args, kwargs):
        if method == "fail":
            raise InvalidInput("collective_rpc: no worker has a method 'fail'")
        return [(method, timeout), {"args": list(args)}, kwargs, None, 5]

    monkeypatch.setattr(engine, "collective_rpc", rpc)
    body = {"method": "m", "args": ["a", 1], "kwargs": {"k": "v"}, "timeout": "3"}
    expected = ["('m', 3.0)", {"args": ["a", 1]}, {"k": "v"}, None, "5"]
    assert admin.post("/collective_rpc", body).json == {"results": expected}
    assert admin.post("/collective_rpc", {"method": "fail"}).error[0] == 400
    for wrong in (
        {},
        {"method": 5},
        {"method": "m", "timeout": 0},
        {"method": "m", "timeout": 1e300},
        {"method": "m", "args": "a"},
    ):
        assert admin.post("/collective_rpc", wrong).error[:2] == (400, "invalid_request_error")


def test_the_admin_endpoint_changes_the_number_of_ranks(admin, engine, monkeypatch):
    async def scale(size, drain_timeout_s):
        assert admin.json_of_scaling() == {"is_scaling_elastic_ep": True}
        if size == 9:
            raise TimeoutError("rank 3 didn't drain")
        if size == 8:
            raise PlacementShortage("7 ranks don't fit the cluster")
        engine.calls.append(("scale", size, drain_timeout_s))

    async def asked():
        return await admin.call("POST", "/is_scaling_elastic_ep")

    def json_of_scaling():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, asked()).result().json

    admin.json_of_scaling = json_of_scaling
    monkeypatch.setattr(engine, "scale", scale)
    answer = admin.post("/scale_elastic_ep", {"new_data_parallel_size": 2})
    assert answer.json == {"message": "Scaled to 2 data parallel engines"}
    assert admin.post("/scale_elastic_ep", {"new_data_parallel_size": 3, "drain_timeout": 7}).status == 200
    assert engine.calls == [("scale", 2, 120), ("scale", 3, 7)]
    assert admin.post("/scale_elastic_ep", {"new_data_parallel_size": 9}).error[0] == 408
    assert admin.post("/scale_elastic_ep", {"new_data_parallel_size": 8}).error == (
        400,
        "invalid_request_error",
        "new_data_parallel_size",
    )
    assert json_of_scaling() == {"is_scaling_elastic_ep": False}
    wrong_bodies = ({}, {"new_data_parallel_size": 0}, {"new_data_parallel_size": 10**18})
    for wrong in (*wrong_bodies, *({"new_data_parallel_size": 2, "drain_timeout": s} for s in (-1, 1e300))):
        assert admin.post("/scale_elastic_ep", wrong).error[0] == 400


def test_the_admin_endpoints_change_weights(admin, engine):
    assert admin.post("/init_weight_transfer_engine", {"init_info": {"port": 5}}).json == {
        "message": "Weight transfer initialized"
    }
    assert admin.post("/start_weight_update").json == {"message": "Weight update started"}
    for info in ({"names": ["a"]}, [{}, {}]):
        assert admin.post("/update_weights", {"update_info": info}).json == {"message": "Weights updated"}
    finished = {"message": "Weight update finished"}
    assert admin.post("/finish_weight_update", {"weight_version": "v1"}).json == finished
    assert admin.post("/finish_weight_update").json == finished
    assert admin.post("/cancel_weight_update").json == {"message": "Weight update cancelled"}
    assert admin.post("/reload_weights", {"path": "/new"}).json == {"message": "Weights reloaded"}
    assert admin.post("/reload_weights").json == {"message": "Weights reloaded"}
    renamed = admin.post("/update_weight_version", {"new_version": "v2"})
    assert renamed.json == {"success": True, "new_version": "v2"}
    assert admin.post("/shutdown_weight_transfer_engine").json == {"message": "Weight transfer shut down"}
    assert engine.calls == [
        ("init_weight_transfer_engine", {"init_info": {"port": 5}}),
        ("start_weight_update",),
        ("update_weights", {"update_info": {"names": ["a"]}}),
        ("update_weights", {"update_info": [{}, {}]}),
        ("finish_weight_update", "v1"),
        ("finish_weight_update", None),
        ("cancel_weight_update",),
        ("reload_weights", "/new", None),
        ("reload_weights", None, None),
        ("update_weight_version", "v2"),
        ("shutdown_weight_transfer_engine",),
    ]
    for path, body in (("/update_weights", {}), ("/update_weights", {"update_info": 5}), ("/reload_weights", [1])):
        assert admin.post(path, body).status == 400
    assert admin.get("/get_world_size").json == {"world_size": 1}
    assert admin.get("/get_world_size?include_dp=false").json == {"world_size": 1}


def test_the_admin_endpoint_says_what_the_weights_are_called(admin, engine, monkeypatch):
    async def version():
        return "v7"

    monkeypatch.setattr(engine, "get_weight_version", version)
    assert admin.get("/weight_info").json == {"weight_version": "v7"}
