"""Chat completions."""

from __future__ import annotations

import json
from typing import Any

from openai_scenarios.table import QUESTION, WEATHER, Api, of_chat_logprobs, of_events, of_message, of_usage, scenario


@scenario(["chat.completion", "chatcmpl-", True, ["assistant", "85", "stop"], [18, 3, 21]])
def chat(api: Api) -> Any:
    answer = api.chat()
    tells = [answer.object, answer.id[:9], answer.model == api.model]
    return [*tells, of_message(answer.choices[0]), of_usage(answer.usage)]


@scenario(["chat.completion.chunk", "assistant", {None}, "", {"texts": ["85"], "ends": [["stop"]], "usage": []}])
def chat_stream(api: Api) -> Any:
    events = list(api.chat(stream=True))
    roles = [event.choices[0].delta.role for event in events]
    return [events[0].object, roles[0], set(roles[1:]), events[0].choices[0].delta.content, of_events(events)]


@scenario([{"texts": ["85"], "ends": [["stop"]], "usage": []}, [], [18, 3, 21]])
def chat_stream_with_usage(api: Api) -> Any:
    *events, last = api.chat(stream=True, stream_options={"include_usage": True})
    return [of_events(events), last.choices, of_usage(last.usage)]


@scenario([["chunk", "content.delta", "content.done"], ["assistant", "85", "stop"]])
def chat_stream_through_the_clients_helper(api: Api) -> Any:
    with api.client.chat.completions.stream(model=api.model, messages=QUESTION, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    return [sorted(kinds), of_message(final.choices[0])]


@scenario([[0, "assistant"], [1, "assistant"], [2, "assistant"]])
def chat_n(api: Api) -> Any:
    answer = api.chat(n=3, temperature=1, seed=3)
    return [[choice.index, choice.message.role] for choice in answer.choices]


@scenario([[[0, "assistant"], [1, "assistant"]], [1, 1]])
def chat_n_as_a_stream(api: Api) -> Any:
    events = list(api.chat(n=2, temperature=1, stream=True))
    roles = [[event.choices[0].index, event.choices[0].delta.role] for event in events if event.choices[0].delta.role]
    return [roles, [len(each) for each in of_events(events)["ends"]]]


@scenario([["assistant", "8", "stop"], "5"])
def chat_stop(api: Api) -> Any:
    answer = api.chat(stop="5")
    return [of_message(answer.choices[0]), answer.choices[0].stop_reason]


@scenario([["length", 2], ["length", 2]])
def chat_limits(api: Api) -> Any:
    answers = [api.chat(**{name: 2}) for name in ("max_tokens", "max_completion_tokens")]
    return [[answer.choices[0].finish_reason, answer.usage.completion_tokens] for answer in answers]


@scenario(
    [
        ["8", 0.0, [56], ["8", "7"]],
        ["5", 0.0, [53], ["5", "6"]],
        ["<|im_end|>", 0.0, [60, 124, 105, 109, 95, 101, 110, 100, 124, 62], ["<|im_end|>", "<|endoftext|>"]],
    ]
)
def chat_logprobs(api: Api) -> Any:
    return of_chat_logprobs(api.chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content)


@scenario(
    [
        ["8", 0.0, [56], []],
        ["5", 0.0, [53], []],
        ["<|im_end|>", 0.0, [60, 124, 105, 109, 95, 101, 110, 100, 124, 62], []],
    ]
)
def chat_logprobs_of_the_sampled_token_alone(api: Api) -> Any:
    return of_chat_logprobs(api.chat(logprobs=True).choices[0].logprobs.content)


@scenario(
    [
        ["8", 0.0, [56], ["8"]],
        ["5", 0.0, [53], ["5"]],
        ["<|im_end|>", 0.0, [60, 124, 105, 109, 95, 101, 110, 100, 124, 62], ["<|im_end|>"]],
    ]
)
def chat_logprobs_as_a_stream(api: Api) -> Any:
    parts = [
        choice.logprobs for event in api.chat(logprobs=True, top_logprobs=1, stream=True) for choice in event.choices
    ]
    return of_chat_logprobs(token for part in parts if part is not None for token in part.content)


@scenario([["assistant", "85", "stop"], 28])
def chat_of_parts(api: Api) -> Any:
    parts = [{"type": "text", "text": "What is 27 + 58?"}]
    answer = api.chat([{"role": "system", "content": "You add."}, {"role": "user", "content": parts}])
    return [of_message(answer.choices[0]), answer.usage.prompt_tokens]


@scenario([["assistant", "5", "stop"], ["assistant", "85", "stop"]])
def chat_continued(api: Api) -> Any:
    messages = [*QUESTION, {"role": "assistant", "content": "8"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    return [of_message(api.chat(messages, echo=echo, **options).choices[0]) for echo in (False, True)]


@scenario(["assistant", "85", "stop"])
def chat_with_hints(api: Api) -> Any:
    hints = {"user": "me", "metadata": {"a": "b"}, "store": False, "prompt_cache_key": "k", "service_tier": "auto"}
    return of_message(api.chat(response_format={"type": "text"}, **hints).choices[0])


@scenario([[["left", "right"], True, "stop"], [["left", "right"], True, "stop"]])
def chat_json_of_a_schema(api: Api) -> Any:
    number = {"type": "integer", "minimum": 10, "maximum": 99}
    schema = {"type": "object", "properties": {"left": number, "right": number}, "required": ["left", "right"]}
    schema["additionalProperties"] = False
    outcomes = []
    for strict in (True, False):
        asked = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": strict}}
        choice = api.chat(response_format=asked, temperature=1.5, seed=5, max_tokens=600).choices[0]
        values = json.loads(choice.message.content)
        outcomes.append([sorted(values), all(10 <= each <= 99 for each in values.values()), choice.finish_reason])
    return outcomes


@scenario({"texts": ["{}"], "ends": [["stop"]], "usage": []})
def chat_json_object_as_a_stream(api: Api) -> Any:
    closing_bracket = {"96": 100}
    return of_events(api.chat(response_format={"type": "json_object"}, logit_bias=closing_bracket, stream=True))


@scenario([["assistant", "85", "stop"], None])
def chat_tools_that_may_not_be_called(api: Api) -> Any:
    choice = api.chat(tools=[WEATHER], tool_choice="none").choices[0]
    return [of_message(choice), choice.message.tool_calls or None]


@scenario([["assistant", "85", "stop"], None])
def chat_tools_that_may_be_called(api: Api) -> Any:
    choice = api.chat(tools=[WEATHER], tool_choice="auto").choices[0]
    return [of_message(choice), choice.message.tool_calls or None]


@scenario(True)
def chat_seed_repeats(api: Api) -> Any:
    first, second = (api.chat(temperature=1.5, seed=4, max_tokens=20).choices[0].message.content for _ in range(2))
    return first == second
