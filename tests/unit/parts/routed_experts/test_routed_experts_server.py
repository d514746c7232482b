"""Responses have the experts of a choice's tokens where it ends, as vLLM's clients read them."""

from __future__ import annotations

import base64
import io
from typing import Any, ClassVar

import numpy as np
import pytest
from asgi_client import Client
from fake_engine import FakeEngine

from raycore.messages import TokenReport
from raycore.outputs import RequestOutput
from raycore.sampling_params import SamplingParams
from raycore.server import ServerOptions, build_app

MESSAGES = [{"role": "user", "content": "a"}]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [5, 6, 7], "n": 2}),
    ("/v1/completions", {"prompt": [5, 6, 7], "n": 2, "max_tokens": 0, "echo": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}),
    ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"n": 2}}),
]


class Numbers:
    """Sets the experts of sequences that have ended, to the sequence's number. An `OutputPart`, and what it begins."""

    name: ClassVar[str] = "numbers"

    def is_asked(self, params: SamplingParams) -> bool:
        return True

    def begin(self, params: SamplingParams) -> Numbers:
        return self

    def take(self, index: int, report: TokenReport) -> None:
        raise AssertionError("nothing is reported")

    def add_to(self, output: RequestOutput) -> None:
        for each in output.outputs:
            if each.finish_reason is not None:
                each.routed_experts = np.full((3, 2, 1), each.index, np.uint8)


def choices_of(path: str, body: dict[str, Any], engine: FakeEngine) -> list[dict[str, Any]]:
    answer = Client(build_app(engine, ServerOptions(("fake",)))).post(path, body)
    assert answer.status == 200
    bodies = answer.events if body.get("stream") else [answer.json]
    return [choice for each in bodies if isinstance(each, dict) for choice in each["choices"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ASKED)
def test_each_choice_ends_with_its_experts(path: str, body: dict[str, Any], stream: bool) -> None:
    engine = FakeEngine()
    engine.output_parts = [Numbers()]
    choices = choices_of(path, body | {"stream": stream}, engine)
    with_experts = [choice for choice in choices if "routed_experts" in choice]
    assert [choice["finish_reason"] is not None for choice in choices] == [
        "routed_experts" in choice for choice in choices
    ]
    assert sorted(choice["index"] for choice in with_experts) == [0, 1]
    for choice in with_experts:
        ids = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        assert (ids.dtype, ids.tolist()) == (np.uint8, [[[choice["index"]]] * 2] * 3)


def test_without_the_option_there_is_no_field() -> None:
    for path, body in ASKED:
        assert all("routed_experts" not in choice for choice in choices_of(path, body, FakeEngine()))
