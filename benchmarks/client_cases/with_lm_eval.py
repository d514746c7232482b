"""The language model evaluation harness, with its models behind OpenAI's API."""

from __future__ import annotations

import os
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from client_cases.cases import CHAT, PLAIN, Server, case

PAIRS = [("27 + 58 =", " 85"), ("The capital of France is", " Paris")]


def instances(kind: str, *arguments: Any) -> list[Instance]:
    """Requests as the harness makes them."""
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def completions(server: Server, **fields: Any) -> Any:
    """The model behind /v1/completions."""
    os.environ["OPENAI_API_KEY"] = server.key
    base = {"base_url": f"{server.v1}/completions", "model": server.model, "max_length": 500, "max_retries": 1}
    return LocalCompletionsAPI(**base, **{"tokenizer": server.tokenizer, "tokenizer_backend": "huggingface", **fields})


def chats(server: Server) -> Any:
    """The model behind /v1/chat/completions."""
    os.environ["OPENAI_API_KEY"] = server.key
    base = {"base_url": f"{server.v1}/chat/completions", "model": server.model, "max_retries": 1}
    return LocalChatCompletion(**base)


def check(results: list[tuple[float, bool]]) -> None:
    """Fail unless these are log likelihoods."""
    assert len(results) == len(PAIRS)
    assert all(value < 0 for value, _ in results)


@case("lm-eval", "local-completions, likelihood of tokens", PLAIN, CHAT)
def _(server: Server) -> None:
    check(completions(server).loglikelihood(instances("loglikelihood", *PAIRS), disable_tqdm=True))


@case("lm-eval", "local-completions, likelihood of texts", PLAIN, CHAT)
def _(server: Server) -> None:
    model = completions(server, tokenized_requests=False)
    check(model.loglikelihood(instances("loglikelihood", *PAIRS), disable_tqdm=True))


@case("lm-eval", "local-completions, batches", PLAIN)
def _(server: Server) -> None:
    model = completions(server, batch_size=2)
    check(model.loglikelihood(instances("loglikelihood", *PAIRS), disable_tqdm=True))


@case("lm-eval", "local-completions, rolling likelihood", PLAIN)
def _(server: Server) -> None:
    model = completions(server)
    (value,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", ("27 + 58 = 85",)), disable_tqdm=True)
    assert value < 0


@case("lm-eval", "local-completions, generate_until", PLAIN, CHAT)
def _(server: Server) -> None:
    asked = ("27 + 58 =", {"until": ["\n"], "max_gen_toks": 6, "do_sample": False, "temperature": 0})
    (text,) = completions(server).generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert isinstance(text, str)


@case("lm-eval", "local-chat-completions, generate_until", PLAIN, CHAT)
def _(server: Server) -> None:
    model = chats(server)
    prompt = model.apply_chat_template([{"role": "user", "content": "27 + 58 =?"}])
    asked = (prompt, {"until": ["\n"], "max_gen_toks": 6, "do_sample": False})
    (text,) = model.generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert isinstance(text, str)
