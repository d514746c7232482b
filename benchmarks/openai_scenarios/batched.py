"""Several conversations in one request."""

from __future__ import annotations

from typing import Any

from openai_scenarios.errors import ERROR_PLACES, ERROR_TYPES
from openai_scenarios.table import QUESTION, Api, of_error, scenario

PATH = "/v1/chat/completions/batch"
OTHER = [{"role": "user", "content": "What is 12 + 11?"}]


def ask(api: Api, **fields: Any) -> Any:
    """The answer."""
    return api.post(PATH, **{"messages": [QUESTION, OTHER], "temperature": 0, **fields}).json()


def of_choices(answer: Any) -> list[Any]:
    """Number, role, content and finish reason of each choice."""
    return [
        [each["index"], each["message"]["role"], each["message"]["content"], each["finish_reason"]]
        for each in answer["choices"]
    ]


def refused(api: Api, **fields: Any) -> list[Any]:
    """Status, type and parameter of an error."""
    return of_error(lambda: api.post(PATH, **{"messages": [QUESTION], "temperature": 0, **fields}))


@scenario(
    ["chat.completion", "chatcmpl-", [[0, "assistant", "85", "stop"], [1, "assistant", "23", "stop"]], [36, 6, 42]]
)
def batched(api: Api) -> Any:
    answer = ask(api)
    used = [answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    return [answer["object"], answer["id"][:9], of_choices(answer), used]


@scenario([[0, "assistant", "23", "stop"]])
def batched_alone(api: Api) -> Any:
    return of_choices(ask(api, messages=[OTHER]))


@scenario(
    [
        [[0, "assistant", "8", "stop"], [1, "assistant", "23", "stop"]],
        [[0, "assistant", "8", "length"], [1, "assistant", "2", "length"]],
        [[0, "assistant", "77", "length"], [1, "assistant", "77", "length"]],
    ]
)
def batched_sampling(api: Api) -> Any:
    return [
        of_choices(ask(api, **each))
        for each in ({"stop": "5"}, {"max_tokens": 1}, {"logit_bias": {"26": 100}, "max_tokens": 2})
    ]


@scenario([[0, "assistant", "86", "stop"], [1, "assistant", "86", "stop"]])
def batched_structured_outputs(api: Api) -> Any:
    return of_choices(ask(api, structured_outputs={"choice": ["86"]}))


@scenario([[["8", 2], ["5", 2], ["<|im_end|>", 2]], [["2", 2], ["3", 2], ["<|im_end|>", 2]]])
def batched_logprobs(api: Api) -> Any:
    answer = ask(api, logprobs=True, top_logprobs=2)
    return [
        [[token["token"], len(token["top_logprobs"])] for token in each["logprobs"]["content"]]
        for each in answer["choices"]
    ]


@scenario([[27, 24, 3], [21, 22, 3]])
def batched_token_ids(api: Api) -> Any:
    return [each["token_ids"] for each in ask(api, return_token_ids=True)["choices"]]


@scenario([[0, "assistant", "5", "stop"], [1, "assistant", "3", "stop"]])
def batched_continued(api: Api) -> Any:
    turns = [[*each, {"role": "assistant", "content": begun}] for each, begun in ((QUESTION, "8"), (OTHER, "2"))]
    return of_choices(ask(api, messages=turns, add_generation_prompt=False, continue_final_message=True))


@scenario(
    [
        [400, "invalid_request_error", "messages"],
        [400, "invalid_request_error", "messages"],
        [400, "invalid_request_error", "messages"],
        [400, "invalid_request_error", "messages"],
    ],
    f"{ERROR_TYPES} {ERROR_PLACES}",
)
def error_batched_messages(api: Api) -> Any:
    return [refused(api, messages=each) for each in ([], [[]], QUESTION, [[{"content": "1"}]])]


@scenario(
    [
        [400, "invalid_request_error", "n"],
        [400, "invalid_request_error", "use_beam_search"],
        [400, "invalid_request_error", "tool_choice"],
        [400, "invalid_request_error", "temperature"],
    ],
    f"{ERROR_TYPES} {ERROR_PLACES}",
)
def error_batched_fields(api: Api) -> Any:
    return [
        refused(api, **each)
        for each in ({"n": 2}, {"use_beam_search": True}, {"tool_choice": "auto"}, {"temperature": -1})
    ]


@scenario([400, 400], "vLLM ignores these fields here. raycore refuses what it can't do.")
def error_batched_stream_and_tools(api: Api) -> Any:
    tool = {"type": "function", "function": {"name": "f"}}
    bodies = [{"messages": [QUESTION], **each} for each in ({"stream": True}, {"tools": [tool]})]
    return [api.post(PATH, **body).status_code for body in bodies]


@scenario([404, "invalid_request_error", "model"], ERROR_TYPES)
def error_batched_unknown_model(api: Api) -> Any:
    return refused(api, model="other")
