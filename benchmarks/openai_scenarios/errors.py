"""Errors: status, type and parameter."""

from __future__ import annotations

from typing import Any

from openai_scenarios.table import QUESTION, Api, of_error, scenario

ERROR_TYPES = "vLLM's error types are its own (BadRequestError); raycore's are OpenAI's."
ERROR_PARAMS = "vLLM doesn't always name the parameter."
ERROR_PLACES = "For a field of the wrong type, vLLM names a path in its own classes."


@scenario([404, "invalid_request_error", "model"], ERROR_TYPES)
def error_unknown_model(api: Api) -> Any:
    return of_error(lambda: api.client.completions.create(model="other", prompt="1"))


@scenario([404, "invalid_request_error", "model"], ERROR_TYPES)
def error_unknown_model_in_chat(api: Api) -> Any:
    return of_error(lambda: api.client.chat.completions.create(model="other", messages=QUESTION))


@scenario([400, "invalid_request_error", "prompt"], f"{ERROR_TYPES} It names a parameter that no request has.")
def error_prompt_too_long(api: Api) -> Any:
    return of_error(lambda: api.complete([5] * 2000))


@scenario([400, "invalid_request_error", "messages"], f"{ERROR_TYPES} It names a parameter that no request has.")
def error_conversation_too_long(api: Api) -> Any:
    return of_error(lambda: api.chat([{"role": "user", "content": "1" * 3000}]))


@scenario([[400, "invalid_request_error", "max_tokens"], [400, "invalid_request_error", "max_tokens"]], ERROR_TYPES)
def error_no_output(api: Api) -> Any:
    return [of_error(lambda: api.complete(max_tokens=0)), of_error(lambda: api.chat(max_tokens=0))]


@scenario(
    [[400, "invalid_request_error", "temperature"], [400, "invalid_request_error", "temperature"]],
    f"{ERROR_TYPES} {ERROR_PLACES}",
)
def error_temperature(api: Api) -> Any:
    return [of_error(lambda: api.complete(temperature=-1)), of_error(lambda: api.chat(temperature="hot"))]


@scenario([400, "invalid_request_error", "top_p"], ERROR_TYPES)
def error_top_p(api: Api) -> Any:
    return of_error(lambda: api.chat(top_p=1.5, temperature=1))


@scenario([400, "invalid_request_error", "presence_penalty"], f"{ERROR_TYPES} {ERROR_PARAMS}")
def error_penalty(api: Api) -> Any:
    return of_error(lambda: api.complete(presence_penalty=3))


@scenario([[400, "invalid_request_error", "n"], [400, "invalid_request_error", "n"]], f"{ERROR_TYPES} {ERROR_PARAMS}")
def error_n(api: Api) -> Any:
    return [of_error(lambda n=n: api.complete(n=n, temperature=1)) for n in (0, 100_000)]


@scenario([400, "invalid_request_error", "n"], f"{ERROR_TYPES} {ERROR_PARAMS}")
def error_n_of_greedy(api: Api) -> Any:
    return of_error(lambda: api.chat(n=2, temperature=0))


@scenario(
    [[400, "invalid_request_error", "stop"], [400, "invalid_request_error", "stop"]],
    f"{ERROR_TYPES} {ERROR_PARAMS} {ERROR_PLACES}",
)
def error_stop(api: Api) -> Any:
    return [of_error(lambda: api.complete(stop="")), of_error(lambda: api.complete(stop=["x"] * 100))]


@scenario([[400, "invalid_request_error", "logprobs"], [400, "invalid_request_error", "top_logprobs"]], ERROR_TYPES)
def error_logprobs(api: Api) -> Any:
    return [of_error(lambda: api.complete(logprobs=1000)), of_error(lambda: api.chat(top_logprobs=2))]


