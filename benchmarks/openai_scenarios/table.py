"""The table of scenarios, the client they use, and conversions of answers to plain values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx
import openai

GENERATES, EMBEDS, SCORES = "generates", "embeds", "scores"
PROMPT = "27 + 58 ="
PROMPT_IDS = [21, 26, 263, 224, 24, 27, 261]
QUESTION = [{"role": "user", "content": "What is 27 + 58?"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
}
WHITE_SPACE = (
    "The bundled model writes white space wherever JSON may have it. raycore limits that, so that calls end. vLLM "
    "doesn't limit it in calls."
)
ENDLESS = {"max_tokens": 900, "temperature": 1, "n": 64}
"""So many tokens that the request can't finish before the test has checked that it was aborted."""
ABORTED_WITHIN_S = 1.0
START_WITHIN_S = 20.0
LEFT_AFTER_S = 1.5


class Api:
    """A server and its clients."""

    def __init__(self, root: str, model: str, key: str, num_underway: Callable[[], int]) -> None:
        """`num_underway`: returns the number of requests in the server's engine."""
        self.root, self.model = root, model
        self.num_underway = num_underway
        self.client = openai.OpenAI(base_url=f"{root}/v1", api_key=key, max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=root, headers={"authorization": f"Bearer {key}"}, timeout=60)

    def complete(self, prompt: Any = PROMPT, **fields: Any) -> Any:
        """`/v1/completions`, greedy by default. Fields that OpenAI's client doesn't know are put into the body."""
        return self.client.completions.create(**self._arguments({"prompt": prompt, "temperature": 0, **fields}))

    def chat(self, messages: Any = QUESTION, **fields: Any) -> Any:
        """`/v1/chat/completions`, likewise."""
        return self.client.chat.completions.create(
            **self._arguments({"messages": messages, "temperature": 0, **fields})
        )

    def respond(self, given: Any = "What is 27 + 58?", **fields: Any) -> Any:
        """`/v1/responses`, likewise."""
        return self.client.responses.create(**self._arguments({"input": given, "temperature": 0, **fields}))

    def message(self, messages: Any = QUESTION, **fields: Any) -> Any:
        """`/v1/messages`: the answer's fields, or its events with `stream`."""
        body = {"messages": messages, "max_tokens": 32, "temperature": 0, **fields}
        answer = self.post("/v1/messages", **body).raise_for_status()
        if not fields.get("stream"):
            return answer.json()
        data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(each) for each in data if each != "[DONE]"]

    def post(self, path: str, **body: Any) -> httpx.Response:
        """A request without the official client."""
        return self.http.post(path, json={"model": self.model, **body})

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        self.http.close()

    def _arguments(self, fields: dict[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in fields.items() if name in ("prompt", "messages", "input", "stream")}
        return {"model": self.model, **own, "extra_body": {k: v for k, v in fields.items() if k not in own}}


@dataclass(frozen=True)
class Scenario:
    """One row of the table."""

    name: str
    ask: Callable[[Api], Any]
    expected: Any
    vllm_differs: str | None
    """Why vLLM's outcome differs; None if it has to be the same."""
    of: str = GENERATES
    """What the model does: one of `MODELS` in `openai_servers`."""


SCENARIOS: list[Scenario] = []


def scenario(
    expected: Any, vllm_differs: str | None = None, *, of: str = GENERATES
) -> Callable[[Callable[[Api], Any]], Callable[[Api], Any]]:
    """Add a function to the table. `of`: see `Scenario`."""

    def add(ask: Callable[[Api], Any]) -> Callable[[Api], Any]:
        SCENARIOS.append(Scenario(ask.__name__, ask, expected, vllm_differs, of))
        return ask

    return add


def of_choice(choice: Any) -> list[Any]:
    """Text, finish reason and stop reason of a completion's choice."""
    return [choice.text, choice.finish_reason, getattr(choice, "stop_reason", None)]


def of_message(choice: Any) -> list[Any]:
    """Role, content and finish reason of a chat completion's choice."""
    return [choice.message.role, choice.message.content, choice.finish_reason]


def of_usage(usage: Any) -> list[int]:
    """Prompt tokens, completion tokens, total tokens."""
    return [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]


def of_events(events: Iterable[Any]) -> dict[str, Any]:
    """A whole stream: text and finish reasons of each choice, and all usages."""
    texts: dict[int, str] = {}
    reasons: dict[int, list[str]] = {}
    usages: list[list[int]] = []
    for event in events:
        if event.usage is not None:
            usages.append(of_usage(event.usage))
        for choice in event.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason is not None:
                reasons.setdefault(choice.index, []).append(choice.finish_reason)
    return {"texts": [texts[i] for i in sorted(texts)], "ends": [reasons[i] for i in sorted(reasons)], "usage": usages}


def of_error(call: Callable[[], Any]) -> list[Any]:
    """Status, type and parameter of an error."""
    try:
        answer = call()
    except openai.APIStatusError as error:
        body: Any = error.body if isinstance(error.body, dict) else {}
        return [error.status_code, body.get("type"), body.get("param")]
    except openai.APIError:
        return ["an event"]
    if isinstance(answer, httpx.Response):
        error = answer.json()["error"]
        return [answer.status_code, error["type"], error["param"]]
    return [200, type(answer).__name__]


def of_logprobs(logprobs: Any) -> dict[str, Any]:
    """Log probabilities of a completion, rounded."""
    return {
        "tokens": logprobs.tokens,
        "offsets": logprobs.text_offset,
        "logprobs": [each if each is None else round(each, 2) for each in logprobs.token_logprobs],
        "num_top": [each and len(each) for each in logprobs.top_logprobs],
    }


def of_chat_logprobs(content: Iterable[Any]) -> list[Any]:
    """Log probabilities of a chat completion, rounded."""
    return [
        [token.token, round(token.logprob, 2), token.bytes, [other.token for other in token.top_logprobs]]
        for token in content
    ]
