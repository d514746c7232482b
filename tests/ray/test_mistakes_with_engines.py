"""Mistakes that a running engine and its server refuse: one line, which names the value and the remedy."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from mistakes.files import write_files
from mistakes.table import CALLS, IMAGE_MESSAGES, REQUESTS, Mistake, Request

from raycore import LLM, AsyncLLM, LoRARequest, SamplingParams, StructuredOutputsParams
from raycore.demo import demo_model_path
from raycore.errors import RaycoreError
from raycore.server import build_app
from raycore.server.options import server_options


def constrained(**fields: str) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**fields))


@pytest.fixture(scope="module")
def names(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory):
    """What the expressions refer to."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    ended = LLM(demo_model_path())
    ended.shutdown()
    with LLM(demo_model_path(), engine_name="of-mistakes") as llm:
        yield {
            **{each.__name__: each for each in (LLM, LoRARequest, SamplingParams, constrained)},
            "MODEL": demo_model_path(),
            "llm": llm,
            "ended": ended,
            "image_messages": IMAGE_MESSAGES,
            "folder": folder,
        }
        # after all of them
        assert llm.generate("27 + 58 =")[0].outputs[0].text.strip() == "85"


@pytest.mark.parametrize("mistake", CALLS, ids=lambda mistake: mistake.does)
def test_a_call_gets_an_error_of_one_line(mistake: Mistake, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    folder: Path = names["folder"]
    monkeypatch.chdir(folder)
    with pytest.raises(RaycoreError) as caught:
        eval(mistake.does, names)
    assert re.search(mistake.says, str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def answers(ray_cluster: Any) -> list[tuple[int, str]]:
    """The status and the message of each request's answer."""

    async def ask() -> list[tuple[int, str]]:
        async with await AsyncLLM.create(demo_model_path()) as engine:
            options = server_options("model", {"served_model_name": "demo", "api_key": "k"})
            transport = httpx.ASGITransport(build_app(engine, options))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return [await answer(client, each) for each in REQUESTS]

    return asyncio.run(ask())


async def answer(client: httpx.AsyncClient, request: Request) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k", **request.headers}
    content = request.body if isinstance(request.body, str) else json.dumps(request.body)
    got = await client.request(request.method, request.path, content=content, headers=headers)
    return got.status_code, got.json()["error"]["message"]


@pytest.mark.parametrize("number", range(len(REQUESTS)), ids=lambda number: REQUESTS[number].says)
def test_an_answer_says_in_one_line_what_to_do(number: int, answers: list[tuple[int, str]]):
    status, message = answers[number]
    assert 400 <= status < 500
    assert re.search(REQUESTS[number].says, message)
    assert "\n" not in message
