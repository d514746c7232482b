"""What becomes of each line of a batch, on an engine that answers at once, when it is told to, or never."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asgi_client import Client
from fake_engine import EMBEDS, FakeEngine

from raycore.cli.batch_progress import Tally
from raycore.client.inputs import OnlyText
from raycore.demo import demo_model_path
from raycore.errors import EngineDeadError, RequestFailed
from raycore.lora.request import LoRARequest
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.parts.adapters.server.adapters import OfferedAdapter
from raycore.server import ServerOptions, build_app
from raycore.server.batch.files import RequestFile, Result
from raycore.server.batch.runner import run_lines
from raycore.server.contract.models import Models
from raycore.text.tokenizer import Tokenizer

OPTIONS = ServerOptions(("demo", "other"))
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Engine:
    """Continues each prompt with its own text, once it may."""

    max_model_len = 64
    max_http_logprobs = 20
    unavailable_reason = None
    pooling_spec = None
    images = OnlyText("demo")
    default_sampling_params: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_running = self.most_running = 0
        self.error: BaseException | None = None
        self.loras: list[LoRARequest | None] = []
        self.finish_reason = "stop"
        self._tokenizer = Tokenizer.from_dir(demo_model_path())

    def check(self, prompt, params) -> None:
        pass

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def ask(self, asks):
        (ask,) = asks
        self.loras.append(ask.lora)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.may_answer.wait()
            if self.error is not None:
                raise self.error
            ids = ask.parsed.token_ids
            output = CompletionOutput(0, self._tokenizer.decode(ids), ids, finish_reason=self.finish_reason)
            yield RequestOutput(ask.request_id, None, ids, outputs=[output], finished=True)
        finally:
            self.num_running -= 1


def line(custom_id: str, url: str = "/v1/completions", method: str = "POST", **body: Any) -> str:
    body = body or {"prompt": f"{custom_id} ="}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


class Batch:
    """A batch under way, or done."""

    def __init__(self, path: Path, *lines: str, max_concurrent: int = 4, engine: Any = None) -> None:
        path.write_text("".join(f"{line}\n" for line in lines))
        self.engine = engine or Engine()
        self.results: list[Result] = []
        self.is_stopping = False
        self._lines = RequestFile(path).lines(set())
        self._max_concurrent = max_concurrent
        self.models = Models(OPTIONS.served_model_names)

    async def run(self, options: ServerOptions = OPTIONS) -> None:
        await run_lines(
            self.engine,
            options,
            self.models,
            self._lines,
            self.results.append,
            max_concurrent=self._max_concurrent,
            is_stopping=lambda: self.is_stopping,
        )

    async def until_running(self, count: int) -> None:
        while self.engine.num_running < count:
            await asyncio.sleep(0)

    @property
    def ids(self) -> list[str | None]:
        return [result.custom_id for result in self.results]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "in.jsonl"


def test_a_line_may_name_an_adapter(path):
    async def test():
        batch = Batch(path, line("a", prompt="1", model="sums"), line("b", prompt="1", model="products"))
        adapter = LoRARequest("sums", 1, "/sums")
        batch.models.set_adapters([OfferedAdapter(adapter, "demo", 0)])
        await batch.run()
        found, missing = sorted(batch.results, key=lambda result: result.custom_id)
        assert (found.response.status_code, found.response.body["model"]) == (200, "sums")
        assert batch.engine.loras == [adapter]
        assert (missing.response.status_code, missing.error["code"]) == (404, "model_not_found")

    asyncio.run(test())


def test_batch_results_have_the_servers_answers(path):
    async def test():
        chat = {"messages": [{"role": "user", "content": "1 + 2 ="}], "model": "other"}
        batch = Batch(path, line("a", prompt="27 + 58 ="), line("b", "/v1/chat/completions", **chat), max_concurrent=1)
        await batch.run(ServerOptions(("demo", "other"), chat_template=TEMPLATE))
        first, second = batch.results
        assert (first.custom_id, first.error, first.response.status_code) == ("a", None, 200)
        assert first.response.body["object"] == "text_completion"
        assert first.response.body["model"] == "demo"
        assert first.response.body["choices"][0]["text"] == "27 + 58 ="
        assert first.response.body["usage"]["total_tokens"] == 2 * first.response.body["usage"]["prompt_tokens"] > 0
        assert second.response.body["object"] == "chat.completion"
        assert second.response.body["model"] == "other"
        assert second.response.body["choices"][0]["message"]["content"] == "1 + 2 ="
        assert len({first.id, second.id, first.response.request_id, second.response.request_id}) == 4

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_batch_has_responses(path):
    async def test():
        batch = Batch(
            path, *(line(name, "/v1/responses", **body) for name, body in RESPONSES.items()), max_concurrent=1
        )
        await batch.run(ServerOptions(("demo",), chat_template=TEMPLATE))
        first, *others = batch.results
        body = first.response.body
        assert (body["object"], body["status"], body["store"]) == ("response", "completed", False)
        assert body["output"][0]["content"][0]["text"] == "1 + 2 ="
        tally = Tally(len(RESPONSES), 0)
        tally.note(first)
        assert tally.num_tokens == body["usage"]["output_tokens"] > 0
        assert [each.response.body["error"]["param"] for each in others] == [
            "stream",
            "background",
            "previous_response_id",
            "input",
        ]

    asyncio.run(asyncio.wait_for(test(), 30))


RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": "1 + 2 ="},
    "stream": {"input": "1", "stream": True},
    "background": {"input": "1", "background": True},
    "previous": {"input": "1", "previous_response_id": "resp_1"},
    "reference": {"input": [{"type": "item_reference", "id": "msg_1"}]},
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON", "line 1: JSON is malformed"),
        ("[1]", "line 1: expected an object"),
        ('{"method": "POST"}', "line 1: custom_id is missing"),
        ('{"custom_id": 7}', "line 1: custom_id: expected a string"),
        ('{"custom_id": "", "method": "POST", "url": "/v1/completions", "body": {}}', "line 1: custom_id is empty"),
        ('{"custom_id": "bad", "method": "POST", "url": "/v1/completions"}', "line 1: body is missing"),
        (
            '{"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": []}',
            "line 1: body: expected an object",
        ),
        (line("bad", method="GET"), "line 1: method 'GET'"),
        (line("bad", url="/tokenize"), "line 1: url '/tokenize'"),
        (line("bad", url="https://[api/v1/models"), "line 1: url 'https://[api/v1/models'"),
        (line("bad", url="ftp://api/v1/completions"), "line 1: url 'ftp://api"),
    ],
)
def test_an_invalid_line_gets_a_result_with_the_error_and_the_others_are_answered(path, text, message):
    async def test():
        batch = Batch(path, text, line("good"), max_concurrent=1)
        await batch.run()
        bad, good = batch.results
        assert bad.custom_id == ("bad" if '"bad"' in text else None)
        assert (bad.response, bad.error["code"]) == (None, "invalid_line")
        assert message in bad.error["message"]
        assert (good.custom_id, good.error) == ("good", None)

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": ""}, 400, "nothing to continue"),
        ({"prompt": "1", "temperature": -1}, 400, "temperature=-1"),
        ({"prompt": "1", "max_tokens": "many"}, 400, "max_tokens: "),
        ({"prompt": "1 " * 99}, 400, "maximum context length is 64 tokens"),
        ({"prompt": "1", "stream": True}, 400, "isn't supported in batches"),
        ({"prompt": "1", "model": "gpt"}, 404, "served here: demo, other"),
    ],
)
def test_a_request_that_cannot_be_run_has_the_servers_error(path, body, status, message):
    async def test():
        batch = Batch(path, line("bad", **body), line("good"), max_concurrent=1)
        await batch.run()
        bad, good = batch.results
        assert (bad.custom_id, bad.response.status_code) == ("bad", status)
        assert message in bad.response.body["error"]["message"]
        assert bad.error["message"] == bad.response.body["error"]["message"]
        assert bad.error["code"]
        assert good.error is None

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize("error", [RequestFailed("3 ranks failed"), ZeroDivisionError("a bug")])
def test_a_failed_batch_request_does_not_affect_the_others(path, error):
    async def test():
        batch = Batch(path, line("a"), line("b"), max_concurrent=1)
        batch.engine.error = error
        batch.engine.may_answer.clear()
        running = asyncio.ensure_future(batch.run())
        await batch.until_running(1)
        batch.engine.may_answer.set()
        while not batch.results:
            await asyncio.sleep(0)
        batch.engine.error = None
        await running
        assert [result.response.status_code for result in batch.results] == [500, 200]

    asyncio.run(asyncio.wait_for(test(), 30))


def test_at_most_max_concurrent_requests_run_at_a_time_and_all_are_answered(path):
    async def test():
        batch = Batch(path, *(line(str(number)) for number in range(300)), max_concurrent=7)
        batch.engine.may_answer.clear()
        running = asyncio.ensure_future(batch.run())
        await batch.until_running(7)
        for _ in range(20):
            await asyncio.sleep(0)
        batch.engine.may_answer.set()
        await running
        assert batch.engine.most_running == 7
        assert sorted(map(int, batch.ids)) == list(range(300))

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize("end", ["finish", "abort", "refuse"])
def test_a_stopped_batch_keeps_finished_results_and_begins_no_request(path, end):
    async def test():
        batch = Batch(path, *(line(str(number)) for number in range(9)), max_concurrent=2)
        batch.engine.may_answer.clear()
        running = asyncio.ensure_future(batch.run())
        await batch.until_running(2)
        batch.is_stopping = True
        batch.engine.finish_reason = "abort" if end == "abort" else "stop"
        batch.engine.error = EngineDeadError("draining") if end == "refuse" else None
        batch.engine.may_answer.set()
        await running
        assert batch.ids == (["0", "1"] if end == "finish" else [])

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize(
    "url",
    [
        "https://api.openai.com/v1/completions",
        "http://10.0.0.1:8000/v1/completions?api-version=1",
        "https://gateway/tenant/openai/v1/completions",
    ],
)
def test_a_line_may_name_a_path_as_a_whole_url(path, url):
    async def test():
        batch = Batch(path, line("a", url, prompt="1 ="))
        await batch.run()
        (result,) = batch.results
        assert (result.error, result.response.body["object"]) == (None, "text_completion")

    asyncio.run(test())


POOLED = {
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64"},
    "/v2/embed": {"texts": ["a", "b"], "embedding_types": ["float", "base64"]},
    "/pooling": {"input": "a", "task": "token_embed"},
    "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/rerank": {"query": "a", "documents": ["b", "c"]},
}


def test_a_batch_of_a_model_that_pools_has_the_servers_answers(path):
    async def test():
        lines = [line(url, url, **body) for url, body in POOLED.items()]
        batch = Batch(path, *lines, line("chat", "/v1/chat/completions"), engine=FakeEngine(pooling=EMBEDS))
        await batch.run()
        found = {result.custom_id: json.loads(msgspec.json.encode(result)) for result in batch.results}
        tally = Tally(len(POOLED), 0)
        for result in batch.results:
            tally.note(result)
        num_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in batch.engine.prompts)
        assert (tally.num_done, tally.num_failed, tally.num_tokens) == (len(POOLED), 1, num_tokens)
        client = Client(build_app(batch.engine, OPTIONS))
        for url, body in POOLED.items():
            over_http = (await client.call("POST", url, body)).json
            in_batch = found[url]["response"]["body"]
            assert (found[url]["error"], found[url]["response"]["status_code"]) == (None, 200)
            own = ("id", "created")
            assert {name: value for name, value in in_batch.items() if name not in own} == {
                name: value for name, value in over_http.items() if name not in own
            }
        assert found["chat"]["response"]["status_code"] == 404
        assert "raycore serve MODEL --runner generate" in found["chat"]["error"]["message"]

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": ""}, 400, "has no tokens"),
        ({"inputs": "a"}, 400, "give exactly one of input and messages"),
        ({"input": "a", "encoding_format": "bytes"}, 400, "bytes aren't supported in batches"),
    ],
)
def test_a_request_that_cannot_be_pooled_has_the_servers_error(path, body, status, message):
    async def test():
        batch = Batch(path, line("bad", "/v1/embeddings", **body), engine=FakeEngine(pooling=EMBEDS))
        await batch.run()
        (bad,) = batch.results
        assert bad.response.status_code == status
        assert message in bad.error["message"]

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_batch_of_a_model_that_generates_says_what_pools(path):
    async def test():
        batch = Batch(path, line("a", "/v1/embeddings", input="a"))
        await batch.run()
        (refused,) = batch.results
        assert refused.response.status_code == 404
        assert "raycore serve MODEL --runner pooling" in refused.error["message"]

    asyncio.run(asyncio.wait_for(test(), 30))


def test_requests_that_are_aborted_when_a_batch_stops_have_no_result(path):
    async def test():
        batch = Batch(path, line("a", "/v1/embeddings", input="a"), engine=FakeEngine(pooling=EMBEDS))

        def stop():
            batch.is_stopping = True
            raise RequestFailed("request embd-1 was aborted")

        batch.engine.before_result = stop
        await batch.run()
        assert batch.results == []

    asyncio.run(asyncio.wait_for(test(), 30))


def test_an_engine_that_dies_ends_the_batch_and_leaves_lines_undone(path):
    async def test():
        batch = Batch(path, *(line(str(number)) for number in range(9)), max_concurrent=3)
        batch.engine.error = EngineDeadError("dp0 died")
        with pytest.raises(EngineDeadError, match="dp0 died"):
            await batch.run()
        assert batch.results == []
        assert batch.engine.num_running == 0

    asyncio.run(asyncio.wait_for(test(), 30))
