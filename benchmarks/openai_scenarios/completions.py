"""Completions: forms of prompts and answers."""

from __future__ import annotations

from typing import Any

from openai_scenarios.table import (
    PROMPT,
    PROMPT_IDS,
    QUESTION,
    Api,
    of_choice,
    of_events,
    of_logprobs,
    of_usage,
    scenario,
)


@scenario(["text_completion", "cmpl-", True, [" 85", "stop", None], [7, 4, 11]])
def completion(api: Api) -> Any:
    answer = api.complete()
    return [
        answer.object,
        answer.id[:5],
        answer.model == api.model,
        *map(of_choice, answer.choices),
        of_usage(answer.usage),
    ]


@scenario({"texts": [" 85"], "ends": [["stop"]], "usage": []})
def completion_stream(api: Api) -> Any:
    return of_events(api.complete(stream=True))


@scenario([{"texts": [" 85"], "ends": [["stop"]], "usage": []}, [], [7, 4, 11]])
def completion_stream_with_usage(api: Api) -> Any:
    *events, last = api.complete(stream=True, stream_options={"include_usage": True})
    return [of_events(events), last.choices, of_usage(last.usage)]


@scenario([True, [7], [7, 4, 11]])
def completion_stream_with_usage_each_time(api: Api) -> Any:
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = of_events(api.complete(stream=True, stream_options=options))["usage"]
    return [usages == sorted(usages), sorted({usage[0] for usage in usages}), usages[-1]]


@scenario(["text/event-stream", ["data: [DONE]", ""], True])
def completion_stream_on_the_wire(api: Api) -> Any:
    body = {"model": api.model, "prompt": PROMPT, "temperature": 0, "stream": True}
    answer = api.http.post("/v1/completions", json=body)
    lines = answer.text.split("\n\n")
    return [answer.headers["content-type"].split(";")[0], lines[-2:], {line[:7] for line in lines[:-2]} == {"data: {"}]


@scenario([[(0, [" 85", "stop", None]), (1, [" 7", "stop", None]), (2, [" 77", "stop", None])], [19, 11, 30]])
def completion_of_several_texts(api: Api) -> Any:
    answer = api.complete([PROMPT, "3 + 4 =", "90 - 13 ="])
    return [[(choice.index, of_choice(choice)) for choice in answer.choices], of_usage(answer.usage)]


@scenario({"texts": [" 85", " 7", " 77"], "ends": [["stop"], ["stop"], ["stop"]], "usage": []})
def completion_of_several_texts_as_a_stream(api: Api) -> Any:
    return of_events(api.complete([PROMPT, "3 + 4 =", "90 - 13 ="], stream=True))


@scenario([[" 85", "stop", None], [7, 4, 11]])
def completion_of_token_ids(api: Api) -> Any:
    answer = api.complete(PROMPT_IDS)
    return [of_choice(answer.choices[0]), of_usage(answer.usage)]


@scenario([[" 85", "length", None], ["3 4", "length", None]])
def completion_of_several_lists_of_token_ids(api: Api) -> Any:
    return [of_choice(choice) for choice in api.complete([PROMPT_IDS, PROMPT_IDS[:-2]], max_tokens=3).choices]


@scenario(["27 + 58 = 85", "stop", None])
def completion_with_echo(api: Api) -> Any:
    return of_choice(api.complete(echo=True).choices[0])


@scenario(["27 + 58 = 85", "stop", None])
def completion_with_echo_of_token_ids(api: Api) -> Any:
    return of_choice(api.complete(PROMPT_IDS, echo=True).choices[0])


@scenario({"texts": ["27 + 58 = 85"], "ends": [["stop"]], "usage": []})
def completion_with_echo_as_a_stream(api: Api) -> Any:
    return of_events(api.complete(echo=True, stream=True))


