"""LoRA adapters as models of two API servers: those of the start, those that requests load, and hostile ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft_adapters import save_demo_adapter
from programs import Program, raycore
from waiting import eventually

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path
from raycore.lora.request import LoRARequest
from raycore.node.processes import is_running

KEY = "secret"
PROMPT = [20, 31, 42, 53]
NUM_TOKENS = 12
ENGINE_FLAGS = ["--enable-lora", "--dtype", "float32", "--max-model-len", "1024", "--num-threads", "1"]
NUM_TRIES = 12
"""So many connections reach both servers, as good as always."""

Reference = dict[str, list[int]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that requests may name, with the adapters `adapter 1` to `adapter 3`."""
    directory = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2, 3):
        save_demo_adapter(directory, seed)
    return directory


@pytest.fixture(scope="module")
def expected(ray_cluster, directory: Path) -> Reference:
    """What `LLM` generates, by the adapter's directory; for the model itself, by `demo`."""
    paths = ["demo", "adapter 1", "adapter 2", "adapter 3"]
    adapters = [LoRARequest(path, i, str(directory / path)) if i else None for i, path in enumerate(paths)]
    params = SamplingParams(temperature=1, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(
        demo_model_path(), enable_lora=True, max_loras=3, dtype="float32", max_model_len=1024, num_threads=1
    ) as llm:
        outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False, lora_request=adapters)
    found = {path: output.outputs[0].token_ids for path, output in zip(paths, outputs, strict=True)}
    assert len(set(map(tuple, found.values()))) == 4
    return found


@pytest.fixture(scope="module")
def program(address: str, expected: Reference, directory: Path) -> Iterator[Program]:
    flags = ["--api-server-count", "2", "--port", "0", "--served-model-name", "demo", "--max-loras", "2"]
    flags += ["--lora-modules", f"first={directory / 'adapter 1'}", "--enable-admin-endpoints"]
    flags += ["--allowed-lora-directories", str(directory), *ENGINE_FLAGS]
    environment = {"RAY_ADDRESS": address, "RAYCORE_API_KEY": KEY}
    with Program(raycore("serve", *flags), environment=environment) as program:
        program.wait_for("raycore: serving")
        yield program
        program.process.send_signal(signal.SIGTERM)
        assert program.wait_for_exit(30) == 0
    assert KEY not in program.output


