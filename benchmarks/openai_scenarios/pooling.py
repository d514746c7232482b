"""Embeddings, scores, classes and rankings."""

from __future__ import annotations

import base64
import struct
from typing import Any

from openai_scenarios.errors import ERROR_PARAMS, ERROR_PLACES, ERROR_TYPES
from openai_scenarios.table import EMBEDS, PROMPT, PROMPT_IDS, QUESTION, SCORES, Api, of_error, scenario

OTHER = "what is it?"
DOCUMENTS = ["58", "it is 85", "what?"]


def of_numbers(numbers: list[float] | str) -> list[Any]:
    """The length, and the first four numbers, rounded. Numbers may be the bytes of float32, as base64."""
    if isinstance(numbers, str):
        stored = base64.b64decode(numbers)
        numbers = list(struct.unpack(f"<{len(stored) // 4}f", stored))
    return [len(numbers), *(round(each, 2) for each in numbers[:4])]


def of_embeddings(answer: Any) -> list[Any]:
    """The embeddings of a response of the official client, and its usage."""
    rows = [of_numbers(entry.embedding) for entry in answer.data]
    assert [entry.index for entry in answer.data] == list(range(len(rows)))
    return [*rows, [answer.usage.prompt_tokens, answer.usage.total_tokens]]


def embed(api: Api, given: Any, **fields: Any) -> Any:
    return api.client.embeddings.create(model=api.model, input=given, **fields)


@scenario([[128, 0.02, -0.1, 0.04, 0.07], [7, 7]], of=EMBEDS)
def embedding_of_a_text(api: Api) -> Any:
    return of_embeddings(embed(api, PROMPT))


@scenario([[128, 0.02, -0.1, 0.04, 0.07], [128, -0.46, 0.02, 0.15, -0.0], [14, 14]], of=EMBEDS)
def embeddings_as_float(api: Api) -> Any:
    return of_embeddings(embed(api, [PROMPT, OTHER], encoding_format="float"))


@scenario(["list", "embedding", [128, 0.02, -0.1, 0.04, 0.07]], of=EMBEDS)
def embeddings_as_base64(api: Api) -> Any:
    answer = api.post("/v1/embeddings", input=[PROMPT], encoding_format="base64").json()
    return [answer["object"], answer["data"][0]["object"], of_numbers(answer["data"][0]["embedding"])]


@scenario([[128, 0.02, -0.1, 0.04, 0.07], [128, -0.34, -0.01, 0.06, 0.03], [10, 10]], of=EMBEDS)
def embeddings_of_token_ids(api: Api) -> Any:
    return of_embeddings(embed(api, [PROMPT_IDS, PROMPT_IDS[:3]]))


@scenario([[128, 0.02, -0.1, 0.04, 0.07], [7, 7]], of=EMBEDS)
def embedding_of_a_list_of_token_ids(api: Api) -> Any:
    return of_embeddings(embed(api, PROMPT_IDS))


@scenario([[8, 0.06, -0.34, 0.13, 0.25], [7, 7]], of=EMBEDS)
def embeddings_of_few_dimensions(api: Api) -> Any:
    return of_embeddings(embed(api, PROMPT, dimensions=8))


@scenario([[128, 0.37, -1.94, 0.73, 1.41], [7, 7]], of=EMBEDS)
def embeddings_that_are_not_normalized(api: Api) -> Any:
    return of_embeddings(embed(api, PROMPT, extra_body={"use_activation": False}))


@scenario([[128, -0.33, 0.06, 0.2, -0.02], 15], of=EMBEDS)
def embedding_of_a_conversation(api: Api) -> Any:
    answer = api.post("/v1/embeddings", messages=QUESTION).json()
    return [of_numbers(answer["data"][0]["embedding"]), answer["usage"]["prompt_tokens"]]


@scenario([[128, -0.34, -0.01, 0.06, 0.03], [3, 3]], of=EMBEDS)
def embedding_of_a_prompt_that_is_cut(api: Api) -> Any:
    return of_embeddings(embed(api, PROMPT, extra_body={"truncate_prompt_tokens": 3}))


@scenario([[128, -0.03, -0.05, -0.12, 0.09], [3, 3]], of=EMBEDS)
def embedding_of_a_prompt_that_is_cut_at_its_beginning(api: Api) -> Any:
    fields = {"truncate_prompt_tokens": 3, "truncation_side": "left"}
    return of_embeddings(embed(api, PROMPT, extra_body=fields))


