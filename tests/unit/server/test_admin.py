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


def test_without_the_option_there_are_no_such_paths(serve):
    client = serve(headers=AUTHORIZED, api_keys=(KEY,))
    assert client.post("/reset_prefix_cache").status == 404


def test_without_an_api_key_the_option_is_refused():
    with pytest.raises(InvalidConfig, match=r"--enable-admin-endpoints.*--api-key"):
        ServerOptions(("fake",), enable_admin_endpoints=True)


def test_without_the_key_nothing_is_done(serve, engine):
    client = serve(api_keys=(KEY,), enable_admin_endpoints=True)
    assert client.post("/reset_prefix_cache").status == 401
    assert engine.calls == []


def test_resetting_the_prefix_cache(admin, engine):
    assert admin.post("/reset_prefix_cache").json == {"success": False}
    query = "?reset_running_requests=true&reset_external=true"
    assert admin.post(f"/reset_prefix_cache{query}").json == {"success": True}
    assert engine.calls == [("reset_prefix_cache", False, False), ("reset_prefix_cache", True, True)]
    assert admin.post("/reset_prefix_cache?reset_running_requests=perhaps").status == 400


def test_profiles(admin, engine):
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