class Api:
    """A client whose every request has a connection of its own, so that either server may get it."""

    def __init__(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {KEY}", "Connection": "close"}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)

    def complete(self, model: str, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=self.body(model, **fields))

    @staticmethod
    def body(model: str, **fields: Any) -> dict[str, Any]:
        drawn = {"temperature": 1, "seed": 1, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        return {"model": model, "prompt": PROMPT, "return_token_ids": True, **drawn, **fields}

    def tokens(self, model: str) -> list[int]:
        answer = self.complete(model)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return answer.json()["choices"][0]["token_ids"]

    def streamed(self, model: str, on_event: Callable[[], object] = lambda: None, **fields: Any) -> list[int]:
        found: list[int] = []
        body = self.body(model, stream=True, **fields)
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data not in ("", "[DONE]"):
                    event = json.loads(data)
                    assert event["model"] == model, event
                    found += event["choices"][0]["token_ids"]
                    on_event()
        return found

    def load(self, name: str, path: Path | str, **fields: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(path), **fields}
        return self.client.post("/v1/load_lora_adapter", json=body)

    def unload(self, name: str) -> httpx.Response:
        return self.client.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def models(self) -> list[tuple[str, str, str | None]]:
        data = self.client.get("/v1/models").json()["data"]
        return [(each["id"], each["root"], each["parent"]) for each in data]


@pytest.fixture(scope="module")
def api(program: Program) -> Iterator[Api]:
    api = Api(re.findall(r"on (http://\S+)", program.output)[0])
    with api.client:
        yield api


def test_an_adapter_given_at_the_start_is_served_as_a_model(api: Api, directory: Path, expected: Reference) -> None:
    listed = [("demo", str(demo_model_path()), None), ("first", str(directory / "adapter 1"), "demo")]
    for _ in range(NUM_TRIES):
        assert api.models() == listed
    for name, path in (("demo", "demo"), ("first", "adapter 1")):
        assert [api.tokens(name) for _ in range(4)] == [expected[path]] * 4
        assert [api.streamed(name) for _ in range(4)] == [expected[path]] * 4
    chat = {"model": "first", "messages": [{"role": "user", "content": "27 + 58 ="}], "max_tokens": 4}
    answer = api.client.post("/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["model"]) == (200, "first")


def test_metrics_name_the_adapters_in_use(api: Api) -> None:
    seen: set[str] = set()

    def look() -> None:
        if "first" not in seen:
            metrics = api.client.get("/metrics").text
            info = r'vllm:lora_requests_info{engine="0",max_lora="2",running_lora_adapters="([^"]*)"'
            seen.update(re.findall(info, metrics))

    for _ in range(20):  # a stream may end before the metrics are updated
        api.streamed("first", look, max_tokens=1000)
        if "first" in seen:
            break
    assert "first" in seen


def test_an_adapter_loaded_or_unloaded_on_one_server_is_known_to_all_servers_at_once(
    api: Api, directory: Path, expected: Reference
) -> None:
    for name, path in (("second", "adapter 2"), ("third", "adapter 3")):
        assert api.load(name, directory / path).json() == {"status": "loaded"}
        assert [api.tokens(name) for _ in range(NUM_TRIES)] == [expected[path]] * NUM_TRIES
    again = api.load("second", directory / "adapter 3")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    assert api.load("second", directory / "adapter 3", load_inplace=True).status_code == 200
    assert [api.tokens("second") for _ in range(NUM_TRIES)] == [expected["adapter 3"]] * NUM_TRIES

    # what is in progress finishes
    unloaded: list[int] = []

    def unload() -> None:
        if not unloaded:
            unloaded.append(api.unload("third").status_code)

    tokens = api.streamed("third", unload, max_tokens=600)
    assert (unloaded, len(tokens), tokens[:NUM_TOKENS]) == ([200], 600, expected["adapter 3"])
    assert {api.complete("third").status_code for _ in range(NUM_TRIES)} == {404}
    assert api.unload("third").status_code == 404
    assert [name for name, *_ in api.models()] == ["demo", "first", "second"]


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "adapter_config.json").read_text())


def write_config(path: Path, **values: Any) -> None:
    (path / "adapter_config.json").write_text(json.dumps(config_of(path) | values))


def truncate(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def link_out(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    shutil.move(weights, path.parents[1] / "weights")
    weights.symlink_to(path.parents[1] / "weights")


HOSTILE: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "not JSON": (lambda path: (path / "adapter_config.json").write_bytes(b"\xff{"), 400, "isn't valid JSON"),
    "deep": (lambda path: (path / "adapter_config.json").write_text("[" * 200_000), 400, "adapter_config.json"),
    "large": (lambda path: (path / "adapter_config.json").write_bytes(bytes(2 << 20)), 400, "has 2097152 bytes"),
    "kind": (lambda path: write_config(path, use_dora=True), 400, "DoRA isn't supported"),
    "shape": (lambda path: write_config(path, r=3), 400, "because of r=3"),
    "rank": (lambda path: write_config(path, r=10**30), 400, "max_lora_rank"),
    "truncated": (truncate, 400, "is damaged or wasn't downloaded completely"),
    "header": (
        lambda path: (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 1 << 60)),
        400,
        "isn't a safetensors file of an adapter",
    ),
    "pipe": (
        lambda path: [(path / "adapter_config.json").unlink(), os.mkfifo(path / "adapter_config.json")],
        400,
        "isn't a file",
    ),
    "gone": (lambda path: (path / "adapter_model.safetensors").unlink(), 400, "doesn't exist"),
    "link": (link_out, 403, "adapter_model.safetensors is a link that leads out"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_adapter_gets_one_error_and_the_engine_serves_on(
    api: Api, directory: Path, expected: Reference, tmp_path: Path, kind: str
) -> None:
    spoil, status, message = HOSTILE[kind]
    path = directory / kind
    shutil.copytree(directory / "adapter 2", path)
    try:
        spoil(path)
        answer = api.load("hostile", path)
    finally:
        shutil.rmtree(path)
        (directory.parent / "weights").unlink(missing_ok=True)
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    said = answer.json()["error"]["message"]
    assert message in said
    assert len(said) < 2000
    assert api.complete("hostile").status_code == 404
    assert api.tokens("first") == expected["adapter 1"]


def test_adapter_paths_outside_the_allowed_directories_get_one_answer_whether_or_not_they_exist(
    api: Api, directory: Path
) -> None:
    messages: set[str] = set()
    for path in ("/etc", "/nowhere", f"{directory}/../..", f"{directory}/../nowhere"):
        answer = api.load("outside", path)
        assert answer.status_code == 403, answer.text
        messages.add(answer.json()["error"]["message"].replace(repr(path), "PATH"))
    assert len(messages) == 1


def test_a_server_that_replaces_another_knows_the_adapters(
    program: Program, api: Api, directory: Path, expected: Reference
) -> None:
    assert api.load("late", directory / "adapter 2").status_code == 200

    def servers() -> list[int]:
        found = map(int, re.findall(r"API server \d is serving \(pid (\d+)\)", program.output))
        return [pid for pid in found if is_running(pid)]

    for pid in servers():  # one after the other, so that both are new ones
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: pid not in servers() and len(servers()) >= 2, lambda: program.output)
    for _ in range(NUM_TRIES):
        assert [name for name, *_ in api.models()] == ["demo", "first", "second", "late"]
    assert [api.tokens("late") for _ in range(4)] == [expected["adapter 2"]] * 4
    assert api.unload("late").status_code == 200
    assert {api.complete("late").status_code for _ in range(NUM_TRIES)} == {404}


def test_an_adapter_that_cannot_be_used_fails_the_start(address: str, directory: Path, tmp_path: Path) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1"}}\n')
    adapters = ["--lora-modules", f"first={directory / 'adapter 1'}", f"second={tmp_path}"]
    run = subprocess.run(
        raycore("run-batch", "-i", str(requests), "-o", str(tmp_path / "out.jsonl"), *ENGINE_FLAGS, *adapters),
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 1
    error = run.stderr.splitlines()[-1]
    assert error.startswith("raycore: lora_modules: 'second': "), run.stderr
    assert f"{tmp_path}/adapter_config.json doesn't exist" in error
    assert "Traceback" not in run.stderr