@scenario([[400, "invalid_request_error", "logit_bias"], [400, "invalid_request_error", "logit_bias"]], ERROR_TYPES)
def error_logit_bias(api: Api) -> Any:
    return [of_error(lambda key=key: api.complete(logit_bias={key: 1})) for key in ("one", "1000000")]


@scenario([400, "invalid_request_error", "prompt"], f"{ERROR_TYPES} {ERROR_PARAMS}")
def error_token_outside_the_vocabulary(api: Api) -> Any:
    return of_error(lambda: api.complete([1_000_000]))


@scenario(
    [
        [400, "invalid_request_error", "prompt"],
        [400, "invalid_request_error", "prompt"],
        [400, "invalid_request_error", "prompt"],
    ],
    f"{ERROR_TYPES} {ERROR_PARAMS}",
)
def error_empty_prompt(api: Api) -> Any:
    return [of_error(lambda prompt=prompt: api.complete(prompt)) for prompt in ("", [], [[]])]


@scenario(
    [
        [400, "invalid_request_error", "messages"],
        [400, "invalid_request_error", "messages"],
        [400, "invalid_request_error", "messages"],
        [400, "invalid_request_error", "messages"],
    ],
    f"{ERROR_TYPES} {ERROR_PARAMS} {ERROR_PLACES} It accepts a message without content.",
)
def error_messages(api: Api) -> Any:
    image = {"type": "image_url", "image_url": {"url": "http://localhost/none.png"}}
    bad = [[], [{"role": "user"}], [{"content": "1"}], [{"role": "user", "content": [image]}]]
    return [of_error(lambda messages=messages: api.chat(messages)) for messages in bad]


@scenario([400, "invalid_request_error", "stream_options"], ERROR_TYPES)
def error_stream_options_without_a_stream(api: Api) -> Any:
    return of_error(lambda: api.complete(stream_options={"include_usage": True}))


@scenario(
    [400, "invalid_request_error", "prompt"],
    "vLLM sends the status before it checks the token ids, so the error is an event.",
)
def error_in_a_stream_is_a_status(api: Api) -> Any:
    return of_error(lambda: list(api.complete([1_000_000], stream=True)))


@scenario(
    [[400, "invalid_request_error", None], [400, "invalid_request_error", None], [400, "invalid_request_error", None]],
    f"{ERROR_TYPES} {ERROR_PLACES}",
)
def error_no_json(api: Api) -> Any:
    headers = {"content-type": "application/json"}
    bodies = [b"{", b"[]", b""]
    return [
        of_error(lambda body=body: api.http.post("/v1/completions", content=body, headers=headers)) for body in bodies
    ]


@scenario(
    [
        [400, "invalid_request_error", "response_format"],
        [400, "invalid_request_error", "response_format"],
        [400, "invalid_request_error", "response_format"],
        [400, "invalid_request_error", "response_format"],
    ],
    f"{ERROR_TYPES} {ERROR_PARAMS} {ERROR_PLACES}",
)
def error_response_format(api: Api) -> Any:
    schemas = [{"type": "text"}, {"type": "string", "pattern": "("}, None]
    formats = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in schemas]
    return [of_error(lambda each=each: api.chat(response_format=each)) for each in [*formats, {"type": "yaml"}]]


@scenario(
    [
        [400, "invalid_request_error", "structured_outputs"],
        [400, "invalid_request_error", "structured_outputs"],
        [400, "invalid_request_error", "structured_outputs"],
        [400, "invalid_request_error", "structured_outputs"],
    ],
    f"{ERROR_TYPES} {ERROR_PARAMS}",
)
def error_structured_outputs(api: Api) -> Any:
    bad = [{"regex": "("}, {"grammar": "root ::= nothing"}, {"choice": []}, {"regex": "a", "choice": ["a"]}]
    return [of_error(lambda each=each: api.complete(structured_outputs=each)) for each in bad]


@scenario([404, 405])
def error_path_and_method(api: Api) -> Any:
    return [api.http.get("/v1/nothing").status_code, api.http.get("/v1/completions").status_code]
