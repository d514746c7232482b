"""`/v1/chat/completions`: what its answers and its events hold."""

from __future__ import annotations

import pytest

TEXT = " 85 is the answer"


def content(events, index=0):
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_a_chat_completion_has_openais_shape(client):
    answer = client.chat().json
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "fake")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)


def test_chat_events_begin_with_the_role_and_end_each_choice_once(client):
    events = client.chat(n=2, stream=True).events
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    firsts = [event["choices"][0] for event in events[:2]]
    assert [(choice["index"], choice["delta"]) for choice in firsts] == [
        (index, {"role": "assistant", "content": ""}) for index in (0, 1)
    ]
    later = [choice for event in events[2:] for choice in event["choices"]]
    assert not any("role" in choice["delta"] for choice in later)
    for index in (0, 1):
        assert content(events, index) == TEXT
        own = [choice["finish_reason"] for choice in later if choice["index"] == index]
        assert own == [None] * (len(own) - 1) + ["stop"]
    assert all("usage" not in event for event in events)


def test_streamed_chat_usage_is_in_a_last_event_and_null_before(client):
    *events, last = client.chat(stream=True, stream_options={"include_usage": True}).events
    assert [event["usage"] for event in events] == [None] * len(events)
    assert last["choices"] == []
    assert last["usage"] == client.chat().json["usage"]


def test_the_event_of_the_role_counts_no_token(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = client.chat(stream=True, stream_options=options, max_tokens=3, n=2).events
    used = [event["usage"] for event in events]
    counts = [each["completion_tokens"] for each in used]
    assert counts[:2] == [0, 0]
    assert counts[2] > 0
    assert counts == sorted(counts)
    assert used[0] == {**used[-1], "completion_tokens": 0, "total_tokens": used[-1]["prompt_tokens"]}


@pytest.mark.parametrize("is_stream", [False, True])
def test_log_probabilities_come_with_bytes_and_the_most_likely_tokens(client, engine, is_stream):
    answer = client.chat(logprobs=True, top_logprobs=2, max_tokens=3, stream=is_stream)
    choices = [choice for event in (answer.events if is_stream else [answer.json]) for choice in event["choices"]]
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    ids = engine.get_tokenizer().encode(TEXT)[:3]
    assert [token["token"] for token in tokens] == [engine.get_tokenizer().token_text(each) for each in ids]
    assert b"".join(bytes(token["bytes"]) for token in tokens) == TEXT[:3].encode()
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] == -0.5 for token in tokens)


def test_a_token_that_is_part_of_a_character_has_its_bytes(engine, client):
    engine.text = "é!"
    (choice,) = client.chat(logprobs=True).json["choices"]
    spelled = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
    assert spelled.startswith("é!".encode())


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chat_completion_has_the_length_of_max_tokens(client, serve, engine, name):
    choice = client.chat(**{name: 2}).json["choices"][0]
    assert choice["finish_reason"] == "length"
    assert engine.params[-1].max_tokens == 2
    assert client.chat(**{name: 0}).error == (400, "invalid_request_error", name)
    assert client.chat(**{name: 1000}).status == 200, "the output ends at the model's length"
    strict = serve(strict_max_tokens=True)
    assert strict.chat(**{name: 1000}).error == (400, "invalid_request_error", name)
    assert strict.chat(**{name: 1000}).json["error"]["code"] == "context_length_exceeded"


def test_a_chat_without_max_tokens_uses_the_checkpoints_default(client, engine):
    client.chat()
    assert engine.params[-1].max_tokens is None
    engine.default_sampling_params = {"max_tokens": 7, "temperature": 0.5}
    client.chat()
    assert (engine.params[-1].max_tokens, engine.params[-1].temperature) == (7, 0.5)
    client.chat(temperature=0)
    assert engine.params[-1].temperature == 0


def test_a_chat_may_continue_the_final_message(client):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "The answer:"}]
    options = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    assert client.chat(**options).json["choices"][0]["message"]["content"] == "The answer:" + TEXT
    assert content(client.chat(**options, stream=True).events) == "The answer:" + TEXT


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}],
        [{"role": "user", "content": "half a pair: \ud800"}],
        [{"content": "no role"}],
        "text",
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(client, messages):
    assert client.chat(messages=messages).error == (400, "invalid_request_error", "messages")


def test_chat_token_ids_are_returned_on_request(client, engine):
    ids = [*engine.get_tokenizer().encode(TEXT), 0]
    answer = client.chat(return_token_ids=True).json
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"]
    events = client.chat(return_token_ids=True, stream=True).events
    assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])] == ids


def test_prompt_log_probabilities_come_by_token_id(client):
    answer = client.chat(prompt_logprobs=0, return_token_ids=True).json
    assert answer["prompt_logprobs"][0] is None
    assert [list(each) for each in answer["prompt_logprobs"][1:]] == [[str(i)] for i in answer["prompt_token_ids"][1:]]


def test_a_chat_template_in_a_request_needs_the_servers_permission(client, serve, engine):
    own = {"chat_template": "{{ messages[0].content }}", "return_token_ids": True}
    assert client.chat(**own).error == (400, "invalid_request_error", "chat_template")
    answer = serve(trust_request_chat_template=True).chat(**own).json
    assert answer["prompt_token_ids"] == engine.get_tokenizer().encode("27 + 58?", add_special_tokens=False)
