"""`/v1/completions`: what its answers and its events hold."""

from __future__ import annotations

import pytest

TEXT = " 85 is the answer"
PROMPT = "27 + 58 ="


def texts(events, index=0):
    return "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == index)


def reasons(events, index=0):
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def test_a_completion_has_openais_shape(client, engine):
    answer = client.complete(max_tokens=100).json
    num_prompt = len(engine.get_tokenizer().encode(PROMPT))
    num_output = len(engine.get_tokenizer().encode(TEXT)) + 1
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "fake")
    assert answer["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_completion_takes_one_or_several_prompts_as_text_or_ids(client, engine):
    ids = engine.get_tokenizer().encode(PROMPT)
    for prompt, count in ((PROMPT, 1), ([PROMPT, "1"], 2), (ids, 1), ([ids, [5]], 2)):
        choices = client.complete(prompt=prompt, max_tokens=100).json["choices"]
        assert [(choice["index"], choice["text"]) for choice in choices] == [(i, TEXT) for i in range(count)]


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [PROMPT, ""]])
def test_an_empty_prompt_is_refused(client, prompt):
    assert client.complete(prompt=prompt).error == (400, "invalid_request_error", "prompt")


def test_completion_events_end_each_choice_once_and_add_up_to_the_answer(client):
    options = {"n": 3, "prompt": [PROMPT, "1"], "max_tokens": 100, "temperature": 1}
    events = client.complete(**options, stream=True).events
    for index in range(6):
        assert texts(events, index) == TEXT
        assert reasons(events, index) == ["stop"]
    assert all("usage" not in event for event in events)
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1


def test_streamed_completion_usage_is_in_a_last_event_and_null_before(client):
    *events, last = client.complete(stream=True, stream_options={"include_usage": True}, max_tokens=3).events
    assert [event["usage"] for event in events] == [None] * len(events)
    assert last["choices"] == []
    assert last["usage"] == client.complete(max_tokens=3).json["usage"]


def test_completion_usage_is_in_each_event_on_request(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = client.complete(stream=True, stream_options=options, max_tokens=3).events
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]
    assert last["usage"] == events[-1]["usage"]


@pytest.mark.parametrize("options", [{}, {"include_usage": False}])
@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_streamed_usage_is_left_out_unless_requested(client, ask, options):
    options = {"continuous_usage_stats": True} | options
    events = getattr(client, ask)(stream=True, stream_options=options, max_tokens=3).events
    assert all("usage" not in event for event in events)
    assert all(event["choices"] for event in events)


@pytest.mark.parametrize("is_stream", [False, True])
def test_log_probabilities_follow_the_text(client, engine, is_stream):
    answer = client.complete(logprobs=2, echo=True, max_tokens=4, stream=is_stream)
    parts = [event["choices"][0] for event in answer.events] if is_stream else [answer.json["choices"][0]]
    joined = {name: [each for part in parts for each in part["logprobs"][name]] for name in parts[0]["logprobs"]}
    ids = engine.get_tokenizer().encode(PROMPT) + engine.get_tokenizer().encode(TEXT)[:4]
    tokens = [engine.get_tokenizer().token_text(token_id) for token_id in ids]
    assert joined["tokens"] == tokens
    assert joined["text_offset"] == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert joined["token_logprobs"] == [None] + [-0.5] * (len(tokens) - 1)
    assert joined["top_logprobs"][0] is None
    assert all(min(top.values()) == -9999.0 for top in joined["top_logprobs"][1:]), "JSON has no infinity"
    assert "".join(part["text"] for part in parts) == "".join(tokens)


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_without_output_is_the_prompt_alone(client, is_stream):
    answer = client.complete(echo=True, max_tokens=0, logprobs=1, stop_token_ids=[5], stream=is_stream)
    (choice,) = answer.events[0]["choices"] if is_stream else answer.json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (PROMPT, "length", None)
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT
    if not is_stream:
        assert answer.json["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_completion_token_ids_are_returned_although_their_text_is_held_back(client, engine, is_stream):
    options = {"return_token_ids": True, "stop": [" 85 is!"], "max_tokens": 100, "n": 2, "temperature": 1}
    answer = client.complete(**options, stream=is_stream)
    choices = [each for event in (answer.events if is_stream else [answer.json]) for each in event["choices"]]
    tokenizer = engine.get_tokenizer()
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert [token for choice in own for token in choice["token_ids"]] == [*tokenizer.encode(TEXT), 0]
        assert [choice["prompt_token_ids"] for choice in own] == [
            tokenizer.encode(PROMPT),
            *[None] * (len(own) - 1),
        ]


def test_prompt_log_probabilities_come_by_token_id(client, engine):
    (choice,) = client.complete(prompt_logprobs=1, max_tokens=1).json["choices"]
    ids = engine.get_tokenizer().encode(PROMPT)
    assert choice["prompt_logprobs"][0] is None
    assert [next(iter(entry)) for entry in choice["prompt_logprobs"][1:]] == [str(token_id) for token_id in ids[1:]]
    assert choice["prompt_logprobs"][1][str(ids[1])]["logprob"] == -0.5


def test_a_stop_string_ends_the_text_and_is_named(client):
    (choice,) = client.complete(stop=[" is"], max_tokens=100).json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" 85", "stop", " is")
    events = client.complete(stop=" is", max_tokens=100, stream=True).events
    assert (texts(events), reasons(events)) == (" 85", ["stop"])
