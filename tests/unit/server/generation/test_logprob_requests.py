"""How many log probabilities requests may ask for, and those of tokens that they choose."""

from __future__ import annotations

import pytest
from fake_engine import VOCAB_SIZE

CHAT = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 3}
TEXT = {"prompt": "1", "max_tokens": 3}


@pytest.mark.parametrize(("most", "refused"), [(20, [21, -1]), (3, [4, -1]), (0, [1]), (-1, [-2, VOCAB_SIZE + 1])])
def test_the_engine_limits_log_probabilities(engine, serve, most, refused):
    engine.max_http_logprobs = most
    client = serve()
    for count in refused:
        for path, fields in (
            ("/v1/completions", TEXT | {"logprobs": count}),
            ("/v1/completions", TEXT | {"prompt_logprobs": count}),
            ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": count}),
        ):
            answer = client.post(path, fields)
            assert answer.status == 400
            assert str(count) in answer.json["error"]["message"]
    allowed = max(most, 0)
    answer = client.post("/v1/completions", TEXT | {"logprobs": allowed, "prompt_logprobs": allowed})
    assert answer.status == 200


def test_all_log_probabilities_can_be_asked_for_if_there_is_no_limit(engine, serve):
    engine.max_http_logprobs = -1
    client = serve()
    choice = client.post("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": -1}).json["choices"][0]
    assert [len(each["top_logprobs"]) for each in choice["logprobs"]["content"]] == [VOCAB_SIZE] * 3
    logprobs = client.post("/v1/completions", TEXT | {"logprobs": -1}).json["choices"][0]["logprobs"]
    assert [len(each) for each in logprobs["top_logprobs"]] == [VOCAB_SIZE] * 3


def test_log_probabilities_of_chosen_tokens(engine, serve):
    client, chosen = serve(), {"logprob_token_ids": [300, 5], "return_tokens_as_token_ids": True}
    choice = client.post("/v1/chat/completions", CHAT | chosen | {"logprobs": True}).json["choices"][0]
    for each in choice["logprobs"]["content"]:
        shown = [(top["token"], top["logprob"]) for top in each["top_logprobs"]]
        assert shown[0] == (each["token"], -0.5)
        assert shown[1:] == [("token_id:300", -301.0), ("token_id:5", -6.0)]
    logprobs = client.post("/v1/completions", TEXT | chosen | {"logprobs": 1}).json["choices"][0]["logprobs"]
    for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top == {name: -0.5, "token_id:300": -301.0, "token_id:5": -6.0}
    assert engine.params[-1].logprobs is None


@pytest.mark.parametrize(("path", "fields"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_chosen_tokens_need_logprobs_and_must_be_in_the_vocabulary(client, path, fields):
    answer = client.post(path, fields | {"logprob_token_ids": [3]})
    assert (answer.status, answer.json["error"]["param"]) == (400, "logprob_token_ids")
    wanted = {"logprobs": True} if "messages" in fields else {"logprobs": 1}
    answer = client.post(path, fields | wanted | {"logprob_token_ids": [VOCAB_SIZE]})
    assert answer.status == 400
    assert f"token id {VOCAB_SIZE}" in answer.json["error"]["message"]
