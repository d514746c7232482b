"""API keys, models, tokenization, probes, clients that disconnect, and concurrent clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import openai

from openai_scenarios.table import (
    ABORTED_WITHIN_S,
    ENDLESS,
    LEFT_AFTER_S,
    PROMPT,
    PROMPT_IDS,
    QUESTION,
    START_WITHIN_S,
    Api,
    of_choice,
    of_error,
    of_events,
    scenario,
)


@scenario([401, 401, 401])
def key_wrong(api: Api) -> Any:
    with openai.OpenAI(base_url=f"{api.root}/v1", api_key="wrong", max_retries=0) as client:
        calls = [
            lambda: client.completions.create(model=api.model, prompt="1"),
            lambda: client.chat.completions.create(model=api.model, messages=QUESTION),
            client.models.list,
        ]
        return [of_error(call)[0] for call in calls]


@scenario(401)
def key_missing(api: Api) -> Any:
    return httpx.post(f"{api.root}/v1/completions", json={"model": api.model, "prompt": "1"}).status_code


@scenario([200, 200, 200])
def probes_need_no_key(api: Api) -> Any:
    return [httpx.get(f"{api.root}/{path}").status_code for path in ("health", "ping", "version")]


@scenario([["model", True, 1000]])
def models(api: Api) -> Any:
    listed = api.client.models.list().data
    return [[model.object, model.id == api.model, model.max_model_len] for model in listed]


@scenario([200, 404], "vLLM doesn't implement this path.")
def model_by_name(api: Api) -> Any:
    found = api.http.get(f"/v1/models/{api.model}")
    missing = api.http.get("/v1/models/other")
    return [found.status_code, missing.status_code]


@scenario({"count": 7, "max_model_len": 1000, "tokens": [21, 26, 263, 224, 24, 27, 261], "token_strs": None})
def tokenize(api: Api) -> Any:
    return api.http.post("/tokenize", json={"model": api.model, "prompt": PROMPT}).json()


@scenario(["Ã", "©", "Ġ", "1"])
def tokenize_with_texts(api: Api) -> Any:
    body = {"model": api.model, "prompt": "é 1", "return_token_strs": True}
    return api.http.post("/tokenize", json=body).json()["token_strs"]


@scenario([18, True])
def tokenize_a_conversation(api: Api) -> Any:
    answer = api.http.post("/tokenize", json={"model": api.model, "messages": QUESTION}).json()
    return [answer["count"], answer["count"] == api.chat().usage.prompt_tokens]


@scenario({"prompt": "27 + 58 ="})
def detokenize(api: Api) -> Any:
    return api.http.post("/detokenize", json={"model": api.model, "tokens": PROMPT_IDS}).json()


@scenario([404, 400, 400])
def tokenize_errors(api: Api) -> Any:
    bodies = [("/tokenize", {"model": "other", "prompt": "1"}), ("/tokenize", {}), ("/detokenize", {"tokens": "1"})]
    return [api.http.post(path, json=body).status_code for path, body in bodies]


@scenario([200, 200, ["version"]])
def probes(api: Api) -> Any:
    health, ping, version = (api.http.get(path) for path in ("/health", "/ping", "/version"))
    return [health.status_code, ping.status_code, list(version.json())]


def _is_gone(api: Api) -> bool:
    deadline_s = time.monotonic() + ABORTED_WITHIN_S
    while api.num_underway() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not api.num_underway()


def _wait_until_busy(api: Api) -> bool:
    deadline_s = time.monotonic() + START_WITHIN_S
    while not api.num_underway() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return bool(api.num_underway())


def _leave_a_stream(api: Api, events: Iterator[Any]) -> list[bool]:
    next(events)
    was_busy = _wait_until_busy(api)
    events.close()  # type: ignore[attr-defined]  # it is the client's Stream
    return [was_busy, _is_gone(api)]


@scenario([True, True])
def leaving_a_stream_aborts_it(api: Api) -> Any:
    return _leave_a_stream(api, api.complete(stream=True, ignore_eos=True, **ENDLESS))


@scenario([True, True])
def leaving_a_chat_stream_aborts_it(api: Api) -> Any:
    return _leave_a_stream(api, api.chat(stream=True, ignore_eos=True, **ENDLESS))


@scenario([True, True])
def leaving_before_the_answer_aborts_it(api: Api) -> Any:
    with httpx.Client(
        base_url=api.root, headers=api.http.headers, timeout=httpx.Timeout(60, read=LEFT_AFTER_S)
    ) as http:
        body = {"model": api.model, "prompt": [PROMPT, "1"], "ignore_eos": True, **ENDLESS}
        with ThreadPoolExecutor(1) as pool, suppress(httpx.ReadTimeout):
            call = pool.submit(http.post, "/v1/completions", json=body)
            was_busy = _wait_until_busy(api)
            call.result()
    return [was_busy, _is_gone(api)]


@scenario([23, 35, 41, 19, 45, 57, 63, 41, 67, 79, 85, 63, 81, 93, 99, 77])
def many_at_once(api: Api) -> Any:
    sums = [(a, b) for a in (12, 34, 56, 70) for b in (11, 23, 29, 7)]

    def ask(operands: tuple[int, int]) -> str:
        prompt = "{} + {} =".format(*operands)
        if sum(operands) % 2:
            return of_events(api.complete(prompt, stream=True))["texts"][0]
        return api.complete(prompt).choices[0].text

    with ThreadPoolExecutor(len(sums)) as pool:
        answers = list(pool.map(ask, sums))
    return [int(answer) for answer in answers]


@scenario([[" 85", "stop", None], 0])
def it_serves_on(api: Api) -> Any:
    return [of_choice(api.complete().choices[0]), api.num_underway()]
