"""OpenAI's Responses API: whole, as a stream, stored and in the background."""

from __future__ import annotations

import json
import time
from typing import Any

from openai_scenarios.errors import ERROR_PARAMS, ERROR_PLACES, ERROR_TYPES
from openai_scenarios.table import QUESTION, WHITE_SPACE, Api, of_error, scenario

TOOL = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Ulm"]}},
        "required": ["place"],
    },
}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place": "Ulm"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "warm"}
ENDED_WITHIN_S = 20.0
ABSENT = "vLLM doesn't implement this path."


def of_items(response: Any) -> list[Any]:
    """Type, status and text of each item of a response's output. The text of a call is its name and its arguments."""
    found: list[Any] = []
    for item in response.output:
        if item.type == "function_call":
            found.append([item.type, item.status, item.name, json.loads(item.arguments)])
        else:
            found.append([item.type, item.status, *(part.text for part in item.content or ())])
    return found


def of_usage(usage: Any) -> list[int]:
    """Input tokens, output tokens, total tokens."""
    return [usage.input_tokens, usage.output_tokens, usage.total_tokens]


def until_ended(api: Api, response_id: str) -> Any:
    """A response that runs in the background, when it has ended."""
    deadline_s = time.monotonic() + ENDED_WITHIN_S
    response = api.client.responses.retrieve(response_id)
    while response.status in ("queued", "in_progress") and time.monotonic() < deadline_s:
        time.sleep(0.05)
        response = api.client.responses.retrieve(response_id)
    return response


@scenario(["response", "resp_", "completed", None, None, [["message", "completed", "85"]], [18, 3, 21]])
def response(api: Api) -> Any:
    answer = api.respond()
    tells = [answer.object, answer.id[:5], answer.status, answer.error, answer.incomplete_details]
    return [*tells, of_items(answer), of_usage(answer.usage)]


@scenario(
    ["Add.", {"a": "b"}, "me", 0.5, False, 8, "auto", 0.0, False, [], "auto", True],
    "vLLM shows what greedy decoding makes of top_p, and tool_choice as none without tools. raycore shows the request.",
)
def response_shows_the_request(api: Api) -> Any:
    asked = {"instructions": "Add.", "metadata": {"a": "b"}, "user": "me", "top_p": 0.5, "parallel_tool_calls": False}
    answer = api.respond(**asked, max_output_tokens=8, truncation="auto")
    shown = [getattr(answer, name) for name in (*asked, "max_output_tokens", "truncation", "temperature", "background")]
    return [*shown, answer.tools, answer.tool_choice, answer.model == api.model]


@scenario(None, "vLLM shows the tokens that the context has left; OpenAI shows null.")
def response_shows_no_limit(api: Api) -> Any:
    return api.respond().max_output_tokens


@scenario(["assistant", "msg_", "output_text", []])
def response_message(api: Api) -> Any:
    (message,) = api.respond().output
    (part,) = message.content
    return [message.role, message.id[:4], part.type, part.annotations]


@scenario([[["message", "completed", "85"]], [["message", "completed", "85"]]])
def response_to_items(api: Api) -> Any:
    parts = [{"type": "input_text", "text": "What is 27 + 58?"}]
    return [of_items(api.respond(each)) for each in (QUESTION, [{"role": "user", "content": parts}])]


@scenario(["23", 49])
def response_to_a_conversation(api: Api) -> Any:
    turns = [
        {"role": "developer", "content": "Add."},
        *QUESTION,
        {"role": "assistant", "content": "85"},
        {"role": "user", "content": "What is 12 + 11?"},
    ]
    answer = api.respond(turns)
    return [answer.output_text, answer.usage.input_tokens]


@scenario(["85", True])
def response_with_instructions(api: Api) -> Any:
    first, second = api.respond(instructions="Add."), api.respond([{"role": "system", "content": "Add."}, *QUESTION])
    return [first.output_text, first.usage.input_tokens == second.usage.input_tokens]


@scenario(["23", 40])
def response_to_its_own_output(api: Api) -> Any:
    turns = [*QUESTION, *(item.to_dict() for item in api.respond().output)]
    answer = api.respond([*turns, {"role": "user", "content": "What is 12 + 11?"}])
    return [answer.output_text, answer.usage.input_tokens]


@scenario(["5", 19])
def response_that_continues_a_message(api: Api) -> Any:
    text = {"type": "output_text", "text": "8", "annotations": []}
    begun = {"type": "message", "role": "assistant", "id": "msg_1", "status": "incomplete", "content": [text]}
    answer = api.respond([*QUESTION, begun])
    return [answer.output_text, answer.usage.input_tokens]