@scenario(
    {
        "tokens": ["2", "7", " +", " ", "5", "8", " =", " ", "8", "5", "<|endoftext|>"],
        "offsets": [0, 1, 2, 4, 5, 6, 7, 9, 10, 11, 12],
        "logprobs": [None, -17.87, -8.42, -11.6, -19.56, -15.16, -14.38, 0.0, 0.0, 0.0, 0.0],
        "num_top": [None, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2],
    }
)
def completion_with_echo_and_logprobs(api: Api) -> Any:
    return of_logprobs(api.complete(echo=True, logprobs=2).choices[0].logprobs)


@scenario(
    [["27 + 58 =", "length", None], [7, 0, 7]],
    "vLLM counts the token that it has to generate although only the prompt was requested.",
)
def echo_alone(api: Api) -> Any:
    answer = api.complete(echo=True, max_tokens=0)
    return [of_choice(answer.choices[0]), of_usage(answer.usage)]


@scenario(
    {
        "tokens": ["2", "7", " +", " ", "5", "8", " ="],
        "offsets": [0, 1, 2, 4, 5, 6, 7],
        "logprobs": [None, -17.87, -8.42, -11.6, -19.56, -15.16, -14.38],
        "num_top": [None, 2, 2, 2, 2, 2, 2],
    }
)
def echo_alone_with_logprobs(api: Api) -> Any:
    return of_logprobs(api.complete(echo=True, max_tokens=0, logprobs=1).choices[0].logprobs)


@scenario([[0, 1, 2], [7, 15, 22]])
def completion_n(api: Api) -> Any:
    answer = api.complete(n=3, temperature=1, max_tokens=5, ignore_eos=True)
    return [[choice.index for choice in answer.choices], of_usage(answer.usage)]


@scenario([[0, "27 + 58 "], [1, "27 + 58 "], [2, "3 + 4 "], [3, "3 + 4 "]])
def completion_n_of_several_texts(api: Api) -> Any:
    answer = api.complete([PROMPT, "3 + 4 ="], n=2, temperature=1, seed=1, max_tokens=5, echo=True)
    return [[choice.index, choice.text.partition("=")[0]] for choice in answer.choices]


@scenario([3, [1, 1, 1]])
def completion_n_as_a_stream(api: Api) -> Any:
    events = of_events(api.complete(n=3, temperature=1.5, max_tokens=9, stream=True))
    return [len(events["texts"]), [len(each) for each in events["ends"]]]


@scenario([["length", 16], ["length", 3]])
def completion_limits(api: Api) -> Any:
    by_default = api.complete(ignore_eos=True)
    chosen = api.complete(ignore_eos=True, max_tokens=3)
    return [[answer.choices[0].finish_reason, answer.usage.completion_tokens] for answer in (by_default, chosen)]


@scenario(
    [[993, 1000], [982, 1000]],
    "vLLM refuses a max_tokens that is more than the model's whole length, and shortens others.",
)
def output_beyond_the_models_length(api: Api) -> Any:
    asked = {"max_tokens": 5000, "ignore_eos": True}
    usages = [api.complete(**asked).usage, api.chat(**asked).usage]
    return [[each.completion_tokens, each.total_tokens] for each in usages]


@scenario([[993, 1000], [982, 1000]])
def output_beyond_what_the_prompt_leaves(api: Api) -> Any:
    asked = {"max_tokens": 998, "ignore_eos": True}
    usages = [api.complete(**asked).usage, api.chat(**asked).usage]
    return [[each.completion_tokens, each.total_tokens] for each in usages]


@scenario(
    [[200, "nonsense, stream_options.more"], [200, "nonsense, stream_options.more"]],
    "vLLM doesn't say which fields it ignores.",
)
def fields_that_nobody_knows(api: Api) -> Any:
    body = {"nonsense": 1, "stream": True, "stream_options": {"more": 1}, "max_tokens": 1}
    answers = [api.post("/v1/completions", prompt=PROMPT, **body)]
    answers.append(api.post("/v1/chat/completions", messages=QUESTION, **body))
    return [[answer.status_code, answer.headers.get("x-raycore-ignored-fields")] for answer in answers]


@scenario([7, 16, 23])
def completion_with_null_for_a_limit(api: Api) -> Any:
    return of_usage(api.complete(max_tokens=None, ignore_eos=True).usage)
