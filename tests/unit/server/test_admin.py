"""The paths that control the engine: served only on request, and only with an API key."""

from __future__ import annotations

import pytest

from raycore.errors import InvalidConfig
from raycore.server import ServerOptions

KEY = "secret"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def admin(serve):
    return serve(headers=AUTHORIZED, api_keys=(KEY,), enable_admin_endpoints=True)


POSTS = ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache")
GETS = ("/is_paused", "/is_sleeping")


def test_admin_paths_do_not_exist_without_enable_admin_endpoints(serve):
    client = serve(headers=AUTHORIZED, api_keys=(KEY,))
    assert {client.post(path).status for path in POSTS} | {client.get(path).status for path in GETS} == {404}


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
    assert admin.post("/wake_up").json == {"status": "awake", "tags": None}
    assert admin.get("/is_sleeping").json == {"is_sleeping": False}
    assert engine.calls == [("sleep", 1, "abort"), ("sleep", 0, "wait"), ("wake_up", tags), ("wake_up", None)]


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
