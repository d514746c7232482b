"""Adds the ranges of a request's fields to the OpenAPI document.

The request models leave the ranges out on purpose: the checks in `raycore.server.generation.sampling` and in the engine
give better errors than pydantic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raycore.sampling_params import MAX_LOGPROB_TOKEN_IDS, RANGES, Range
from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.handlers import handler_of
from raycore.server.dialects.responses.chat_request import ABSENT as RESPONSES_ABSENT
from raycore.server.dialects.responses.chat_request import HINTS, SAME
from raycore.server.dialects.responses.protocol import ResponsesRequest
from raycore.server.dialects.tokens.protocol import GenerateRequest
from raycore.server.endpoints import Rule, endpoints_with
from raycore.server.generation.sampling import ABSENT, ONLY, TOKEN_ID_PATTERN
from raycore.server.options import ServerOptions
from raycore.server.protocol import (
    INT64_MAX,
    ChatCompletionRequest,
    CompletionRequest,
    Fields,
    Routed,
    TokenizeRequest,
    nullable_names,
)

JsonSchema = dict[str, Any]

_NOTHING: Mapping[str, Any] = {}
Ranges = dict[str, JsonSchema]
"""JSON Schema keywords for a field, by the JSON type of its value."""

_NULL: JsonSchema = {"type": "null"}
_INT64: JsonSchema = {"minimum": -INT64_MAX - 1, "maximum": INT64_MAX}
"""FastAPI turns the models' bounds into floats, which are off by one."""
_FUNCTION_CALL: JsonSchema = {
    "properties": {
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["function"],
}
_TEXT_PART: JsonSchema = {"properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["text"]}


def add_ranges(schemas: dict[str, JsonSchema], options: ServerOptions, engine: ServingEngine) -> None:
    """Narrow the schemas of requests to what this server accepts. Describes only simple dependencies between fields."""
    token = {"minimum": 0, "maximum": engine.get_tokenizer().vocab_size - 1}
    messages: Ranges = {"array": {"minItems": 1}}
    _narrow_fields(schemas["TokenizeRequest"], {"messages": messages}, options)
    _narrow_fields(schemas["DetokenizeRequest"], {"tokens": {"integer": token}}, options)
    message: dict[str, Ranges] = {"tool_calls": {"object": _FUNCTION_CALL}, "content": {"object": _TEXT_PART}}
    _narrow_fields(schemas["Message"], message, options)
    _allow_nulls(schemas["TokenizeRequest"], TokenizeRequest)
    schemas["Message"]["anyOf"] = [
        _has("content", "string", "array"),
        _has("tool_calls", "array", minItems=1),
        *(_has(name, "string") for name in ("reasoning", "reasoning_content")),
    ]
    schemas["TokenizeRequest"]["oneOf"] = [_has("prompt", "string"), _has("messages", "array")]
    if engine.pooling_spec is None:
        _add_generating(schemas, options, engine.max_model_len, token)
    else:
        from raycore.parts.pooling.server.parameters import ABSENT as POOLING_ABSENT  # only for models that pool
        from raycore.parts.pooling.server.parameters import ONLY as POOLING_ONLY

        given = [handler_of(each).body for each in endpoints_with(Rule.POOLS)]
        bodies = {body.__name__: body for body in given if body is not None}
        _add_pooling(schemas, options, bodies, POOLING_ABSENT, POOLING_ONLY, engine.max_model_len, token)


def _add_generating(schemas: dict[str, JsonSchema], options: ServerOptions, longest: int, token: JsonSchema) -> None:
    sampling = _sampling_ranges(options, token)
    completion: dict[str, Ranges] = {
        "prompt": {"integer": token, "string": {"minLength": 1}, "array": {"minItems": 1}},
        "max_tokens": {"integer": {"minimum": 0, "maximum": longest}},
    }
    chat: dict[str, Ranges] = {
        "messages": {"array": {"minItems": 1}},
        "max_completion_tokens": {"integer": {"minimum": 1, "maximum": longest}},
    }
    for request, ranges in ((CompletionRequest, sampling | completion), (ChatCompletionRequest, sampling | chat)):
        _narrow_fields(schemas[request.__name__], ranges, options, ABSENT, ONLY)
        _allow_nulls(schemas[request.__name__], request)
    _narrow_fields(
        schemas["GenerateRequest"], {"token_ids": {"integer": token}, "priority": {"integer": _INT64}}, options
    )
    _allow_nulls(schemas["GenerateRequest"], GenerateRequest)
    for name in ("MessagesRequest", "CountTokensRequest"):
        _narrow_fields(schemas[name], {}, options)
    same = {name: values for name, values in ONLY.items() if name in SAME}
    response: dict[str, Ranges] = {
        "input": {"string": {"minLength": 1}, "array": {"minItems": 1}},
        "max_output_tokens": {"integer": {"minimum": 1, "maximum": longest}},
        "max_tool_calls": {"integer": {"minimum": 1}},
        "metadata": {"object": {"maxProperties": 16}},
    }
    _narrow_fields(schemas["ResponsesRequest"], sampling | response, options, ABSENT | HINTS | RESPONSES_ABSENT, same)
    _allow_nulls(schemas["ResponsesRequest"], ResponsesRequest)
    _narrow_fields(schemas["StructuredOutputs"], {"choice": {"array": {"minItems": 1}}}, options)
    _narrow_fields(schemas["AllowedTools"], {"tools": {"array": {"minItems": 1}}}, options)

    max_tokens = {"type": ["integer", "null"], "minimum": 1, "maximum": longest}
    schemas["CompletionRequest"]["allOf"] = [
        _unless("echo", {"const": True}, "max_tokens", max_tokens),
        _unless("stream", {"const": True}, "stream_options", _NULL),
    ]
    prompts = (_has(name, "string", "array") for name in ("prompt", "prompt_embeds"))
    schemas["CompletionRequest"]["anyOf"] = list(prompts)
    schemas["ResponsesRequest"]["allOf"] = [_unless("stream", {"const": True}, "stream_options", _NULL)]
    schemas["ResponsesRequest"]["anyOf"] = [_has("input", "string", "array"), _has("previous_response_id", "string")]
    schemas["ChatCompletionRequest"]["allOf"] = [
        _unless("max_completion_tokens", {"type": "integer"}, "max_tokens", max_tokens),
        _unless("logprobs", {"const": True}, "top_logprobs", _NULL),
        _unless("stream", {"const": True}, "stream_options", _NULL),
    ]


def _add_pooling(
    schemas: dict[str, JsonSchema],
    options: ServerOptions,
    bodies: Mapping[str, type[Routed]],
    absent: Mapping[str, str],
    only: Mapping[str, tuple[Any, ...]],
    longest: int,
    token: JsonSchema,
) -> None:
    """Narrow the schemas of those of the requests that this server takes. `bodies`: all of them, by name."""
    limit = {"integer": {"minimum": 0, "maximum": longest - 1}}
    listed = {"array": {"minItems": 1, "maxItems": options.max_sequences}}
    ranges: dict[str, Ranges] = {
        "input": {"integer": token, **listed},
        "truncate_prompt_tokens": {"integer": {"minimum": -1, "maximum": longest}},
        "dimensions": {"integer": {"minimum": 1}},
        "output_dimension": {"integer": {"minimum": 1}},
        "top_n": {"integer": {"minimum": 0}},
        "max_tokens": {"integer": {"minimum": 1}},
        "max_tokens_per_query": limit,
        "max_tokens_per_doc": limit,
        "priority": {"integer": _INT64},
        **dict.fromkeys(("documents", "queries", "items", "texts", "inputs"), listed),
    }
    for name in bodies.keys() & schemas.keys():
        _narrow_fields(schemas[name], ranges, options, absent, only)
        _allow_nulls(schemas[name], bodies[name])
        if "messages" in schemas[name]["properties"]:
            schemas[name]["oneOf"] = [
                _has("input", "string", "array"),
                _has("messages", "array"),
            ]


def _allow_nulls(schema: JsonSchema, request: type[Fields]) -> None:
    for field in nullable_names(request):
        _allow_null(schema["properties"][field])


def _sampling_ranges(options: ServerOptions, token: JsonSchema) -> dict[str, Ranges]:
    """The ranges of the sampling fields, by field."""
    most = options.max_logprobs
    logprobs: Ranges = {"integer": {"minimum": -1} if most == -1 else {"minimum": 0, "maximum": most}}
    int64 = _INT64
    word = {"minLength": 1, "maxLength": options.max_word_characters}
    declared = {name: _keywords(field, int64) for name, field in RANGES.items()}
    del declared["max_tokens"]  # depends on other fields
    return declared | {
        "n": {"integer": {"minimum": 1, "maximum": options.max_n}},
        "seed": {"integer": int64},
        "priority": {"integer": int64},
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "prompt_logprobs": logprobs,
        "logit_bias": {"object": {"propertyNames": {"pattern": f"^{TOKEN_ID_PATTERN}$"}}},
        "stop": {"string": word, "array": {"maxItems": options.max_stop_strings}},
        "bad_words": {"string": word, "array": {"maxItems": options.max_bad_words}},
        "stop_token_ids": {"integer": token},
        "allowed_token_ids": {"integer": token, "array": {"minItems": 1}},
        "logprob_token_ids": {"integer": token, "array": {"maxItems": MAX_LOGPROB_TOKEN_IDS}},
    }


def _keywords(field: Range, int64: JsonSchema) -> Ranges:
    """A field's range as JSON Schema."""
    bounds: JsonSchema = {"exclusiveMinimum" if field.excludes_low else "minimum": field.low}
    if field.is_int:
        return {"integer": int64 | bounds}
    return {"number": bounds if math.isinf(field.high) else bounds | {"maximum": field.high}}


def _narrow_fields(
    request: JsonSchema,
    ranges: Mapping[str, Ranges],
    options: ServerOptions,
    absent: Mapping[str, str] = _NOTHING,
    only: Mapping[str, tuple[Any, ...]] = _NOTHING,
) -> None:
    """Narrow the schema of a request's fields. `absent` and `only`: see `raycore.server.generation.sampling`."""
    for field, schema in request["properties"].items():
        _narrow(schema, ranges.get(field, {}))
        if field == "model" and (options.lora_modules or options.allowed_lora_directories):
            schema["description"] = "A name under which the model is served, or an adapter's name: see /v1/models"
        elif field == "model":
            schema["enum"] = [*options.served_model_names, None]
        elif field in absent:
            schema.clear()
            schema |= {**_NULL, "description": f"Not supported: {absent[field]}"}
        elif field in only:
            schema["enum"] = [*only[field], None]


def _narrow(schema: JsonSchema, ranges: Ranges) -> None:
    """Add the ranges to a schema, its alternatives, and its items."""
    for alternative in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        _narrow(alternative, ranges)
    if "items" in schema:
        _narrow(schema["items"], ranges)
    schema |= ranges.get(schema.get("type", ""), {})


def _allow_null(schema: JsonSchema) -> None:
    """Allow null, which means the same as leaving the field out."""
    if "type" in schema:
        schema["type"] = [schema["type"], "null"]


def _unless(other: str, wanted: JsonSchema, field: str, schema: JsonSchema) -> JsonSchema:
    """`field` has to match `schema`, unless `other` is present and matches `wanted`."""
    return {"anyOf": [{"properties": {field: schema}}, {"properties": {other: wanted}, "required": [other]}]}


def _has(field: str, *types: str, **keywords: Any) -> JsonSchema:
    return {"properties": {field: {"type": list(types), **keywords}}, "required": [field]}