@scenario(["incomplete", "max_output_tokens", 1, "8"])
def response_that_reaches_its_limit(api: Api) -> Any:
    answer = api.respond(max_output_tokens=1)
    return [answer.status, answer.incomplete_details.reason, answer.usage.output_tokens, answer.output_text]


@scenario([["message", "incomplete", "8"]], "vLLM calls the item of an incomplete response complete.")
def response_item_at_the_limit(api: Api) -> Any:
    return of_items(api.respond(max_output_tokens=1))


@scenario([["message", 1]], "vLLM's output is empty. raycore's has a message, for clients that read the first item.")
def response_without_a_text(api: Api) -> Any:
    return [[item.type, len(item.content)] for item in api.respond(logit_bias={"0": 100, "1": 100, "2": 100}).output]


@scenario([["8", "completed"], ["8", "completed"]])
def response_stop(api: Api) -> Any:
    answers = [api.respond(stop=stop) for stop in ("5", ["x", "5"])]
    return [[answer.output_text, answer.status] for answer in answers]


@scenario([{"n": 7}, "json_schema", "number"])
def response_json_schema(api: Api) -> Any:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    answer = api.respond(text={"format": form}, max_output_tokens=300)
    return [json.loads(answer.output_text), answer.text.format.type, answer.text.format.name]


@scenario(["{", "json_object"])
def response_json_object(api: Api) -> Any:
    answer = api.respond(text={"format": {"type": "json_object"}}, max_output_tokens=4)
    return [answer.output_text[:1], answer.text.format.type]


@scenario(["86", "eee"])
def response_structured_outputs(api: Api) -> Any:
    return [api.respond(structured_outputs=each).output_text for each in ({"choice": ["86"]}, {"regex": "[a-f]{3}"})]


@scenario(
    [["8", -0.0, [56], 2], ["5", -0.0, [53], 2]],
    "vLLM lists the token that ends the answer, which isn't part of the text.",
)
def response_logprobs(api: Api) -> Any:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    logprobs = api.respond(**asked).output[0].content[0].logprobs
    return [[each.token, round(each.logprob, 2), each.bytes, len(each.top_logprobs)] for each in logprobs]


@scenario([[["message", "completed", "85"]], "none", "weather"])
def response_tools(api: Api) -> Any:
    answer = api.respond(tools=[TOOL], tool_choice="none")
    return [of_items(answer), answer.tool_choice, answer.tools[0].name]


@scenario([["message", "completed", "85"]])
def response_tools_that_may_be_called(api: Api) -> Any:
    return of_items(api.respond(tools=[TOOL]))


@scenario(
    [
        [["function_call", "completed", "weather", {"place": "Ulm"}]],
        [["function_call", "completed", "weather", {"place": "Ulm"}]],
    ],
    WHITE_SPACE,
)
def response_tools_that_must_be_called(api: Api) -> Any:
    choices = ["required", {"type": "function", "name": "weather"}]
    return [of_items(api.respond(tools=[TOOL], tool_choice=choice, max_output_tokens=300)) for choice in choices]


@scenario(["completed", True])
def response_to_the_result_of_a_call(api: Api) -> Any:
    answer = api.respond([*QUESTION, CALL, RESULT], tools=[TOOL], tool_choice="none")
    return [answer.status, answer.usage.input_tokens > 18]


@scenario(["85", 40])
def response_to_reasoning(api: Api) -> Any:
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Add."}],
    }
    answer = api.respond([*QUESTION, thought, {"role": "assistant", "content": "85"}, *QUESTION])
    return [answer.output_text, answer.usage.input_tokens]


@scenario(["85", "low", "auto"])
def response_reasoning_options(api: Api) -> Any:
    answer = api.respond(reasoning={"effort": "low", "summary": "auto"})
    return [answer.output_text, answer.reasoning.effort, answer.reasoning.summary]


@scenario(
    "85", "vLLM cuts the prompt to the whole context, and then refuses it because there is no room for the answer."
)
def response_cut_to_fit(api: Api) -> Any:
    turns = [*QUESTION, {"role": "assistant", "content": "1" * 1000}, *QUESTION]
    return api.respond(turns, truncation="auto").output_text


@scenario(
    [
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ],
        True,
    ]
)
def response_stream(api: Api) -> Any:
    events = list(api.respond(stream=True))
    numbers = [event.sequence_number for event in events]
    return [list(dict.fromkeys(event.type for event in events)), numbers == list(range(len(events)))]