@scenario(["application/octet-stream", 512, True], of=EMBEDS)
def embeddings_as_bytes(api: Api) -> Any:
    answer = api.post("/v1/embeddings", input=[PROMPT, OTHER], encoding_format="bytes", embed_dtype="float16")
    return [answer.headers["content-type"], len(answer.content), "metadata" in answer.headers]


@scenario(
    [
        [128, 0.02, -0.1, 0.04, 0.07],
        [185, 4, 74, 64],
        [128, 0.02, -0.1, 0.04, 0.07],
        ["27 + 58 ="],
        "embeddings_by_type",
        7,
    ],
    of=EMBEDS,
)
def embeddings_as_cohere(api: Api) -> Any:
    answer = api.post("/v2/embed", texts=[PROMPT], embedding_types=["float", "ubinary", "base64"]).json()
    found = answer["embeddings"]
    return [
        of_numbers(found["float"][0]),
        found["ubinary"][0][:4],
        of_numbers(found["base64"][0]),
        answer["texts"],
        answer["response_type"],
        answer["meta"]["billed_units"]["input_tokens"],
    ]


@scenario([[1.0, 0.132, 0.052, 0.181], "score", 25], of=EMBEDS)
def scores_of_embeddings(api: Api) -> Any:
    answer = api.post("/score", text_1=PROMPT, text_2=[PROMPT, *DOCUMENTS]).json()
    return [
        [round(entry["score"], 3) for entry in answer["data"]],
        answer["data"][0]["object"],
        answer["usage"]["prompt_tokens"],
    ]


@scenario([400, "invalid_request_error", "task"], ERROR_TYPES, of=EMBEDS)
def error_task_that_the_model_has_not_got(api: Api) -> Any:
    return of_error(lambda: api.post("/pooling", input=PROMPT, task="classify"))


@scenario(["list", "pooling", [128, 0.02, -0.1, 0.04, 0.07]], of=EMBEDS)
def pooling_without_a_task(api: Api) -> Any:
    answer = api.post("/pooling", input=PROMPT).json()
    return [answer["object"], answer["data"][0]["object"], of_numbers(answer["data"][0]["data"])]


@scenario(
    [
        [400, "invalid_request_error", "input"],
        [400, "invalid_request_error", "input"],
        [400, "invalid_request_error", "input"],
        [400, "invalid_request_error", "input"],
    ],
    f"{ERROR_TYPES} {ERROR_PARAMS}",
    of=EMBEDS,
)
def error_embeddings_of_nothing(api: Api) -> Any:
    return [of_error(lambda given=given: embed(api, given)) for given in ([], "", [""], [[]])]


@scenario(
    [
        [400, "invalid_request_error", "input"],
        [400, "invalid_request_error", "input"],
        [400, "invalid_request_error", "input"],
        [400, "invalid_request_error", "input"],
    ],
    f"{ERROR_TYPES} {ERROR_PLACES}",
    of=EMBEDS,
)
def error_embeddings_of_something_else(api: Api) -> Any:
    return [
        of_error(lambda given=given: api.post("/v1/embeddings", input=given)) for given in (5, None, {"a": 1}, [1.5])
    ]


@scenario([400, "invalid_request_error", "input"], f"{ERROR_TYPES} {ERROR_PARAMS}", of=EMBEDS)
def error_embeddings_of_unknown_tokens(api: Api) -> Any:
    return of_error(lambda: embed(api, [5, 100_000]))


@scenario(
    [[400, "invalid_request_error", "input"], [400, "invalid_request_error", "input"]],
    f"{ERROR_TYPES} It names a parameter that no request has.",
    of=EMBEDS,
)
def error_embeddings_of_a_long_text(api: Api) -> Any:
    return [of_error(lambda: embed(api, "1 " * 3000)), of_error(lambda: embed(api, [5] * 2000))]


@scenario(
    [
        [400, "invalid_request_error", "dimensions"],
        [400, "invalid_request_error", "dimensions"],
        [400, "invalid_request_error", "dimensions"],
    ],
    f"{ERROR_TYPES} {ERROR_PARAMS}",
    of=EMBEDS,
)
def error_dimensions(api: Api) -> Any:
    return [of_error(lambda size=size: embed(api, PROMPT, dimensions=size)) for size in (0, -1, 100_000)]


