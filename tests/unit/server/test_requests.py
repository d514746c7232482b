"""What is asked for is done, or refused by its name with OpenAI's error object."""

from __future__ import annotations

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from pydantic import ValidationError

from raycore.errors import InvalidRequest, RequestFailed
from raycore.server import ServerOptions
from raycore.server.http.errors import invalid_body
from raycore.server.http.ignored_fields import noting
from raycore.server.protocol import ChatCompletionRequest, CompletionRequest
from raycore.structured_outputs import StructuredOutputsParams

BAD = "invalid_request_error"
HEADER = "x-raycore-ignored-fields"

REFUSED = {
    "/v1/completions": [
        ({"suffix": "x"}, "suffix"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"prompt": "1" * 300}, "prompt"),
        ({"prompt": [5] * 300}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": [[5], [320]]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": ["1"] * 5}, "prompt"),
        ({"prompt": ["1"] * 3, "n": 2}, "n"),
        ({"prompt": "half a pair: \ud800"}, "prompt"),
        ({"prompt": ["1", 2]}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
    "/v1/chat/completions": [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "structures": "x"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {"a": "x" * (1 << 18)}}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"verbosity": "high"}, "verbosity"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"moderation": {}}, "moderation"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"media_io_kwargs": {"image": {}}}, "media_io_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
}
REFUSED_BY_BOTH = [
    ({"n": 0}, "n"),
    ({"n": 5}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"stop": ["a"] * 4}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": "x" * 11}, "stop"),
    ({"stop": ["a", "x" * 11]}, "stop"),
    ({"stop": "\udc00"}, "stop"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "one"}, "seed"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**63}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"320": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": "much"}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [320]}, "allowed_token_ids"),
    ({"stop_token_ids": [320]}, "stop_token_ids"),
    ({"stop_token_ids": [5] * 321}, "stop_token_ids"),
    ({"allowed_token_ids": [5] * 321}, "allowed_token_ids"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"bad_words": [""]}, "bad_words"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "a" * 300_000}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": 5}}, "structured_outputs"),
    ({"structured_outputs": {"json": 1}}, "structured_outputs"),
    ({"bad_words": ["a"] * 4}, "bad_words"),
    ({"bad_words": ["x" * 11]}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"priority": 2**63}, "priority"),
    ({"request_id": "x" * 257}, "request_id"),
    ({"stream": "often"}, "stream"),
    ({"n": "one"}, "n"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_everything": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"nonsense": 1}, "nonsense"),
    ({"best_of": 2}, "best_of"),
    ({"length_penalty": 1.5}, "length_penalty"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
    ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ({"vllm_xargs": {"a": 2**70}}, "vllm_xargs"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, "repetition_detection"),
    ({"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4}}, "repetition_detection"),
    ({"repetition_detection": {"max_pattern_size": -1}}, "repetition_detection"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "\ud800"}, "cache_salt"),
    ({"\ud800": 1}, "?"),
]
CASES = [(path, *case) for path, own in REFUSED.items() for case in [*own, *REFUSED_BY_BOTH]]


@pytest.fixture
def strict(serve):
    limits = {"strict_fields": True, "strict_max_tokens": True}
    return serve(**limits, max_n=4, max_stop_strings=3, max_bad_words=3, max_word_characters=10, max_sequences=4)


@pytest.mark.parametrize(("path", "fields", "param"), CASES)
def test_unsupported_fields_and_values_are_refused_by_the_fields_name(strict, engine, path, fields, param):
    prompt = {"prompt": "1"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "1"}]}
    answer = strict.post(path, prompt | fields)
    assert answer.error == (400, BAD, param), answer.body
    assert engine.params == [], "it was run"
    assert (param or "").rpartition(".")[2] in answer.json["error"]["message"]
    if "stream" not in fields and param != "stream_options":
        assert strict.post(path, prompt | fields | {"stream": True}).error[0] == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "seed": -5, "logit_bias": {"5": 100, "6": -100}, "stop": ["a", "b", "c"], "n": 4},
        {"temperature": 0, "top_p": 1, "presence_penalty": 2, "frequency_penalty": -2, "n": None, "stop": None},
        {"stop": "x" * 10, "bad_words": ["x" * 10, "y", "z"], "stop_token_ids": [5] * 320},
        {"top_k": 2**62, "min_tokens": 1, "priority": -3, "stream_options": None, "request_id": "mine"},
    ],
)
def test_supported_fields_and_values_are_accepted(strict, fields):
    assert strict.complete(**fields).status == 200
    assert strict.chat(**fields).status == 200


def test_hints_without_effect_are_accepted(client):
    hints = {
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "store": False,
        "service_tier": "auto",
        "verbosity": "medium",
        "reasoning_effort": "low",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "in_memory",
        "safety_identifier": "me",
        "parallel_tool_calls": True,
    }
    assert client.chat(**hints).status == 200