@scenario(["85", "85", [(True, 0, 0)], [["message", "completed", "85"]], [18, 3, 21]])
def response_stream_texts(api: Api) -> Any:
    events = list(api.respond(stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    places = {
        (e.item_id == done.item_id, e.output_index, e.content_index) for e in events if hasattr(e, "content_index")
    }
    return [
        "".join(deltas),
        done.text,
        sorted(places),
        of_items(events[-1].response),
        of_usage(events[-1].response.usage),
    ]


@scenario(
    [
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ],
        {"place": "Ulm"},
        [["function_call", "completed", "weather", {"place": "Ulm"}]],
    ],
    WHITE_SPACE,
)
def response_stream_of_a_call(api: Api) -> Any:
    events = list(api.respond(tools=[TOOL], tool_choice="required", max_output_tokens=300, stream=True))
    kinds = [event.type for event in events]
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    return [list(dict.fromkeys(kinds)), json.loads("".join(arguments)), of_items(events[-1].response)]


@scenario(["response.incomplete", "incomplete"], "vLLM has no event for incomplete responses.")
def response_stream_that_reaches_its_limit(api: Api) -> Any:
    *_, last = api.respond(stream=True, max_output_tokens=1)
    return [last.type, last.response.status]


@scenario(["85", "85"])
def response_stream_through_the_clients_helper(api: Api) -> Any:
    with api.client.responses.stream(model=api.model, input="What is 27 + 58?", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    return [text, final.output_text]


@scenario([True, [["message", "completed", "85"]], True])
def response_retrieved(api: Api) -> Any:
    answer = api.respond()
    found = api.client.responses.retrieve(answer.id)
    return [found.id == answer.id, of_items(found), found.usage == answer.usage]


@scenario([["message", "completed", "85"]])
def response_stored_after_a_stream(api: Api) -> Any:
    *_, last = api.respond(stream=True)
    return of_items(api.client.responses.retrieve(last.response.id))


@scenario(404)
def response_not_stored(api: Api) -> Any:
    answer = api.respond(store=False)
    return of_error(lambda: api.client.responses.retrieve(answer.id))[0]


@scenario(["23", True, 40])
def response_continues_a_stored_one(api: Api) -> Any:
    first = api.respond(instructions="Add.")
    second = api.respond("What is 12 + 11?", previous_response_id=first.id)
    return [second.output_text, second.previous_response_id == first.id, second.usage.input_tokens]


@scenario(True)
def response_instructions_are_not_kept(api: Api) -> Any:
    first = api.respond(instructions="Add, and add, and add.")
    plain = api.respond()
    asked = [api.respond("What is 12 + 11?", previous_response_id=each.id) for each in (first, plain)]
    return asked[0].usage.input_tokens == asked[1].usage.input_tokens


@scenario(["57", 62])
def response_continued_twice(api: Api) -> Any:
    first = api.respond()
    second = api.respond("What is 12 + 11?", previous_response_id=first.id)
    third = api.respond("What is 34 + 23?", previous_response_id=second.id)
    return [third.output_text, third.usage.input_tokens]


@scenario(["queued", [], "completed", [["message", "completed", "85"]]])
def response_in_the_background(api: Api) -> Any:
    answer = api.respond(background=True)
    ended = until_ended(api, answer.id)
    return [answer.status, answer.output, ended.status, of_items(ended)]


@scenario(["response.completed", [["message", "completed", "85"]], True])
def response_in_the_background_as_a_stream(api: Api) -> Any:
    events = list(api.respond(background=True, stream=True))
    again = list(api.client.responses.retrieve(events[0].response.id, stream=True, starting_after=2))
    return [
        events[-1].type,
        of_items(events[-1].response),
        [e.sequence_number for e in again] == [e.sequence_number for e in events[3:]],
    ]


@scenario(["cancelled", "cancelled"])
def response_cancelled(api: Api) -> Any:
    answer = api.respond(background=True, max_output_tokens=900, ignore_eos=True)
    cancelled = api.client.responses.cancel(answer.id)
    return [cancelled.status, until_ended(api, answer.id).status]


@scenario(400)
def response_that_can_not_be_cancelled(api: Api) -> Any:
    answer = api.respond()
    return of_error(lambda: api.client.responses.cancel(answer.id))[0]


@scenario([200, 404], ABSENT)
def response_deleted(api: Api) -> Any:
    answer = api.respond()
    deleted = api.http.delete(f"/v1/responses/{answer.id}").status_code
    return [deleted, api.http.get(f"/v1/responses/{answer.id}").status_code]


@scenario([["user", "What is 27 + 58?"]], ABSENT)
def response_input_items(api: Api) -> Any:
    answer = api.http.get(f"/v1/responses/{api.respond().id}/input_items")
    return (
        [[each["role"], each["content"][0]["text"]] for each in answer.json()["data"]]
        if answer.status_code == 200
        else answer.status_code
    )


@scenario([[404, "invalid_request_error", "response_id"], [404, "invalid_request_error", "response_id"]])
def response_ids_that_are_not_stored(api: Api) -> Any:
    client = api.client.responses
    calls = [lambda: client.retrieve("resp_none"), lambda: client.cancel("resp_none")]
    return [of_error(call) for call in calls]


@scenario(
    [400, "invalid_request_error", "previous_response_id"],
    "OpenAI answers 400 and names previous_response_id, and so does raycore.",
)
def error_response_continues_none(api: Api) -> Any:
    return of_error(lambda: api.respond(previous_response_id="resp_none"))


@scenario([400, "invalid_request_error", "input"], f"{ERROR_TYPES} {ERROR_PLACES}")
def error_response_without_input(api: Api) -> Any:
    return of_error(lambda: api.post("/v1/responses"))


@scenario(
    [
        [400, "invalid_request_error", "input"],
        [400, "invalid_request_error", "input"],
        [400, "invalid_request_error", "input"],
        [400, "invalid_request_error", "input"],
    ],
    f"{ERROR_TYPES} {ERROR_PLACES}",
)
def error_response_input(api: Api) -> Any:
    bad = [7, [{"role": "nobody", "content": "1"}], [{"type": "nothing"}], [{**RESULT, "output": 7}]]
    return [of_error(lambda given=given: api.respond(given)) for given in bad]


@scenario([400, "invalid_request_error", "input"], f"{ERROR_TYPES} {ERROR_PARAMS}")
def error_response_empty_input(api: Api) -> Any:
    return of_error(lambda: api.respond([]))


@scenario(
    [400, "invalid_request_error", "input"],
    "vLLM gives the model a result of a call that nobody made. OpenAI refuses it.",
)
def error_response_result_of_no_call(api: Api) -> Any:
    return of_error(lambda: api.respond([*QUESTION, RESULT]))


@scenario(
    [
        [400, "invalid_request_error", "temperature"],
        [400, "invalid_request_error", "top_p"],
        [400, "invalid_request_error", "max_output_tokens"],
        [400, "invalid_request_error", "logit_bias"],
        [400, "invalid_request_error", "tools"],
        [400, "invalid_request_error", "text"],
    ],
    f"{ERROR_TYPES} {ERROR_PLACES}",
)
def error_response_fields(api: Api) -> Any:
    bad = {
        "temperature": -1,
        "top_p": 2,
        "max_output_tokens": 0,
        "logit_bias": {"one": 1},
        "tools": "all",
        "text": {"format": {"type": "xml"}},
    }
    return [of_error(lambda given={name: value}: api.respond(**given)) for name, value in bad.items()]


@scenario([[400, "invalid_request_error", "tool_choice"], [400, "invalid_request_error", "tool_choice"]], ERROR_TYPES)
def error_response_tool_choice(api: Api) -> Any:
    asked = [{"tool_choice": "required"}, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "none"}}]
    return [of_error(lambda fields=fields: api.respond(**fields)) for fields in asked]


@scenario(
    [400, "invalid_request_error", "tools"], "vLLM ignores tools that it doesn't run. raycore refuses them by name."
)
def error_response_tools_of_the_server(api: Api) -> Any:
    return of_error(lambda: api.respond(tools=[{"type": "web_search"}]))


@scenario([400, "invalid_request_error", "background"], ERROR_TYPES)
def error_response_background_without_store(api: Api) -> Any:
    return of_error(lambda: api.respond(background=True, store=False))


@scenario([400, "invalid_request_error", "prompt"], ERROR_TYPES)
def error_response_prompt_template(api: Api) -> Any:
    return of_error(lambda: api.respond(prompt={"id": "pmpt_1"}))


@scenario([400, "invalid_request_error", "input"], f"{ERROR_TYPES} It names a parameter that no request has.")
def error_response_too_long(api: Api) -> Any:
    return of_error(lambda: api.respond("1" * 3000))


@scenario([404, "invalid_request_error", "model"], ERROR_TYPES)
def error_response_unknown_model(api: Api) -> Any:
    return of_error(lambda: api.respond(model="other"))