@scenario([400, "invalid_request_error", "encoding_format"], f"{ERROR_TYPES} {ERROR_PLACES}", of=EMBEDS)
def error_encoding_format(api: Api) -> Any:
    return of_error(lambda: embed(api, PROMPT, extra_body={"encoding_format": "hex"}))


@scenario([404, "invalid_request_error", "model"], f"{ERROR_TYPES} {ERROR_PARAMS}", of=EMBEDS)
def error_model_of_embeddings(api: Api) -> Any:
    return of_error(lambda: api.client.embeddings.create(model="other", input=PROMPT))


@scenario([404, 404], of=EMBEDS)
def a_model_of_embeddings_completes_nothing(api: Api) -> Any:
    return [api.post("/v1/completions", prompt=PROMPT).status_code, api.post("/classify", input=PROMPT).status_code]


@scenario([404, 404, 404, 404, 404, 404])
def a_model_that_generates_pools_nothing(api: Api) -> Any:
    return [
        api.post(path, input=PROMPT).status_code
        for path in ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/rerank")
    ]


@scenario([[0.526, 0.472, 0.466], "list", 32], of=SCORES)
def scores_of_pairs(api: Api) -> Any:
    answer = api.post("/score", text_1=PROMPT, text_2=DOCUMENTS).json()
    return [[round(entry["score"], 3) for entry in answer["data"]], answer["object"], answer["usage"]["prompt_tokens"]]


@scenario([0.526, 0.495, 0.445], of=SCORES)
def scores_one_by_one(api: Api) -> Any:
    answer = api.post("/v1/score", queries=[PROMPT, OTHER, "a"], documents=DOCUMENTS).json()
    return [round(entry["score"], 3) for entry in answer["data"]]


@scenario(0.1, of=SCORES)
def scores_without_activation(api: Api) -> Any:
    answer = api.post("/score", text_1=PROMPT, text_2=DOCUMENTS[0], use_activation=False).json()
    return round(answer["data"][0]["score"], 2)


@scenario(
    [
        [[0, "58", 0.526], [1, "it is 85", 0.472]],
        [[0, "58", 0.526], [1, "it is 85", 0.472]],
        [[0, "58", 0.526], [1, "it is 85", 0.472]],
        ["prompt_tokens", "total_tokens"],
        32,
    ],
    of=SCORES,
)
def documents_ranked(api: Api) -> Any:
    answers = [
        api.post(path, query=PROMPT, documents=DOCUMENTS, top_n=2).json()
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ]
    return [
        [[each["index"], each["document"]["text"], round(each["relevance_score"], 3)] for each in answer["results"]]
        for answer in answers
    ] + [sorted(answers[0]["usage"]), answers[0]["usage"]["total_tokens"]]


@scenario([[1, 0.501], [2, 0.448], [0, 0.375]], of=SCORES)
def documents_cut(api: Api) -> Any:
    answer = api.post("/rerank", query=PROMPT, documents=DOCUMENTS, max_tokens_per_query=3, max_tokens_per_doc=2).json()
    return [[each["index"], round(each["relevance_score"], 3)] for each in answer["results"]]


@scenario([[[1, 0.381], [1, 0.449]], "list", 14], of=SCORES)
def classes_of_texts(api: Api) -> Any:
    answer = api.post("/classify", input=[PROMPT, OTHER]).json()
    rows = [[each["num_classes"], *(round(prob, 3) for prob in each["probs"])] for each in answer["data"]]
    return [rows, answer["object"], answer["usage"]["prompt_tokens"]]


@scenario([400, 400, 400, 400, 400, 400, 400], of=SCORES)
def error_scores(api: Api) -> Any:
    bodies: list[dict[str, Any]] = [
        {"text_1": [], "text_2": "a"},
        {"text_1": "a", "text_2": []},
        {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]},
        {"text_1": "a"},
        {"text_1": "a", "text_2": 5},
        {"text_1": "a", "text_2": "1 " * 3000},
        {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 5000},
    ]
    return [of_error(lambda body=body: api.post("/score", **body))[0] for body in bodies]


@scenario([400, 400, 400, 400], of=SCORES)
def error_rankings(api: Api) -> Any:
    bodies: list[dict[str, Any]] = [
        {"query": "a", "documents": []},
        {"query": "a", "documents": ["b"], "top_n": -1},
        {"query": ["a"], "documents": ["b"]},
        {"documents": ["b"]},
    ]
    return [of_error(lambda body=body: api.post("/rerank", **body))[0] for body in bodies]