@pytest.mark.parametrize(
    ("documented", "known", "ask"),
    [
        (chat_params.CompletionCreateParamsBase, ChatCompletionRequest, "chat"),
        (completion_params.CompletionCreateParamsBase, CompletionRequest, "complete"),
    ],
)
def test_a_field_that_openai_documents_is_known_or_refused_by_its_name(client, documented, known, ask):
    fields = documented.__annotations__.keys()
    assert len(fields & known.model_fields.keys()) >= 17
    for field in fields - known.model_fields.keys():  # newer than this server
        assert getattr(client, ask)(**{field: "x"}).headers[HEADER] == field


def test_sampling_parameters_reach_the_engine(client, engine):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 9,
        "allowed_token_ids": [5, 6],
        "bad_words": ["y"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "n": 2,
    }
    client.complete(**fields, logit_bias={"5": 1000.0}, logprobs=3)
    client.chat(**fields, logit_bias={"5": 1000.0}, logprobs=True, top_logprobs=3)
    for params in engine.params:
        assert {name: getattr(params, name) for name in fields} == fields
        assert params.logit_bias == {5: 100.0}
        assert params.logprobs == 3


SCHEMA = {"type": "object", "properties": {"json": {"type": "integer"}}}
STRUCTURES = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<"]}
FORMAT = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, {"json": {"type": "integer"}}),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            {"json_object": True, "disable_any_whitespace": True},
        ),
        ({"response_format": {"type": "structural_tag", **STRUCTURES}}, {"structural_tag": STRUCTURES}),
        ({"response_format": {"type": "structural_tag", "format": FORMAT}}, {"structural_tag": {"format": FORMAT}}),
        ({"structured_outputs": {"structural_tag": '{"format": {}}'}}, {"structural_tag": {"format": {}}}),
        ({"structured_outputs": {"structural_tag": STRUCTURES}}, {"structural_tag": STRUCTURES}),
    ],
)
def test_constraints_reach_the_engine(client, engine, fields, asked):
    assert client.chat(**fields).status == 200
    if "structured_outputs" in fields:
        assert client.complete(**fields).status == 200
    for params in engine.params:
        assert params.structured_outputs == StructuredOutputsParams(**asked)


@pytest.mark.parametrize("kind", [InvalidRequest, RequestFailed])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [("response_format", {"type": "json_object"}), ("structured_outputs", {"json_object": True})],
)
def test_an_invalid_constraint_is_refused_by_the_field_that_the_client_used(
    client, engine, field, value, is_stream, kind
):
    def fail(index):
        raise kind("structured_outputs.json_object=True: no way")

    engine.at_token = fail
    answer = client.chat(**{field: value}, stream=is_stream)
    assert answer.error == (400, BAD, field)
    assert "structured_outputs.json_object=True: no way" in answer.json["error"]["message"]
    if field == "structured_outputs":
        assert client.complete(**{field: value}, stream=is_stream).error == (400, BAD, field)


def test_a_request_for_an_unknown_model_is_refused(client):
    for answer in (client.complete(model="other"), client.chat(model="other"), client.get("/v1/models/other")):
        assert answer.error == (404, BAD, "model")
        assert answer.json["error"]["code"] == "model_not_found"
    assert client.complete(model="fake").json["model"] == "fake"


def test_a_body_that_is_no_request_is_refused(client):
    for raw in (b"{", b"[]", b"1", b"", b'{"prompt": "1", "n": NaN}', b"[" * 100_000, b"\xff"):
        answer = client.post("/v1/completions", raw=[raw])
        assert answer.error[:2] == (400, BAD), raw
    answer = client.post("/v1/completions", {"prompt": "1"}, headers={"content-type": "text/html"})
    assert answer.error[:2] == (415, BAD)


MANY = 50
WRONG = [
    (CompletionRequest, {"prompt": [0.5] * MANY}, "prompt.token_ids.0"),
    (CompletionRequest, {"prompt": ["1"] + [0.5] * MANY}, "prompt.texts.1"),
    (CompletionRequest, {"prompt": [[1], *[[0.5]] * MANY]}, "prompt.lists_of_token_ids.1.0"),
    (CompletionRequest, {"prompt": 5}, "prompt"),
    (CompletionRequest, {"prompt": "1", "stop": [0.5] * MANY}, "stop.list.0"),
    (CompletionRequest, {"prompt": "1", "bad_words": [0.5] * MANY}, "bad_words.0"),
    (CompletionRequest, {"prompt": "1", "stop_token_ids": [0.5] * MANY}, "stop_token_ids.0"),
    (CompletionRequest, {"prompt": "1", "logit_bias": {str(i): "x" for i in range(MANY)}}, "logit_bias.0"),
    (CompletionRequest, {f"unknown {i}": 1 for i in range(MANY)}, "unknown 0"),
    (CompletionRequest, {"prompt": "1", "stream_options": {f"x{i}": 1 for i in range(MANY)}}, "stream_options.x0"),
    (ChatCompletionRequest, {"messages": [0.5] * MANY}, "messages.0"),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": [0.5] * MANY}]}, "messages.0.content.list.0"),
    (ChatCompletionRequest, {"messages": [{"role": "user"}], "tools": [{"type": "x"}] * MANY}, "tools.0.type"),
    (ChatCompletionRequest, {"messages": [], "metadata": {str(i): 1 for i in range(MANY)}}, "messages"),
]


