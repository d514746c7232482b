"""Each door of a server takes what a KV connector is told, and returns what it tells."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from asgi_client import Client
from fake_engine import FakeEngine

from raycore.errors import InvalidRequest
from raycore.messages import TokenReport
from raycore.outputs import RequestOutput
from raycore.parts.transfers.values import PARAMS
from raycore.sampling_params import SamplingParams
from raycore.server import ServerOptions, build_app

MESSAGES = [{"role": "user", "content": "a"}]
TOLD = {"do_remote_prefill": True, "remote": {"block_ids": [1, 2]}}
CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [5, 6, 7], "n": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}),
    ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"n": 2}}),
]
MESSAGE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 8, "model": "fake"}),
]


class Echo:
    """Tells of sequences that have ended what their request has told. An `OutputPart`, and what it begins."""

    name: ClassVar[str] = "echo"

    def is_asked(self, params: SamplingParams) -> bool:
        return True

    def begin(self, params: SamplingParams) -> Echo:
        self.heard = (params.extra_args or {}).get(PARAMS)
        return self

    def take(self, index: int, report: TokenReport) -> None:
        raise AssertionError("nothing is reported")

    def add_to(self, output: RequestOutput) -> None:
        for each in output.outputs:
            if each.finish_reason is not None and self.heard is not None:
                each.kv_transfer_params = {"heard": self.heard, "of": each.index}
        output.kv_transfer_params = output.outputs[0].kv_transfer_params


def ask(path: str, body: dict[str, Any], *, takes: bool = True) -> Any:
    engine = FakeEngine()
    if takes:
        engine.output_parts = [Echo()]
        engine.check_params = lambda params: None
    return Client(build_app(engine, ServerOptions(("fake",)))).post(path, body)


def told(index: int) -> dict[str, Any]:
    return {"heard": TOLD, "of": index}


@pytest.mark.parametrize(("path", "body"), CHOICES)
def test_each_choice_has_what_the_connector_tells_of_it(path: str, body: dict[str, Any]) -> None:
    answer = ask(path, body | {PARAMS: TOLD}).json
    assert [each[PARAMS] for each in answer["choices"]] == [told(0), told(1)]
    assert answer[PARAMS] == told(0)


@pytest.mark.parametrize(("path", "body"), CHOICES)
def test_each_choice_of_a_stream_ends_with_it(path: str, body: dict[str, Any]) -> None:
    events = ask(path, body | {PARAMS: TOLD, "stream": True}).events
    choices = [choice for event in events for choice in event["choices"]]
    assert sorted((each["index"], each[PARAMS]["of"]) for each in choices if PARAMS in each) == [(0, 0), (1, 1)]
    assert all((PARAMS in each) == (each["finish_reason"] is not None) for each in choices)


@pytest.mark.parametrize(("path", "body"), MESSAGE)
def test_messages_and_responses_have_it(path: str, body: dict[str, Any]) -> None:
    assert ask(path, body | {PARAMS: TOLD}).json[PARAMS] == told(0)
    stream = ask(path, body | {PARAMS: TOLD, "stream": True}).body.decode()
    assert stream.count(f'"{PARAMS}"') == 1


@pytest.mark.parametrize(("path", "body"), [*CHOICES, *MESSAGE])
def test_without_any_there_is_nothing(path: str, body: dict[str, Any]) -> None:
    for fields in ({}, {PARAMS: {}}, {PARAMS: None}):
        answer = ask(path, body | fields).json
        assert answer.get(PARAMS) is None
        assert all(PARAMS not in choice for choice in answer.get("choices", ()))


@pytest.mark.parametrize(("path", "body"), [*CHOICES, *MESSAGE])
def test_without_a_connector_they_are_refused(path: str, body: dict[str, Any]) -> None:
    answer = ask(path, body | {PARAMS: TOLD}, takes=False)
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith(PARAMS)


def test_values_of_vllm_xargs_stay_beside_them() -> None:
    seen: list[Any] = []
    engine = FakeEngine()

    def note(params: SamplingParams) -> None:
        seen.append(params.extra_args)
        raise InvalidRequest("enough")

    engine.check_params = note
    body = {"prompt": [5], "vllm_xargs": {"a": 1}, PARAMS: TOLD}
    assert Client(build_app(engine, ServerOptions(("fake",)))).post("/v1/completions", body).status == 400
    body = {"token_ids": [5], "sampling_params": {"extra_args": {"a": 1}}, PARAMS: TOLD}
    assert Client(build_app(engine, ServerOptions(("fake",)))).post("/inference/v1/generate", body).status == 400
    assert seen == [{"a": 1, PARAMS: TOLD}] * 2


def test_a_beam_search_cannot_have_them() -> None:
    answer = ask("/v1/completions", {"prompt": [5], "use_beam_search": True, "n": 2, PARAMS: TOLD})
    assert answer.error == (400, "invalid_request_error", PARAMS)
