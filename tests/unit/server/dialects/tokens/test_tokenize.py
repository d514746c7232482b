"""`/tokenize`, `/detokenize`, and what a server says of itself."""

from __future__ import annotations

import pytest

from raycore.demo import demo_model_path


def test_tokenize_and_detokenize_convert_text_and_tokens(client, engine):
    answer = client.post("/tokenize", {"prompt": "27 + 58 =", "return_token_strs": True}).json
    ids = engine.get_tokenizer().encode("27 + 58 =")
    assert answer == {
        "count": len(ids),
        "max_model_len": 200,
        "tokens": ids,
        "token_strs": ["2", "7", "Ġ+", "Ġ", "5", "8", "Ġ="],
    }
    assert client.post("/detokenize", {"tokens": ids}).json == {"prompt": "27 + 58 ="}


def test_tokenize_gives_the_prompt_tokens_of_a_conversation(client):
    messages = [{"role": "user", "content": "27 + 58?"}]
    answer = client.post("/tokenize", {"messages": messages}).json
    assert answer["tokens"] == client.chat(return_token_ids=True).json["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "1", "messages": [{"role": "user", "content": "1"}]}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_tokenize_and_detokenize_refuse_invalid_bodies(client, path, body, param):
    assert client.post(path, body).error == (400, "invalid_request_error", param)


def test_every_served_model_name_is_listed_and_found(serve):
    client = serve()
    (model,) = client.get("/v1/models").json["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 200)
    assert client.get("/v1/models/fake").json == model
    assert model["root"] == str(demo_model_path())


def test_probes_answer_without_a_body(client):
    for answer in (client.get("/health"), client.get("/ping"), client.post("/ping")):
        assert (answer.status, answer.body) == (200, b"")
    assert client.get("/version").json["version"]


def test_the_tokenizers_configuration_is_shown_on_request(client, serve):
    assert client.get("/tokenizer_info").status == 404
    info = serve(enable_tokenizer_info_endpoint=True).get("/tokenizer_info").json
    assert info["eos_token"] == "<|endoftext|>"
    assert "messages" in info["chat_template"]
    own = serve(enable_tokenizer_info_endpoint=True, chat_template="{{ 1 }}").get("/tokenizer_info").json
    assert own["chat_template"] == "{{ 1 }}"