@pytest.mark.parametrize(("request_type", "body", "path"), WRONG)
def test_a_body_with_many_mistakes_is_refused_by_its_first_mistake(request_type, body, path):
    with noting(ServerOptions(("fake",), strict_fields=True)), pytest.raises(ValidationError) as caught:
        request_type.model_validate(body)
    assert caught.value.error_count() <= 2  # of a tool its type, and that it has no function
    message = invalid_body(caught.value.errors()).message
    assert message.startswith((f"{path}: ", f"{path}=")) or message == f"unrecognized request argument: {path}"
    assert "function-after" not in message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort='huge' is not supported: use 'none', 'minimal', "),
        ({"tool_choice": "any"}, "tool_choice='any' is not supported: use 'none', 'auto' or 'required'"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type='xml' is not supported: use 'text', 'json_object', 'json_schema' or",
        ),
    ],
)
def test_unsupported_values_are_refused_with_the_supported_ones(client, body, message):
    assert client.chat(**body).json["error"]["message"].startswith(message)


def test_unknown_paths_get_404_and_wrong_methods_405(client):
    assert client.get("/v1/nothing").error == (404, BAD, None)
    assert client.get("/v1/completions").error == (405, BAD, None)
    assert client.get("/v1/completions").headers["allow"] == "POST"


def test_a_request_id_in_use_is_refused_before_the_status_is_sent(client, engine):
    def fail(index):
        raise InvalidRequest("request_id='cmpl-mine' is already in use")

    engine.at_token = fail
    for is_stream in (False, True):
        assert client.complete(request_id="mine", stream=is_stream).error == (400, BAD, "request_id")


NEUTRAL = {
    "add_special_tokens": True,
    "best_of": 1,
    "bad_words": [],
    "cache_salt": None,
    "echo": False,
    "guided_choice": None,
    "guided_decoding_backend": None,
    "guided_grammar": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_whitespace_pattern": None,
    "include_stop_str_in_output": False,
    "kv_transfer_params": None,
    "length_penalty": 1.0,
    "logit_bias": {},
    "logits_processors": None,
    "logprob_token_ids": None,
    "min_tokens": 0,
    "mm_processor_kwargs": None,
    "priority": 0,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "return_token_ids": False,
    "return_token_offsets": False,
    "return_tokens_as_token_ids": False,
    "session_id": "mine",
    "stop": [],
    "stop_token_ids": [],
    "stream_interval": 1,
    "thinking_token_budget": -1,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "use_beam_search": False,
    "vllm_xargs": None,
    "watermarking": False,
    "return_mm_kwargs": True,
    "routed_experts_prompt_start": 0,
}
"""What vLLM's clients send when they want nothing of it."""
NEUTRAL_TO_CHAT = {
    "documents": None,
    "media_io_kwargs": None,
    "return_prompt_text": False,
    "add_generation_prompt": True,
}


@pytest.mark.parametrize("is_null", [False, True])
@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_vllms_own_fields_are_accepted_with_values_of_no_effect(client, engine, ask, is_null):
    fields = NEUTRAL | ({"prompt_embeds": None} if ask == "complete" else NEUTRAL_TO_CHAT)
    if is_null:
        fields = dict.fromkeys(fields)
    assert getattr(client, ask)(temperature=0).status == 200
    answer = getattr(client, ask)(temperature=0, **fields)
    assert answer.status == 200, answer.body
    plain, other = engine.params
    for name in ("stop", "stop_token_ids", "bad_words", "logit_bias"):
        assert not getattr(other, name)
        setattr(other, name, None)
    assert other == plain


def test_a_seed_of_minus_one_is_passed_on_as_none(client, engine):
    engine.default_sampling_params = {"seed": 5}
    assert client.complete(seed=-1).status == client.chat(seed=-1).status == 200
    assert [params.seed for params in engine.params] == [None, None]


def test_a_body_without_a_content_type_is_json(client):
    answer = client.post("/v1/completions", {"prompt": "1"}, headers={"content-type": None})
    assert answer.status == 200, answer.body
    assert client.post("/v1/completions", raw=[b"{"], headers={"content-type": None}).error[:2] == (400, BAD)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_cache_salt_and_data_parallel_rank_reach_the_engine(client, engine, ask, is_stream):
    headers = {"X-data-parallel-rank": "1"}
    assert getattr(client, ask)(stream=is_stream, cache_salt="s", headers=headers).status == 200
    assert getattr(client, ask)(stream=is_stream).status == 200
    assert engine.cache_salts == ["s", None]
    assert engine.dp_ranks == [1, None]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("ask", ["complete", "chat"])
@pytest.mark.parametrize("given", ["2", "-1", "one", "1.5", "", "9" * 30])
def test_a_data_parallel_rank_that_the_engine_lacks_is_a_bad_request(client, engine, ask, is_stream, given):
    answer = getattr(client, ask)(stream=is_stream, headers={"X-data-parallel-rank": given})
    assert answer.error[:2] == (400, BAD)
    assert "parallel" in answer.json["error"]["message"]
    assert engine.params == []
