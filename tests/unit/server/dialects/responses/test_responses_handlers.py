"""`POST /v1/responses`: what the model is asked, and what clients get."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_engine import VOCAB_SIZE
from responding import CALL, OTHER_CALL, TOOL, Responder, events_of

from raycore.server.dialects.responses.protocol import ResponsesRequest
from raycore.server.dialects.responses.run import gives_images

REASONING = {"reasoning_parser": "qwen3"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def user(text):
    return {"role": "user", "content": text}


def called(call_id="c1", arguments='{"city": "Ulm"}', **fields):
    return {"type": "function_call", "call_id": call_id, "name": "get_time", "arguments": arguments, **fields}


def returned(output="Noon.", call_id="c1"):
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def test_a_response_has_what_openai_documents():
    response = Responder().answer(metadata={"a": "b"}, user="me", max_output_tokens=30, temperature=0.5, store=False)
    (message,) = response["output"]
    assert message["id"].startswith("msg_")
    part = {"type": "output_text", "text": "Seven.", "annotations": [], "logprobs": []}
    fields = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert message == {"id": message["id"], **fields}
    assert response["id"].startswith("resp_")
    told = {
        "object": "response",
        "status": "completed",
        "model": "fake",
        "metadata": {"a": "b"},
        "user": "me",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "previous_response_id": None,
        "max_output_tokens": 30,
        "temperature": 0.5,
        "top_p": 1.0,
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
        "truncation": "disabled",
        "store": False,
        "background": False,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "service_tier": "default",
    }
    assert told.items() <= response.items()
    assert isinstance(response["created_at"], int)
    assert response["completed_at"] >= response["created_at"]


def test_usage_counts_reasoning_too():
    responder = Responder("<think>So.</think>Seven.", **REASONING)
    used = responder.answer()["usage"]
    assert used["input_tokens"] == len(responder.engine.asked[-1])
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    assert 0 < used["output_tokens_details"]["reasoning_tokens"] < used["output_tokens"]
    assert used["input_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("</think>Seven.", [("message", "Seven.")]),
        ("", [("message", "")]),
        ("<think>So.</think>Seven.", [("reasoning", "So."), ("message", "Seven.")]),
        ("<think>So.</think>", [("reasoning", "So."), ("message", "")]),
        (CALL, [("get_time", '{"city": "Ulm"}')]),
        (
            f"<think>So.</think>I ask.{CALL}{OTHER_CALL}",
            [
                ("reasoning", "So."),
                ("message", "I ask."),
                ("get_time", '{"city": "Ulm"}'),
                ("get_time", '{"city": "Rom"}'),
            ],
        ),
        (f"{CALL}Done.", [("get_time", '{"city": "Ulm"}'), ("message", "Done.")]),
    ],
)
def test_the_output_has_the_items_in_the_order_in_which_the_model_writes_them(text, output):
    assert Responder(text, **REASONING).output(tools=[TOOL]) == output


def test_reasoning_may_be_left_out():
    responder = Responder("<think>So.</think>Seven.", **REASONING)
    assert responder.output(include_reasoning=False) == [("message", "Seven.")]


def test_a_response_that_is_too_long_is_incomplete():
    response = Responder("Seven and eight.").answer(max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["completed_at"] is None
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    response = Responder("<think>So and so.</think>Seven.", **REASONING).answer(max_output_tokens=3)
    assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]


def test_the_conversation_becomes_chat_messages():
    responder = Responder(chat_template="{% for m in messages %}{{ m | tojson }}\n{% endfor %}", **REASONING)
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        user("When?"),
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "I ask."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Wait.", "annotations": []}], "id": "msg_1"},
        called("c1"),
        called("c2", "{}"),
        returned("Noon.", "c1"),
        returned([{"type": "input_text", "text": "One."}], "c2"),
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        user("Why?"),
    ]
    prompt = responder.prompt(items, instructions="Help.", store=False)
    messages = [json.loads(line) for line in prompt.splitlines()]
    roles = [message["role"] for message in messages]
    assert roles == ["system", "system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert [message["content"] for message in messages[:3]] == ["Help.", "Be brief.", "When?"]
    assert (messages[3]["reasoning"], messages[3]["content"]) == ("I ask.", "Wait.")
    assert [call["function"]["arguments"] for call in messages[3]["tool_calls"]] == [{"city": "Ulm"}, {}]
    assert [(each["tool_call_id"], each["content"]) for each in messages[4:6]] == [("c1", "Noon."), ("c2", "One.")]
    assert messages[6]["content"] == "No."


def test_the_same_prompt_as_that_of_the_chat():
    responder = Responder(**REASONING)
    prompt = responder.prompt("When?", instructions="Be brief.", tools=[TOOL], reasoning={"effort": "none"})
    function = {name: TOOL[name] for name in ("name", "parameters")}
    messages = [{"role": "system", "content": "Be brief."}, user("When?")]
    body = {"tools": [{"type": "function", "function": function}], "reasoning_effort": "none"}
    assert responder.client.chat(messages=messages, **body).status == 200
    assert responder.last_prompt == prompt


def test_the_model_continues_a_message_that_is_not_complete():
    responder = Responder(" and eight.")
    begun = {"role": "assistant", "content": "Seven", "status": "incomplete", "id": "msg_1", "type": "message"}
    assert responder.prompt([user("How many?"), begun]).endswith("Seven")
    assert not responder.prompt([user("How many?"), begun | {"status": "completed"}]).endswith("Seven")


def test_json_follows_its_schema():
    responder = Responder('{"n": 7}')
    form = {"type": "json_schema", "name": "number", "schema": SCHEMA, "strict": True}
    response = responder.answer(text={"format": form, "verbosity": "low"})
    assert responder.engine.params[-1].structured_outputs.json == json.dumps(SCHEMA)
    assert response["text"] == {"format": form, "verbosity": "low"}
    responder.answer(text={"format": {"type": "json_object"}})
    assert responder.engine.params[-1].structured_outputs.json_object
    responder.answer(text={"format": {"type": "text"}})
    assert responder.engine.params[-1].structured_outputs is None


def test_fields_of_vllm_reach_the_engine():
    responder = Responder()
    fields = {"top_k": 3, "min_p": 0.1, "seed": 5, "stop": ["x"], "repetition_penalty": 1.5, "min_tokens": 2}
    responder.answer(cache_salt="pepper", priority=0, request_id="mine", logit_bias={"3": 1}, **fields)
    params = responder.engine.params[-1]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {3: 1}
    assert responder.engine.cache_salts == ["pepper"]
    assert responder.engine.request_ids == ["resp-mine"]
    assert responder.answer(request_id="mine")["id"] == "resp_mine"


@pytest.mark.parametrize(
    ("choice", "parallel", "prefill"),
    [
        ("none", None, None),
        ("auto", None, ""),
        ("required", None, '<tool_call>\n{"name": "'),
        ({"type": "function", "name": "get_time"}, None, '<tool_call>\n{"name": "get_time", "arguments":'),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}, False, ""),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]},
            None,
            '<tool_call>\n{"name": "get_time", "arguments":',
        ),
    ],
)
def test_the_choice_of_tools(choice, parallel, prefill):
    rest = " {}}\n</tool_call>" if prefill and prefill.endswith(":") else 'get_time", "arguments": {}}\n</tool_call>'
    responder = Responder(rest if prefill else "Seven.")
    other = TOOL | {"name": "get_day"}
    body = {"tools": [TOOL, other], "tool_choice": choice, "parallel_tool_calls": parallel}
    response = responder.answer(**body)
    assert response["tool_choice"] == choice
    assert response["parallel_tool_calls"] is (parallel is None)
    assert ("get_time" in responder.last_prompt) == (choice != "none")
    is_narrowed = isinstance(choice, dict) and choice["type"] == "allowed_tools"
    assert ("get_day" in responder.last_prompt) == (choice != "none" and not is_narrowed)
    if prefill:
        assert responder.last_prompt.endswith(prefill)
        assert [item["type"] for item in response["output"]] == ["function_call"]


def test_log_probabilities_are_those_of_the_text_alone():
    responder = Responder(f"<think>So.</think>Seven.{CALL}", **REASONING)
    body = {"tools": [TOOL], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = responder.answer(**body)["output"][1]["content"]
    assert "".join(each["token"] for each in part["logprobs"]) == "Seven."
    assert all(len(each["top_logprobs"]) <= 2 and each["logprob"] <= 0 for each in part["logprobs"])
    deltas = [each for each in responder.events(**body) if each["type"] == "response.output_text.delta"]
    assert [each for delta in deltas for each in delta["logprobs"]] == part["logprobs"]
    assert responder.answer(top_logprobs=2)["output"][1]["content"][0]["logprobs"] == []


def test_log_probabilities_are_of_the_whole_vocabulary_if_that_is_asked_for():
    responder = Responder(max_http_logprobs=-1)
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": -1}
    (part,) = responder.answer(**body)["output"][0]["content"]
    assert {len(each["top_logprobs"]) for each in part["logprobs"]} == {VOCAB_SIZE}
    refused = Responder().post(**body)
    assert refused.error == (400, "invalid_request_error", "top_logprobs")
    assert "top_logprobs=-1 isn't in [0, 20]: --max-logprobs" in refused.json["error"]["message"]


def test_a_conversation_that_is_too_long_loses_its_oldest_turns():
    responder = Responder(chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}")
    turns = [item for n in range(9) for item in (user(f"{n}" * 700), {"role": "assistant", "content": f"ok {n}"})]
    items = [{"role": "system", "content": "first"}, *turns, user("last")]
    refused = responder.post(items)
    assert refused.error == (400, "invalid_request_error", "input")
    assert refused.json["error"]["code"] == "context_length_exceeded"
    assert responder.answer(items, truncation="auto")["truncation"] == "auto"
    kept = [n for n in range(9) if f"ok {n}" in responder.last_prompt]
    assert kept == list(range(9 - len(kept), 9))
    assert 3 <= len(kept) < 6
    assert responder.last_prompt.startswith("[first]" + "[" + f"{9 - len(kept)}")
    assert responder.last_prompt.endswith("[last]")
    assert responder.prompt([user("short")], truncation="auto") == "[short]"
    assert responder.post(user("x" * 9000)["content"], truncation="auto").error[2] == "input"


REFUSED = {
    "web search": ({"tools": [{"type": "web_search", "search_context_size": "low"}]}, "tools", "web_search"),
    "mcp": ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools", "mcp"),
    "choice of a tool": ({"tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
    "unknown function": ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice", "no tools"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    "prompt": ({"prompt": {"id": "a"}}, "prompt", "templates"),
    "item": ({"input": [{"type": "web_search_call", "id": "a"}]}, "input", "web_search_call"),
    "part": ({"input": [user([{"type": "input_file", "file_id": "a"}])]}, "input", "input_file"),
    "output without a call": ({"input": [user("a"), returned()]}, "input", "'c1'"),
    "encrypted": ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input", "content"),
    "no input": ({"input": []}, "input", "empty"),
    "role": ({"input": [{"role": "tool", "content": "a"}]}, "input", "tool"),
    "length": ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0"),
    "schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "schema"),
    "effort": ({"reasoning": {"effort": "immense"}}, "reasoning", "immense"),
    "options of a stream": ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream=true"),
    "background": ({"background": True, "store": False}, "background", "store=true"),
    "include": ({"include": ["everything"]}, "include", "everything"),
    "metadata": ({"metadata": {str(n): "a" for n in range(17)}}, "metadata", "16"),
    "image": ({"input": [user([{"type": "input_image", "file_id": "a"}])]}, "input", "image_url"),
    "top_logprobs": ({"include": ["message.output_text.logprobs"], "top_logprobs": 99}, "top_logprobs", "99"),
    "model": ({"model": "other"}, "model", "other"),
}


@pytest.mark.parametrize(("body", "param", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_by_name(body, param, words):
    responder = Responder()
    for stream in (False, True) if param != "stream_options" else (False,):
        answer = responder.client.post("/v1/responses", {"input": "a", "stream": stream, **body})
        assert answer.error == (404 if param == "model" else 400, "invalid_request_error", param)
        assert words in answer.json["error"]["message"]
    assert not responder.engine.asked


def test_a_required_call_that_is_not_made_is_an_error():
    responder = Responder("I will not.")
    body = {"tools": [TOOL, TOOL | {"name": "get_day"}], "tool_choice": "required"}
    answer = responder.post(**body)
    assert (answer.status, answer.json["error"]["code"]) == (500, "tool_not_called")
    *_, error, last = responder.events(**body)
    assert (error["type"], error["code"], error["param"]) == ("error", "tool_not_called", "tool_choice")
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_response(stream):
    responder = Responder("Seven." * 50)
    responder.engine.at_token = lambda index: asyncio.sleep(0.01)
    asked = {"input": "How many?", "stream": stream}
    call = responder.client.call("POST", "/v1/responses", asked, leave_after=6 if stream else 0)
    answer = asyncio.run(call)
    assert len(responder.engine.aborted) == 1
    if stream:
        assert events_of(answer)[-1]["type"] == "response.output_text.delta"


def test_a_failure_of_the_engine_is_told():
    responder = Responder()

    def fail(index):
        if index == 3:
            raise RuntimeError("secret")

    responder.engine.at_token = fail
    assert responder.post().error == (500, "server_error", None)
    events = responder.events()
    assert [each["type"] for each in events[-2:]] == ["error", "response.failed"]
    assert "secret" not in json.dumps(events)
    assert events[-1]["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"image": {"context_compression": "auto"}},
        {"moderation": {"model": "a"}},
        {"text": {"size": 1}},
        {"reasoning": {"speed": 1}},
    ],
)
def test_fields_that_are_ignored_are_named(body):
    (name, value), *_ = body.items()
    named = name if name in ("messages", "image", "moderation") else f"{name}.{next(iter(value))}"
    answer = Responder().post(**body)
    assert answer.status == 200
    assert answer.headers["x-raycore-ignored-fields"] == named
    answer = Responder(strict_fields=True).post(**body)
    assert (answer.status, answer.json["error"]["param"]) == (400, name)


def test_a_length_beyond_the_models_may_be_refused():
    body = {"max_output_tokens": 4000}
    assert Responder().post(**body).status == 200
    answer = Responder(strict_max_tokens=True).post(**body)
    assert answer.error == (400, "invalid_request_error", "max_output_tokens")
    assert "max_output_tokens" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("a", False),
        ([{"role": "user", "content": "a"}, {"type": "reasoning"}], False),
        ([{"role": "user", "content": [IMAGE]}], True),
        ([{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}], True),
    ],
)
def test_images_are_found_wherever_a_request_gives_them(items, expected):
    assert gives_images(ResponsesRequest.model_validate({"input": items})) == expected
