"""Adapters as models: those of the start, those that requests load, and which directories these may name."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from asgi_client import Answer, Client
from fake_engine import FakeEngine

from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig, InvalidRequest
from raycore.lora.request import LoRARequest
from raycore.parts.adapters.server.adapters import OfferedAdapter, OfferedAdapters, allowed_directory, check_adapters
from raycore.server import ServerOptions, build_app, load_adapters
from raycore.server.contract.models import Models
from raycore.server.http.errors import NotAllowed, NotFound
from raycore.server.options import LoraModule

KEY = "secret"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """A directory that requests may name, with an adapter `sums`."""
    make_adapter(tmp_path / "allowed" / "sums")
    return tmp_path / "allowed"


@pytest.fixture
def admin(serve, allowed: Path) -> Client:
    return serve(AUTHORIZED, api_keys=(KEY,), enable_admin_endpoints=True, allowed_lora_directories=(str(allowed),))


def make_adapter(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (path / name).touch()
    return path


def load(client: Client, name: str, path: Path | str, **fields: Any) -> Answer:
    return client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **fields})


def unload(client: Client, name: str, **fields: Any) -> Answer:
    return client.post("/v1/unload_lora_adapter", {"lora_name": name, **fields})


def names(client: Client) -> list[str]:
    return [model["id"] for model in client.get("/v1/models").json["data"]]


# ---- adapters of the start


def test_adapters_given_at_the_start_are_listed_as_models(serve, engine: FakeEngine, allowed: Path) -> None:
    path = str(allowed / "sums")
    client = serve(lora_modules=(LoraModule("sums", path), LoraModule("team/sums", path, "fake")))
    first, second = (call[1] for call in engine.calls if call[0] == "add_lora")
    assert (first.lora_name, first.lora_path, first.load_inplace) == ("sums", path, False)
    assert second.lora_int_id > first.lora_int_id

    data = client.get("/v1/models").json["data"]
    assert [(each["id"], each["root"], each["parent"]) for each in data] == [
        ("fake", str(demo_model_path()), None),
        ("sums", path, "fake"),
        ("team/sums", path, "fake"),
    ]
    assert client.get("/v1/models/team/sums").json == data[2]
    assert client.complete(model="sums").json["model"] == "sums"
    assert client.chat(model="sums").json["model"] == "sums"
    assert {event["model"] for event in client.chat(model="team/sums", stream=True).events} == {"team/sums"}
    assert {event["model"] for event in client.complete(model="sums", stream=True).events} == {"sums"}
    assert client.complete(model="fake").json["model"] == client.complete().json["model"] == "fake"
    client.complete(model="sums", prompt=["a", "b"])
    assert engine.loras == [first, first, second, first, None, None, first, first]

    for path in ("/tokenize", "/detokenize"):
        body = {"prompt": "a"} if path == "/tokenize" else {"tokens": [5]}
        assert client.post(path, {"model": "sums", **body}).status == 200
        assert client.post(path, {"model": "products", **body}).status == 404
    missing = client.complete(model="products")
    assert missing.error == (404, "invalid_request_error", "model")
    assert "served here: fake, sums, team/sums" in missing.json["error"]["message"]


def test_an_adapter_that_cannot_be_used_fails_the_start(engine: FakeEngine, tmp_path: Path) -> None:
    options = ServerOptions(("fake",), lora_modules=(LoraModule("sums", str(tmp_path / "none")),))
    with pytest.raises(InvalidConfig, match=r"lora_modules: 'sums': .*/none isn't a directory"):
        asyncio.run(load_adapters(engine, options))
    with pytest.raises(InvalidConfig, match=r"lora_modules: 'sums': .*/none' isn't a directory"):
        check_adapters({"model": demo_model_path(), "enable_lora": True}, options)
    check_adapters({"model": "/nowhere"}, ServerOptions(("fake",)))
    with pytest.raises(InvalidConfig, match="load_adapters"):
        build_app(engine, options)


def test_an_error_names_only_some_of_many_models() -> None:
    models = Models(("m",))
    models.set_adapters([OfferedAdapter(LoRARequest(f"a{i}", i, "/a"), "m", 0) for i in range(1, 100)])
    with pytest.raises(Exception, match=r"m, a1, .*, a19, … ") as raised:
        models.find("b")
    assert "a20" not in str(raised.value)


# ---- requests that load and unload them


def test_an_adapter_is_loaded_replaced_and_unloaded(admin: Client, engine: FakeEngine, allowed: Path) -> None:
    engine.lora_ids = {number := 10**6}
    assert load(admin, "sums", allowed / "sums").json == {"status": "loaded"}
    assert names(admin) == ["fake", "sums"]
    added = engine.calls[-1][1]
    assert admin.complete(model="sums").status == 200
    assert engine.loras == [added]

    assert load(admin, "sums", allowed / "sums").error == (400, "invalid_request_error", "lora_name")
    other = make_adapter(allowed / "below" / "other")
    assert load(admin, "sums", other, load_inplace=True).status == 200
    replaced = LoRARequest("sums", added.lora_int_id, str(other))
    assert engine.calls[-1] == ("add_lora", LoRARequest("sums", added.lora_int_id, str(other), load_inplace=True))
    assert admin.complete(model="sums").status == 200
    assert engine.loras == [added, replaced]
    # what can't be used replaces nothing
    assert load(admin, "sums", allowed / "none", load_inplace=True).status == 400
    assert admin.get("/v1/models/sums").json["root"] == str(other)

    assert unload(admin, "sums", lora_int_id=number).error == (400, "invalid_request_error", "lora_int_id")
    assert unload(admin, "sums", lora_int_id=added.lora_int_id).json == {"status": "unloaded"}
    assert engine.calls[-1] == ("remove_lora", added.lora_int_id)
    assert admin.complete(model="sums").status == 404
    assert names(admin) == ["fake"]
    assert unload(admin, "sums").error == (404, "invalid_request_error", "lora_name")
    assert load(admin, "sums", allowed / "sums").status == 200
    assert engine.calls[-1][1].lora_int_id > added.lora_int_id


def test_the_server_does_not_use_an_adapter_number_that_the_program_uses(
    admin: Client, engine: FakeEngine, allowed: Path
) -> None:
    assert load(admin, "a", allowed / "sums").status == 200
    last = engine.calls[-1][1].lora_int_id
    engine.lora_ids = {last + 1, last + 2}
    assert load(admin, "b", allowed / "sums").status == 200
    assert engine.calls[-1][1].lora_int_id == last + 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"lora_name": "fake"}, "lora_name"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": "x" * 2000}, "lora_name"),
        ({"lora_name": "\ud800"}, "lora_name"),
        ({"lora_name": None}, "lora_name"),
        ({"lora_path": "sums"}, "lora_path"),
        ({"lora_path": "~/sums"}, "lora_path"),
        ({"lora_path": "/a\0b"}, "lora_path"),
        ({"lora_path": ""}, "lora_path"),
        ({"load_inplace": "often"}, "load_inplace"),
        ({"is_3d_lora_weight": True}, "is_3d_lora_weight"),
    ],
)
def test_invalid_requests_to_load_adapters_are_refused_by_name(
    admin: Client, engine: FakeEngine, allowed: Path, fields: dict[str, Any], param: str
) -> None:
    body = {"lora_name": "sums", "lora_path": str(allowed / "sums"), **fields}
    assert admin.post("/v1/load_lora_adapter", body).error == (400, "invalid_request_error", param)
    assert engine.calls == []


def test_only_administrators_change_adapters(serve, engine: FakeEngine, allowed: Path) -> None:
    body = {"lora_name": "sums", "lora_path": str(allowed / "sums")}
    assert {serve().post(path, body).status for path in PATHS} == {404}
    options = {"api_keys": (KEY,), "enable_admin_endpoints": True}
    assert {serve(**options).post(path, body).status for path in PATHS} == {401}
    answer = serve(AUTHORIZED, **options).post(PATHS[0], body)
    assert answer.error == (403, "permission_error", "lora_path")
    assert "--allowed-lora-directories" in answer.json["error"]["message"]
    assert engine.calls == []


def test_the_openapi_document_takes_any_model_if_adapters_can_be_loaded(admin: Client, serve) -> None:
    def model(client: Client) -> Any:
        return client.get("/openapi.json").json["components"]["schemas"]["CompletionRequest"]["properties"]["model"]

    assert "enum" not in model(admin)
    assert model(serve())["enum"] == ["fake", None]
    assert set(PATHS) <= admin.get("/openapi.json").json["paths"].keys()


# ---- those who follow


class Subscriber:
    """Is told of the adapters, and knows them when `answer()` is called."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.replies: list[Future[None]] = []
        self.is_told = threading.Event()

    def __call__(self, adapters: Any) -> Future[None]:
        self.told.append([adapter.request.lora_name for adapter in adapters])
        self.replies.append(Future())
        self.is_told.set()
        return self.replies[-1]


