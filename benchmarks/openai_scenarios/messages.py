"""Anthropic's Messages API: whole and as a stream, and the number of tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx

from openai_scenarios.table import QUESTION, WHITE_SPACE, Api, scenario

TOOL = {
    "name": "weather",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Ulm"]}},
        "required": ["place"],
    },
}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Ulm"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "warm"}
CONTINUED = (
    "vLLM begins a new message after one of the assistant. Anthropic's API continues that one, and so does raycore."
)
ERROR_FORMS = "vLLM's errors have its own types, and for bodies that it can't read also the form of OpenAI's API."


def of_message(answer: Any) -> list[Any]:
    """The text, or the name and the input, of each block, and how the message ends."""
    blocks = [
        block["text"] if block["type"] == "text" else [block["name"], block["input"]] for block in answer["content"]
    ]
    return [blocks, answer["stop_reason"], answer.get("stop_sequence")]


def refused(api: Api, path: str = "/v1/messages", **fields: Any) -> list[Any]:
    """Status and type of an error."""
    body = {"messages": QUESTION, "max_tokens": 32, **fields}
    answer = api.post(path, **{name: value for name, value in body.items() if value is not ...})
    told = answer.json()
    return [answer.status_code, told.get("type"), told.get("error", {}).get("type")]


def counted(api: Api, messages: Any = QUESTION, **fields: Any) -> Any:
    """The number of tokens."""
    return api.post("/v1/messages/count_tokens", messages=messages, **fields).json().get("input_tokens")


@scenario(["message", "assistant", True, [["85"], "end_turn", None]])
def message(api: Api) -> Any:
    answer = api.message()
    return [answer["type"], answer["role"], answer["model"] == api.model, of_message(answer)]


@scenario([18, 3])
def message_usage(api: Api) -> Any:
    used = api.message(cache_salt="of this row")["usage"]
    return [used["input_tokens"], used["output_tokens"]]


@scenario("msg_", "vLLM's ids are those of its chats; raycore's are as Anthropic's.")
def message_id(api: Api) -> Any:
    return api.message()["id"][:4]


@scenario([["8"], "max_tokens", None])
def message_limit(api: Api) -> Any:
    return of_message(api.message(max_tokens=1))


@scenario([[["8"], "stop_sequence", "5"], [["8"], "stop_sequence", "5"], [["85"], "end_turn", None]])
def message_stop_sequence(api: Api) -> Any:
    return [of_message(api.message(stop_sequences=each)) for each in (["5"], ["x", "5"], [])]


@scenario([[["85"], "end_turn", None], [["85"], "end_turn", None]])
def message_system(api: Api) -> Any:
    texts = [
        {"type": "text", "text": "Add."},
        {"type": "text", "text": "Always.", "cache_control": {"type": "ephemeral"}},
    ]
    answers = [api.message(system=each) for each in ("Add.", texts)]
    return [of_message(each) for each in answers]


@scenario([["85"], "end_turn", None])
def message_to_blocks(api: Api) -> Any:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "27 + 58?"}]
    return of_message(api.message([{"role": "user", "content": parts}]))


@scenario([["23"], "end_turn", None])
def message_to_a_conversation(api: Api) -> Any:
    turns = [*QUESTION, {"role": "assistant", "content": "85"}, {"role": "user", "content": "What is 12 + 11?"}]
    return of_message(api.message(turns))


@scenario([["5"], "end_turn", None], CONTINUED)
def message_that_is_continued(api: Api) -> Any:
    return of_message(api.message([*QUESTION, {"role": "assistant", "content": "8"}]))


@scenario([[["85"], "end_turn", None], [["85"], "end_turn", None]])
def message_sampling(api: Api) -> Any:
    return [
        of_message(api.message(**each)) for each in ({"top_k": 1, "temperature": 1}, {"top_p": 0.1, "temperature": 1})
    ]


@scenario([["85"], "end_turn", None])
def message_unknown_fields(api: Api) -> Any:
    return of_message(api.message(metadata={"user_id": "me"}, service_tier="auto", nonsense=1))


@scenario([["85"], "end_turn", None])
def message_tools(api: Api) -> Any:
    return of_message(api.message(tools=[TOOL]))


@scenario([["85"], "end_turn", None])
def message_tools_that_may_not_be_called(api: Api) -> Any:
    return of_message(api.message(tools=[TOOL], tool_choice={"type": "none"}))


@scenario(
    [[[["weather", {"place": "Ulm"}]], "tool_use", None], [[["weather", {"place": "Ulm"}]], "tool_use", None]],
    WHITE_SPACE,
)
def message_tools_that_must_be_called(api: Api) -> Any:
    choices = [{"type": "any"}, {"type": "tool", "name": "weather"}]
    return [of_message(api.message(tools=[TOOL], tool_choice=choice, max_tokens=300)) for choice in choices]


@scenario(["message", 35])
def message_to_the_result_of_a_call(api: Api) -> Any:
    turns = [*QUESTION, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
    return [api.message(turns, tools=[TOOL], tool_choice={"type": "none"})["type"], counted(api, turns)]


@scenario(41, "vLLM doesn't tell the model that the call has failed.")
def message_to_the_failure_of_a_call(api: Api) -> Any:
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{**RESULT, "is_error": True}]},
    ]
    return counted(api, turns)


@scenario(35)
def message_to_a_result_with_blocks(api: Api) -> Any:
    result = {**RESULT, "content": [{"type": "text", "text": "warm"}]}
    turns = [*QUESTION, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    return counted(api, turns)


@scenario([[["85"], "end_turn", None], 40])
def message_to_reasoning(api: Api) -> Any:
    thought = {"type": "thinking", "thinking": "Add.", "signature": "x"}
    turns = [*QUESTION, {"role": "assistant", "content": [thought, {"type": "text", "text": "85"}]}, *QUESTION]
    return [of_message(api.message(turns)), counted(api, turns)]


@scenario([[["85"], "end_turn", None], [["85"], "end_turn", None]])
def message_thinking(api: Api) -> Any:
    kinds = [{"type": "disabled"}, {"type": "adaptive"}]
    return [of_message(api.message(thinking=each)) for each in kinds]


@scenario({"n": 7})
def message_json_schema(api: Api) -> Any:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    answer = api.message(output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=300)
    return json.loads(answer["content"][0]["text"])


@scenario(
    [
        "message_start",
        [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ],
        "message_stop",
    ]
)
def message_stream(api: Api) -> Any:
    kinds = [event["type"] for event in api.message(stream=True)]
    return [kinds[0], list(dict.fromkeys(kind for kind in kinds if kind != "ping")), kinds[-1]]


@scenario(["85", "end_turn", 3])
def message_stream_texts(api: Api) -> Any:
    events = api.message(stream=True)
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    (end,) = (event for event in events if event["type"] == "message_delta")
    return ["".join(texts), end["delta"]["stop_reason"], end["usage"]["output_tokens"]]


@scenario(["stop_sequence", "5"])
def message_stream_stop_sequence(api: Api) -> Any:
    (end,) = (
        event["delta"] for event in api.message(stream=True, stop_sequences=["5"]) if event["type"] == "message_delta"
    )
    return [end["stop_reason"], end.get("stop_sequence")]


@scenario([[["tool_use", "weather", {}]], {"place": "Ulm"}, "tool_use"], WHITE_SPACE)
def message_stream_of_a_call(api: Api) -> Any:
    events = api.message(stream=True, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=300)
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    (end,) = (event["delta"] for event in events if event["type"] == "message_delta")
    return [
        [[each["type"], each.get("name"), each.get("input")] for each in begun],
        json.loads("".join(pieces)),
        end["stop_reason"],
    ]


@scenario([200, 401, 401], "vLLM doesn't know the header with which Anthropic's clients send the key.")
def message_key(api: Api) -> Any:
    body = {"model": api.model, "messages": QUESTION, "max_tokens": 4}
    keys = [{"x-api-key": api.client.api_key}, {"x-api-key": "wrong"}, {}]
    return [httpx.post(f"{api.root}/v1/messages", json=body, headers=headers).status_code for headers in keys]


@scenario([18, 27, 19], CONTINUED)
def message_tokens_counted(api: Api) -> Any:
    return [counted(api), counted(api, system="Add."), counted(api, [*QUESTION, {"role": "assistant", "content": "8"}])]


@scenario(18)
def message_tokens_with_tools(api: Api) -> Any:
    return counted(api, tools=[TOOL])


@scenario(3008, "vLLM counts only what fits into the model's context. Anthropic's API counts more, too.")
def message_tokens_of_a_long_conversation(api: Api) -> Any:
    return counted(api, [{"role": "user", "content": "1" * 3000}])


@scenario(
    [[400, "error", "invalid_request_error"], [400, "error", "invalid_request_error"], [200, "message", None]],
    ERROR_FORMS,
)
def error_message_missing_fields(api: Api) -> Any:
    return [refused(api, **{name: ...}) for name in ("messages", "max_tokens", "model")]


@scenario(
    [
        [400, "error", "invalid_request_error"],
        [400, "error", "invalid_request_error"],
        [400, "error", "invalid_request_error"],
        [400, "error", "invalid_request_error"],
        [400, "error", "invalid_request_error"],
        [400, "error", "invalid_request_error"],
    ],
    ERROR_FORMS,
)
def error_message_types(api: Api) -> Any:
    bad = {"messages": "hello", "max_tokens": 0, "temperature": "hot", "top_p": 2, "stop_sequences": 7, "system": 7}
    return [refused(api, **{name: value}) for name, value in bad.items()]


@scenario([400, "error", "invalid_request_error"], ERROR_FORMS)
def error_message_no_messages(api: Api) -> Any:
    return refused(api, messages=[])


@scenario(
    [
        [400, "error", "invalid_request_error"],
        [400, "error", "invalid_request_error"],
        [400, "error", "invalid_request_error"],
    ],
    ERROR_FORMS,
)
def error_message_blocks(api: Api) -> Any:
    bad = [{"type": "nothing"}, {"type": "tool_use", "id": "t1"}, {"type": "text"}]
    return [refused(api, messages=[{"role": "user", "content": [block]}]) for block in bad]


@scenario([400, "error", "invalid_request_error"], ERROR_FORMS)
def error_message_roles(api: Api) -> Any:
    return refused(api, messages=[{"role": "nobody", "content": "1"}])


@scenario([[400, "error", "invalid_request_error"], [400, "error", "invalid_request_error"]], ERROR_FORMS)
def error_message_tools(api: Api) -> Any:
    bad = [{"name": "f"}, {"type": "web_search_20250305", "name": "web_search"}]
    return [refused(api, tools=[each]) for each in bad]


@scenario(
    [
        [400, "error", "invalid_request_error"],
        [400, "error", "invalid_request_error"],
        [400, "error", "invalid_request_error"],
    ],
    ERROR_FORMS,
)
def error_message_tool_choice(api: Api) -> Any:
    choices = [{"type": "tool"}, {"type": "often"}, {"type": "tool", "name": "other"}]
    return [refused(api, tools=[TOOL], tool_choice=each) for each in choices]


@scenario(
    [
        [400, "error", "invalid_request_error"],
        [400, "error", "invalid_request_error"],
        [400, "error", "invalid_request_error"],
    ],
    ERROR_FORMS,
)
def error_message_thinking(api: Api) -> Any:
    bad = [{"type": "enabled"}, {"type": "enabled", "budget_tokens": 2000}, {"type": "deep"}]
    return [refused(api, thinking=each) for each in bad]


@scenario([[404, "error", "not_found_error"], [404, "error", "not_found_error"]], ERROR_FORMS)
def error_message_unknown_model(api: Api) -> Any:
    return [refused(api, model="other"), refused(api, "/v1/messages/count_tokens", model="other")]


@scenario([400, "error", "invalid_request_error"], ERROR_FORMS)
def error_message_too_long(api: Api) -> Any:
    return refused(api, messages=[{"role": "user", "content": "1" * 3000}])


@scenario([400, "error"], ERROR_FORMS)
def error_message_body(api: Api) -> Any:
    answer = api.http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    return [answer.status_code, answer.json().get("type")]
