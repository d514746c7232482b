"""Completions: sampling, stop conditions and log probabilities."""

from __future__ import annotations

import re
from typing import Any

from openai_scenarios.table import Api, of_choice, of_events, of_logprobs, scenario


@scenario([" 8", "stop", "5"])
def stop_string(api: Api) -> Any:
    return of_choice(api.complete(stop="5").choices[0])


@scenario({"texts": [" 3"], "ends": [["stop"]], "usage": []})
def stop_strings_as_a_stream(api: Api) -> Any:
    return of_events(api.complete("431 - 87 =", stop=["44", "nothing"], stream=True))


@scenario([" 8", "stop", "8"])
def stop_string_that_stays(api: Api) -> Any:
    return of_choice(api.complete(stop=["8"], include_stop_str_in_output=True).choices[0])


@scenario([" ", "stop", 27])
def stop_token(api: Api) -> Any:
    return of_choice(api.complete(stop_token_ids=[27]).choices[0])


@scenario([" 85<|endoftext|><|endoftext|><|endoftext|>", "length", None])
def end_of_sequence_ignored(api: Api) -> Any:
    return of_choice(api.complete(ignore_eos=True, max_tokens=6, skip_special_tokens=False).choices[0])


@scenario(True)
def least_number_of_tokens(api: Api) -> Any:
    return api.complete(min_tokens=8, max_tokens=12).usage.completion_tokens >= 8


@scenario([True, False])
def seed_repeats(api: Api) -> Any:
    asked = {"temperature": 2, "max_tokens": 20, "ignore_eos": True}
    first, second, other = (api.complete(seed=seed, **asked).choices[0].text for seed in (1, 1, 2))
    return [first == second, first == other]


@scenario(4)
def seed_makes_different_choices(api: Api) -> Any:
    answer = api.complete(n=4, seed=5, temperature=2, max_tokens=20, ignore_eos=True)
    return len({choice.text for choice in answer.choices})


@scenario(1)
def negative_seed(api: Api) -> Any:
    return len(api.complete(seed=-7, temperature=1).choices)


@scenario([" 85", " 85", " 85"])
def one_likely_token_is_greedy(api: Api) -> Any:
    chosen = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
    return [api.complete(temperature=2, **each).choices[0].text for each in chosen]


@scenario(["777", "length", None])
def bias_forces_a_token(api: Api) -> Any:
    return of_choice(api.complete(logit_bias={"26": 100}, max_tokens=3).choices[0])


@scenario([" 9", "length", None])
def bias_forbids_a_token(api: Api) -> Any:
    return of_choice(api.complete(logit_bias={"27": -100}, max_tokens=2).choices[0])


@scenario(["7777", "length", None])
def allowed_tokens(api: Api) -> Any:
    return of_choice(api.complete(allowed_token_ids=[26], max_tokens=4).choices[0])


@scenario(False)
def bad_words(api: Api) -> Any:
    return "85" in api.complete(bad_words=["85", "8"], max_tokens=4).choices[0].text


@scenario([" 86", "stop", None])
def one_of_some_choices(api: Api) -> Any:
    asked = {"structured_outputs": {"choice": [" 86", " 91"]}, "temperature": 1.5}
    return of_choice(api.complete(**asked, logit_bias={"28": -100}).choices[0])


@scenario([True, True, True, True])
def texts_of_a_pattern(api: Api) -> Any:
    asked = {"structured_outputs": {"regex": "[a-f]{3,30}-[0-9]{4}"}, "temperature": 1.5, "max_tokens": 60}
    answer = api.complete(**asked, n=4, seed=8)
    return [bool(re.fullmatch("[a-f]{3,30}-[0-9]{4}", choice.text)) for choice in answer.choices]


@scenario({"texts": ["1 + 2 + 3"], "ends": [["stop"]], "usage": []})
def text_of_a_grammar_as_a_stream(api: Api) -> Any:
    grammar = 'root ::= "1" more\nmore ::= " + 2" last\nlast ::= " + " [3]'
    return of_events(api.complete(structured_outputs={"grammar": grammar}, stream=True))


@scenario([False, False, False])
def penalties(api: Api) -> Any:
    options = {"ignore_eos": True, "max_tokens": 12, "prompt": "1 1 1 1"}
    plain = api.complete(**options).choices[0].text
    penalised = [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 1.5}]
    return [api.complete(**options, **each).choices[0].text == plain for each in penalised]


@scenario(
    {
        "tokens": [" ", "8", "5", "<|endoftext|>"],
        "offsets": [0, 1, 2, 3],
        "logprobs": [0.0, 0.0, 0.0, 0.0],
        "num_top": [3, 3, 3, 3],
    }
)
def logprobs(api: Api) -> Any:
    return of_logprobs(api.complete(logprobs=3).choices[0].logprobs)


@scenario(
    {
        "tokens": [" ", "8", "5", "<|endoftext|>"],
        "offsets": [0, 1, 2, 3],
        "logprobs": [0.0, 0.0, 0.0, 0.0],
        "num_top": [1, 1, 1, 1],
    }
)
def logprobs_of_the_sampled_token_alone(api: Api) -> Any:
    return of_logprobs(api.complete(logprobs=0).choices[0].logprobs)


@scenario({"tokens": [" ", "8", "5", "<|endoftext|>"], "offsets": [0, 1, 2, 3], "logprobs": [0.0, 0.0, 0.0, 0.0]})
def logprobs_as_a_stream(api: Api) -> Any:
    parts = [choice.logprobs for event in api.complete(logprobs=1, stream=True) for choice in event.choices]
    return {
        "tokens": [each for part in parts for each in part.tokens],
        "offsets": [each for part in parts for each in part.text_offset],
        "logprobs": [round(each, 2) for part in parts for each in part.token_logprobs],
    }


@scenario([[21, 26, 263, 224, 24, 27, 261], [224, 27, 24, 0]])
def token_ids_returned(api: Api) -> Any:
    choice = api.complete(return_token_ids=True).choices[0]
    return [choice.prompt_token_ids, choice.token_ids]


@scenario([[[21, 26, 263, 224, 24, 27, 261]], [224, 27, 24, 0]])
def token_ids_returned_as_a_stream(api: Api) -> Any:
    choices = [choice for event in api.complete(return_token_ids=True, stream=True) for choice in event.choices]
    ids = [token_id for choice in choices for token_id in choice.token_ids]
    return [[choice.prompt_token_ids for choice in choices if getattr(choice, "prompt_token_ids", None)], ids]


@scenario(
    [
        None,
        ["26", -17.87, 41],
        ["263", -8.42, 7],
        ["224", -11.6, 13],
        ["24", -19.56, 11],
        ["27", -15.16, 13],
        ["261", -14.38, 2],
    ]
)
def prompt_logprobs(api: Api) -> Any:
    positions = api.complete(prompt_logprobs=1, max_tokens=1).choices[0].prompt_logprobs
    firsts = [each and next(iter(each.items())) for each in positions]
    return [each and [each[0], round(each[1]["logprob"], 2), each[1]["rank"]] for each in firsts]