def test_a_change_of_adapters_is_answered_when_all_subscribers_know_it(engine: FakeEngine, allowed: Path) -> None:
    adapters, subscriber = OfferedAdapters(engine, ServerOptions(("fake",))), Subscriber()

    async def change(call: Any) -> None:
        subscriber.is_told.clear()
        changing = asyncio.ensure_future(call)
        assert await asyncio.to_thread(subscriber.is_told.wait, 10)
        with pytest.raises(InvalidRequest, match="'sums' is being loaded or unloaded by another request"):
            await adapters.unload_lora_adapter("sums")
        assert not changing.done()
        subscriber.replies[-1].set_result(None)
        await changing

    async def run() -> None:
        path = str(allowed / "sums")
        adapters.subscribe(subscriber)
        await change(adapters.load("sums", path, None))
        await change(adapters.unload_lora_adapter("sums"))
        assert engine.calls[-1][0] == "remove_lora"
        assert subscriber.told == [[], ["sums"], []]
        # a process that has ended keeps nobody waiting, and the next one gets them all
        loading = asyncio.ensure_future(adapters.load("a", path, None))
        while len(subscriber.told) < 4:
            await asyncio.sleep(0.001)
        adapters.unsubscribe(subscriber)
        subscriber.replies[-1].set_exception(RuntimeError("the process has ended"))
        await loading
        adapters.unsubscribe(subscriber)
        await adapters.load("b", path, None)
        assert len(subscriber.told) == 4
        adapters.subscribe(later := Subscriber())
        assert later.told == [["a", "b"]]

    asyncio.run(asyncio.wait_for(run(), 20))


