"""Names on the hub are downloaded, from a local server that speaks as much of the hub's protocol as that takes."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from raycore.checkpoint.hub_cache import find_directory
from raycore.checkpoint.hub_download import complete_snapshot
from raycore.config import resolve
from raycore.demo import DEMO_MODEL_DIR
from raycore.errors import InvalidCheckpoint

NAME, COMMIT = "some-org/Demo-1.5", "c" * 40


class Hub(ThreadingHTTPServer):
    """Serves a repository under several names."""

    daemon_threads = True

    def __init__(self, files: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.read: list[str] = []
        """The files that were downloaded."""
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def names(self) -> list[str]:
        return sorted(each.relative_to(self.files).as_posix() for each in self.files.rglob("*") if each.is_file())


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.tokens.add(self.headers.get("authorization"))
        if "/gated" in path and self.headers.get("authorization") != "Bearer hf_good":
            self._error(403, "GatedRepo")
        elif "/other-org/" in path:
            self._error(404, "RepoNotFound")
        elif path.startswith("/api/models/"):
            revision = path.partition("/revision/")[2]
            if revision not in ("", "main", COMMIT):
                self._error(404, "RevisionNotFound")
                return
            siblings = [{"rfilename": name} for name in self.server.names()]
            if "/tree/" in path:
                body: Any = [self._entry(name) for name in self.server.names()]
            else:
                body = {"id": NAME, "sha": COMMIT, "siblings": siblings}
            self._send(json.dumps(body).encode(), "application/json")
        else:
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            data = (self.server.files / name).read_bytes()
            if self.command == "GET":
                self.server.read.append(name)
            etag = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(data, "application/octet-stream", etag)

    def _entry(self, name: str) -> dict[str, Any]:
        data = (self.server.files / name).read_bytes()
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, data: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    shutil.copytree(DEMO_MODEL_DIR, tmp_path / "files")
    for name in ("pytorch_model.bin", "consolidated.safetensors", "original/params.json", "model.onnx", "README.md"):
        (tmp_path / "files" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "files" / name).write_bytes(b"x")
    with Hub(tmp_path / "files") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        # made of the endpoint when huggingface_hub is imported
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{''.join(template[1:])}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def test_what_raycore_reads_is_downloaded_once(hub: Hub, cache: Path) -> None:
    config = resolve(NAME, download_dir=str(cache))
    path = cache / "models--some-org--Demo-1.5" / "snapshots" / COMMIT
    assert config.model.model == config.model.tokenizer == str(path)
    wanted = {each.name for each in DEMO_MODEL_DIR.iterdir() if each.suffix in (".json", ".safetensors", ".jinja")}
    assert sorted(hub.read) == sorted(wanted)
    hub.read.clear()
    hub.shutdown()
    assert resolve(NAME, download_dir=str(cache)) == config
    assert find_directory(NAME, revision=COMMIT, cache=str(cache)) == path
    assert hub.read == []


def test_the_tokenizer_alone_brings_no_weights(hub: Hub, cache: Path) -> None:
    config = resolve(str(DEMO_MODEL_DIR), tokenizer=NAME, tokenizer_revision="main", download_dir=str(cache))
    assert config.model.tokenizer.endswith(COMMIT)
    assert "tokenizer.json" in hub.read
    assert not [name for name in hub.read if name.endswith(".safetensors")]
    # a model of the same name needs the rest
    assert resolve(NAME, download_dir=str(cache)).model.model == config.model.tokenizer
    assert [name for name in hub.read if name.endswith(".safetensors")]


def test_a_node_completes_its_snapshot(hub: Hub, cache: Path, tmp_path: Path) -> None:
    config = resolve(NAME, download_dir=str(cache))
    path = Path(config.model.model)
    shutil.rmtree(cache)  # as on another node
    config.check_files()
    assert (path / "config.json").is_file()
    assert (path / "model.safetensors").is_file()
    hub.read.clear()
    complete_snapshot(path)
    complete_snapshot(tmp_path / "nothing")
    assert hub.read == []


def test_an_interrupted_download_goes_on(hub: Hub, cache: Path) -> None:
    path = find_directory(NAME, cache=str(cache))
    (path / "model.safetensors").unlink()
    assert find_directory(NAME, cache=str(cache)) == path
    assert (path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("other-org/none", None, "has no such model, or it is private and HF_TOKEN isn't set"),
        ("some-org/gated", None, "its owner has to grant you access"),
        (NAME, "v9", "at revision 'v9' isn't in the Hugging Face cache .* it has no such revision"),
    ],
)
def test_errors_of_the_hub_are_one_sentence(
    hub: Hub, cache: Path, name: str, revision: str | None, message: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=message) as raised:
        find_directory(name, revision=revision, cache=str(cache))
    assert str(raised.value).startswith(f"model={name!r} isn't a directory. model={name!r}")
    assert "\n" not in str(raised.value)


def test_a_token_opens_what_is_gated(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert find_directory("some-org/gated", cache=str(cache)).name == COMMIT
    assert hub.tokens == {"Bearer hf_good"}


def test_a_repository_without_safetensors_is_refused_before_anything_is_downloaded(hub: Hub, cache: Path) -> None:
    for each in hub.files.glob("*.safetensors"):
        each.unlink()
    with pytest.raises(InvalidCheckpoint, match="has no safetensors files"):
        find_directory(NAME, cache=str(cache))
    assert hub.read == []


@pytest.fixture
def ggufs(hub: Hub) -> Hub:
    """A repository of nothing but GGUF files, of which one model has two, and one more is in a folder."""
    for each in list(hub.files.iterdir()):
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    names = ("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf")
    for name in (*names, "mmproj-Q8_0.gguf", "BF16/m-BF16.gguf", "README.md", "params"):
        (hub.files / name).parent.mkdir(exist_ok=True)
        (hub.files / name).write_bytes(name.encode())
    return hub


@pytest.mark.parametrize(
    ("choice", "files"),
    [
        (":Q4_K_M", ["m-Q4_K_M.gguf"]),
        (":q4_k_m", ["m-Q4_K_M.gguf"]),
        ("/m-Q4_K_S.gguf", ["m-Q4_K_S.gguf"]),
        (":Q8_0", ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]),
        (":BF16", ["BF16/m-BF16.gguf"]),
        ("/BF16/m-BF16.gguf", ["BF16/m-BF16.gguf"]),
    ],
)
def test_a_gguf_file_is_downloaded_once(ggufs: Hub, cache: Path, choice: str, files: list[str]) -> None:
    snapshot = cache / "models--some-org--Demo-1.5" / "snapshots" / COMMIT
    assert find_directory(NAME + choice, cache=str(cache)) == snapshot / files[0]
    assert sorted(ggufs.read) == files
    ggufs.read.clear()
    complete_snapshot(snapshot / files[0])
    assert ggufs.read == []
    (snapshot / files[-1]).unlink()  # as on another node
    complete_snapshot(snapshot / files[0])
    assert (snapshot / files[-1]).read_bytes() == files[-1].encode()
    ggufs.shutdown()
    assert find_directory(NAME + choice, cache=str(cache)) == snapshot / files[0]
    assert find_directory(NAME + choice, revision=COMMIT, cache=str(cache)) == snapshot / files[0]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (":Q5_0", "has no GGUF file Q5_0: it has BF16/m-BF16.gguf, m-Q4_K_M.gguf, m-Q4_K_S.gguf, m-Q8_0-00001-of"),
        (":Q4_K", "has no GGUF file Q4_K: it has"),
        ("/m-Q2_K.gguf", "has no GGUF file m-Q2_K.gguf: it has"),
        ("", "has no config.json: it isn't a model that raycore can use, or give .*some-org/Demo-1.5/BF16/m-BF16.gguf"),
    ],
)
def test_the_gguf_files_of_a_repository_are_named_if_none_fits(
    ggufs: Hub, cache: Path, choice: str, message: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=message) as raised:
        find_directory(NAME + choice, cache=str(cache))
    assert str(raised.value).startswith(f"model={NAME + choice!r} isn't a ")
    assert ggufs.read == []


def test_a_gguf_file_whose_other_parts_are_missing_is_refused(ggufs: Hub, cache: Path) -> None:
    (ggufs.files / "m-Q8_0-00002-of-00002.gguf").unlink()
    with pytest.raises(
        InvalidCheckpoint, match=r"lacks m-Q8_0-00002-of-00002.gguf, one of the 2 files of m-Q8_0-00001"
    ):
        find_directory(f"{NAME}:Q8_0", cache=str(cache))
    (ggufs.files / "other-Q4_K_M.gguf").write_bytes(b"x")
    with pytest.raises(InvalidCheckpoint, match=r"has 2 GGUF files Q4_K_M: name one of m-Q4_K_M.gguf, other-Q4_K_M"):
        find_directory(f"{NAME}:Q4_K_M", cache=str(cache))


def test_without_a_network_the_cache_counts(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = find_directory(NAME, cache=str(cache))
    hub.shutdown()
    hub.server_close()
    assert find_directory(NAME, cache=str(cache)) == path
    with pytest.raises(InvalidCheckpoint, match="can't be downloaded: "):
        find_directory("some-org/missing", cache=str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_directory(NAME, cache=str(cache)) == path
    with pytest.raises(InvalidCheckpoint, match="HF_HUB_OFFLINE forbids to download it"):
        find_directory("some-org/missing", cache=str(cache))
