"""raycore's engine in the deployments of `ray.serve.llm`. Without vLLM, a stand-in has the classes of its requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import shared_memory
from fake_ranks import live_groups
from job_cluster import STEP_S, eventually, free_ports
from number_formats import DTYPE
from openai_scenarios.table import EMBEDS, SCORES
from openai_servers import MODELS
from ray import serve
from vllm_protocol import write_vllm_protocol

from raycore import LLM
from raycore.demo import demo_model_path

pytest.importorskip("ray.llm._internal.serve.core.protocol", reason="needs the extra ray-serve")
pytestmark = pytest.mark.timeout(300)  # Serve has processes of its own to start

OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 200, "dtype": DTYPE, "standby_delay_s": None}
TEXTS = ["27 + 58 =", "what is it?", "85"]


def config(model_id: str, **kwargs: Any) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": model_id, "model_source": str(demo_model_path())},
        "engine_kwargs": OPTIONS | kwargs,
        "placement_group_config": {"bundles": [{"CPU": 0.5}]},
    }


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


class Program:
    """`ray_llm_program.py`, once its applications serve."""

    def __init__(self, address: str, configs: dict[str, Any], paths: list[str]) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        path = Path(__file__).parent / "ray_llm_program.py"
        self._process = subprocess.Popen(
            [sys.executable, str(path), address, str(port), json.dumps(configs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *paths])},
        )
        self._errors: list[str] = []
        reader = threading.Thread(target=lambda: self._errors.extend(self._process.stderr or ()), daemon=True)
        reader.start()
        assert self._next_line() == "ready"

    def call(self, app: str, method: str, kind: str, **fields: Any) -> list[Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps([app, method, kind, fields])}\n")
        self._process.stdin.flush()
        return json.loads(self._next_line())

    def end(self) -> None:
        self._process.communicate(timeout=STEP_S)

    def _next_line(self) -> str:
        assert self._process.stdout is not None
        killer = threading.Timer(3 * STEP_S, self._process.kill)
        killer.start()
        line = self._process.stdout.readline().strip()
        killer.cancel()
        assert line, "".join(self._errors)[-5000:]
        return line


@pytest.fixture(scope="module")
def program(address, profiles, tmp_path_factory) -> Iterator[Program]:
    shared_before = shared_memory.files()
    package = tmp_path_factory.mktemp("package")
    write_vllm_protocol(package)
    profiler = {"profiler": "torch", "torch_profiler_dir": str(profiles), "torch_profiler_use_gzip": False}
    configs = {
        "embeds": config("embeds", **MODELS[EMBEDS]),
        "scores": config("scores", **MODELS[SCORES]),
        "sums": config("sums", profiler_config=profiler),
    }
    program = Program(address, configs, [str(package)])
    yield program
    program.end()
    eventually(lambda: not live_groups(), lambda: str(live_groups()))
    assert shared_memory.abandoned_since(shared_before) == []


def posted(url: str, **body: Any) -> Any:
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_embeddings_are_those_of_the_engine_alone(program):
    with LLM(demo_model_path(), **OPTIONS, **MODELS[EMBEDS]) as llm:
        expected = [pytest.approx(each.outputs.embedding, abs=1e-5) for each in llm.embed(TEXTS, use_tqdm=False)]
    asks = {"model": "embeds", "input": TEXTS}
    ((kind, answer),) = program.call("embeds", "embeddings", "EmbeddingCompletionRequest", **asks)
    direct = posted(f"{program.url}/embeds/v1/embeddings", **asks)
    assert kind == "EmbeddingResponse"
    assert [each["embedding"] for each in answer["data"]] == expected
    assert [each["embedding"] for each in direct["data"]] == expected
    assert answer["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"] > 0


def test_scores_are_those_of_the_engine_alone(program):
    with LLM(demo_model_path(), **OPTIONS, **MODELS[SCORES]) as llm:
        expected = [pytest.approx(each.outputs.score, abs=1e-5) for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    asks = {"model": "scores", "text_1": TEXTS[0], "text_2": TEXTS}
    ((kind, answer),) = program.call("scores", "score", "ScoreRequest", **asks)
    direct = posted(f"{program.url}/scores/v1/score", **asks)
    assert kind == "ScoreResponse"
    assert [each["score"] for each in answer["data"]] == expected
    assert [each["score"] for each in direct["data"]] == expected


SUM = {"model": "sums", "prompt": TEXTS[0], "temperature": 0.0, "max_tokens": 8}


def test_texts_events_tokens_and_errors_are_those_of_the_api(program):
    ((kind, answer),) = program.call("sums", "completions", "CompletionRequest", **SUM)
    assert (kind, answer["choices"][0]["text"]) == ("CompletionResponse", " 85")
    events = program.call("sums", "completions", "CompletionRequest", **SUM, stream=True)
    assert text_of("".join(events).splitlines()) == " 85"
    ((kind, answer),) = program.call("sums", "tokenize", "TokenizeCompletionRequest", model="sums", prompt=TEXTS[0])
    assert kind == "TokenizeResponse"
    asks = {"model": "sums", "tokens": answer["tokens"]}
    ((kind, answer),) = program.call("sums", "detokenize", "DetokenizeRequest", **asks)
    assert (kind, answer["prompt"]) == ("DetokenizeResponse", TEXTS[0])
    ((kind, answer),) = program.call("sums", "completions", "CompletionRequest", **SUM | {"prompt": "9" * 1000})
    assert (kind, answer["error"]["code"]) == ("ErrorResponse", 400)
    assert "maximum context length is 200 tokens" in answer["error"]["message"]


def test_direct_streams_come_from_raycores_own_server(program):
    url = f"{program.url}/sums"
    assert posted(f"{url}/v1/completions", **SUM)["choices"][0]["text"] == " 85"
    with httpx.stream("POST", f"{url}/v1/completions", json={**SUM, "stream": True}, timeout=60) as answer:
        assert text_of(answer.iter_lines()) == " 85"
    assert [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]] == ["sums"]
    assert httpx.get(f"{url}/version").json()["version"]


def text_of(lines: Iterable[str]) -> str:
    """The text of a stream of events. One event has several tokens if they come faster than it is read."""
    *events, end = [line.removeprefix("data: ") for line in lines if line]
    assert end == "[DONE]"
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


@pytest.fixture
def app() -> Iterator[Callable[[str], Any]]:
    """Gives the handle of an application. A handle that isn't shut down goes on reporting its load."""
    with ExitStack() as handles:

        def handle(name: str) -> Any:
            made = serve.get_app_handle(name)
            handles.callback(made.shutdown)
            return made

        yield handle


def test_profiles_are_written_where_the_profiler_config_says(program, profiles, app):
    server = app("sums")
    server.start_profile.remote().result(timeout_s=60)
    posted(f"{program.url}/sums/v1/completions", **SUM)
    server.stop_profile.remote().result(timeout_s=60)
    assert list(profiles.iterdir())
    with pytest.raises(ray.exceptions.RayTaskError, match="profiles need the option profiler_config"):
        app("embeds").start_profile.remote().result(timeout_s=60)


def test_an_engine_sleeps_and_pauses_and_is_restored(program, app):
    server = app("sums")

    def call(method: str, **options: Any) -> Any:
        return getattr(server, method).remote(**options).result(timeout_s=60)

    call("sleep", level=1)
    assert call("is_sleeping")
    call("wakeup")
    call("pause")
    assert call("is_paused")
    call("resume")
    call("reset_prefix_cache")
    assert (call("is_sleeping"), call("is_paused")) == (False, False)
    assert posted(f"{program.url}/sums/v1/completions", **SUM)["choices"][0]["text"] == " 85"