def test_an_adapter_name_can_be_loaded_again_after_an_error(engine: FakeEngine) -> None:
    adapters = OfferedAdapters(engine, ServerOptions(("fake",)))
    for _ in range(2):
        with pytest.raises(NotFound, match="lora_name='fake' isn't loaded"):
            asyncio.run(adapters.unload_lora_adapter("fake"))


# ---- which directories


def test_an_adapter_directory_below_an_allowed_one_is_accepted(allowed: Path, tmp_path: Path) -> None:
    real = str(allowed / "sums")
    link = tmp_path / "link"
    link.symlink_to(allowed)
    roundabout = f"{allowed}/../allowed/./sums/"
    for path in (real, roundabout, f"{link}/sums"):
        assert allowed_directory(path, [str(tmp_path / "none"), str(allowed)]) == real
    assert allowed_directory(real, [str(link)]) == real
    assert allowed_directory(real, ["/"]) == real
    assert allowed_directory(real, [real]) == real
    # caches of models keep files elsewhere, which is fine as long as that is allowed
    (allowed / "blob").touch()
    (allowed / "sums" / "adapter_config.json").unlink()
    (allowed / "sums" / "adapter_config.json").symlink_to("../blob")
    assert allowed_directory(real, [str(allowed)]) == real
    with pytest.raises(NotAllowed, match="is a link that leads out"):
        allowed_directory(real, [real])


def test_a_gguf_file_keeps_its_name(allowed: Path, tmp_path: Path) -> None:
    """Caches of models have links with the names, to files without."""
    (allowed / "blob").touch()
    (allowed / "a.gguf").symlink_to("blob")
    assert allowed_directory(str(allowed / "a.gguf"), [str(allowed)]) == str(allowed / "a.gguf")
    (tmp_path / "b.gguf").symlink_to(allowed / "blob")
    (allowed / "c.gguf").symlink_to(tmp_path / "none")
    for path in (tmp_path / "b.gguf", allowed / "c.gguf", tmp_path / "d.gguf", tmp_path / f"{'e' * 300}.gguf"):
        with pytest.raises(NotAllowed, match="isn't below a directory that this server allows"):
            allowed_directory(str(path), [str(allowed)])


def test_adapter_paths_elsewhere_get_one_error_whether_or_not_they_exist(allowed: Path, tmp_path: Path) -> None:
    outside = make_adapter(tmp_path / "outside")
    make_adapter(tmp_path / "allowed too")
    (allowed / "link").symlink_to(outside)
    (allowed / "dangling").symlink_to(tmp_path / "none")
    there = [outside, f"{allowed} too", f"{allowed}/../outside", f"{allowed}/link", f"{allowed}/sums/../../outside"]
    absent = [tmp_path / "none", f"{allowed} none", f"{allowed}/../none", f"{allowed}/dangling", "/"]
    messages: set[str] = set()
    for path in map(str, (*there, *absent)):
        with pytest.raises(NotAllowed) as raised:
            allowed_directory(path, [str(allowed)])
        messages.add(str(raised.value).replace(repr(path), "PATH"))
    assert len(messages) == 1, "it differs by what exists"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_a_link_to_the_outside_is_not_opened(
    admin: Client, engine: FakeEngine, allowed: Path, tmp_path: Path, name: str
) -> None:
    secret = tmp_path / "secret"
    secret.touch()
    link = allowed / "sums" / name
    link.unlink()
    messages: set[str] = set()
    for target in (secret, tmp_path / "none"):
        link.symlink_to(target)
        answer = load(admin, "sums", allowed / "sums")
        assert answer.error == (403, "permission_error", "lora_path")
        messages.add(answer.json["error"]["message"])
        link.unlink()
    assert len(messages) == 1
    assert name in messages.pop()
    assert engine.calls == []
