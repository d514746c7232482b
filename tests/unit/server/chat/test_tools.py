"""Tools in chat, by what clients send and get. The engine writes given texts."""

from __future__ import annotations

import asyncio
import json
import random
import re

import httpx
import jsonschema
import numpy as np
import pytest
import tool_templates
from allowed_texts import fits
from asgi_client import Client
from fake_engine import END_OF_TEXT, VOCAB_SIZE, FakeEngine
from openai import AsyncOpenAI
from tokenizers_for_tests import demo_with_special_tokens

from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig, InvalidRequest
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.server import ServerOptions, build_app
from raycore.text.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER_CALL = CALL.replace("get_weather", "get_time")
WRITTEN = {
    tool_templates.HERMES: CALL,
    tool_templates.LLAMA3: '{"name": "get_weather", "parameters": {"city": "Köln"}}',
    tool_templates.QWEN3_CODER: (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"
    ),
    tool_templates.MISTRAL_LIST: '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln"}}]',
    tool_templates.MISTRAL: '[TOOL_CALLS]get_weather[ARGS]{"city": "Köln"}',
    tool_templates.GLM45: (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n</tool_call>"
    ),
    tool_templates.GLM47: "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>",
    tool_templates.MINIMAX_M2: (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    tool_templates.PYTHONIC: '[get_weather(city="Köln")]',
}
CALL_ID = "call_[0-9a-f]{24}|[0-9a-zA-Z]{9}"
REST_OF_CALL = {
    tool_templates.HERMES: '", "arguments": {}}',
    tool_templates.LLAMA3: '", "parameters": {}}',
    tool_templates.QWEN3_CODER: ">\n</function>",
    tool_templates.MISTRAL_LIST: '", "arguments": {}}]',
    tool_templates.MISTRAL: "[ARGS]{}",
    tool_templates.GLM45: "\n</tool_call>",
    tool_templates.GLM47: "</tool_call>",
    tool_templates.MINIMAX_M2: '">\n</invoke>',
    tool_templates.PYTHONIC: "()]",
}
"""Behind a function's name."""
LAST_OF_PREFILL = {
    tool_templates.HERMES: '"arguments":',
    tool_templates.LLAMA3: '"parameters":',
    tool_templates.QWEN3_CODER: "get_weather>\n",
    tool_templates.MISTRAL_LIST: '"arguments":',
    tool_templates.MISTRAL: "get_weather",
    tool_templates.GLM45: "get_weather\n",
    tool_templates.GLM47: "get_weather",
    tool_templates.MINIMAX_M2: 'get_weather">\n',
    tool_templates.PYTHONIC: "get_weather(",
}


def tool(name):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "Of a city.", "parameters": parameters}}


def named(name):
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("get_weather"), tool("get_time")]


class Writer:
    """A server whose model writes `text`, whatever it is asked."""

    def __init__(self, text="", template=tool_templates.HERMES, **options):
        self.engine = FakeEngine(text, max_model_len=4000)
        self.app = build_app(self.engine, ServerOptions(("fake",), chat_template=template, **options))
        self._client = Client(self.app)

    def chat(self, **body):
        return self._client.chat(**{"max_tokens": 1000, "tools": TOOLS, **body})

    def choice(self, **body):
        answer = self.chat(**body)
        assert answer.status == 200, answer.body
        return answer.json["choices"][0]

    def prompt(self, **body):
        """The text that the model goes on with."""
        answer = self.chat(return_token_ids=True, **body)
        assert answer.status == 200, answer.body
        return self.engine.get_tokenizer().decode(answer.json["prompt_token_ids"], skip_special_tokens=False)


def calls_of(message):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


def assembled(events, index=0):
    """(content, calls, finish reason) of one choice's events, put together as clients do."""
    content, calls, reasons = None, [], []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            if delta.get("content") is not None:
                content = (content or "") + delta["content"]
            for call in delta.get("tool_calls", []):
                if call["index"] == len(calls):
                    assert re.fullmatch(CALL_ID, call["id"])
                    assert call["type"] == "function"
                    calls.append((call["function"]["name"], ""))
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                name, arguments = calls[call["index"]]
                calls[call["index"]] = (name, arguments + call["function"]["arguments"])
            reasons.append(choice["finish_reason"])
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return content, calls, reasons[-1]


@pytest.mark.parametrize("template", WRITTEN)
def test_a_tool_call_is_answered_whole_and_streamed_in_pieces(template):
    writer = Writer(WRITTEN[template], template)
    choice = writer.choice()
    message = choice["message"]
    assert (message["role"], message["content"], choice["finish_reason"]) == ("assistant", None, "tool_calls")
    (call,) = message["tool_calls"]
    assert re.fullmatch(CALL_ID, call["id"])
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    events = writer.chat(stream=True).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert assembled(events) == (None, calls_of(message), "tool_calls")


def test_arguments_of_a_call_are_streamed_while_they_are_written():
    pieces = [
        call["function"]["arguments"]
        for event in Writer(CALL).chat(stream=True).events
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert len(pieces) > 5


def test_text_before_and_between_calls_is_content():
    text = f"Let me look.\n{CALL}\n{OTHER_CALL}\n"
    writer = Writer(text)
    message = writer.choice()["message"]
    assert message["content"] == "Let me look."
    assert [name for name, _ in calls_of(message)] == ["get_weather", "get_time"]
    first, second = message["tool_calls"]
    assert first["id"] != second["id"]
    events = writer.chat(stream=True).events
    assert assembled(events) == ("Let me look.", calls_of(message), "tool_calls")
    assert all("content" not in c["delta"] or "tool_calls" not in c["delta"] for e in events for c in e["choices"])


@pytest.mark.parametrize("text", ["It rains.", "<tool_call> is a tag", '<tool_call>{"nam', ""])
def test_text_that_is_no_call_is_content(text):
    writer = Writer(text)
    choice = writer.choice()
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert assembled(writer.chat(stream=True).events) == (text or None, [], "stop")


def test_only_the_first_call_is_kept_with_parallel_tool_calls_off():
    writer = Writer(f"{CALL}\n{OTHER_CALL}")
    message = writer.choice(parallel_tool_calls=False)["message"]
    assert [name for name, _ in calls_of(message)] == ["get_weather"]
    events = writer.chat(parallel_tool_calls=False, stream=True).events
    assert assembled(events) == (None, calls_of(message), "tool_calls")


def test_each_of_n_choices_has_its_own_tool_calls():
    writer = Writer(CALL)
    answer = writer.chat(n=2).json
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
    assert len(set(ids)) == 2
    events = writer.chat(n=2, stream=True).events
    for index in (0, 1):
        assert assembled(events, index) == (None, calls_of(answer["choices"][0]["message"]), "tool_calls")


def test_a_tool_call_that_is_cut_off_has_the_finish_reason_length():
    whole = '{"city": "Köln"}'
    writer = Writer(CALL)
    num_tokens = len(writer.engine.get_tokenizer().encode(CALL.partition("Köln")[0]))
    choice = writer.choice(max_tokens=num_tokens)
    ((_, arguments),) = calls_of(choice["message"])
    assert whole.startswith(arguments)
    assert arguments != whole
    assert choice["finish_reason"] == "length"
    events = writer.chat(max_tokens=num_tokens, stream=True).events
    assert assembled(events) == (None, [("get_weather", arguments)], "length")


def written_until(writer, text, **body):
    """(content, calls, finish reason) of an answer that `max_tokens` ends behind this text: whole and streamed."""
    body["max_tokens"] = len(writer.engine.get_tokenizer().encode(text))
    choice = writer.choice(**body)
    whole = (choice["message"]["content"] or None, calls_of(choice["message"]), choice["finish_reason"])
    assert assembled(writer.chat(stream=True, **body).events) == whole
    return whole


HEAD = {
    tool_templates.HERMES: '<tool_call>\n{"name": "get_ti',
    tool_templates.LLAMA3: '{"name": "get_ti',
    tool_templates.QWEN3_CODER: "<tool_call>\n<function=get_ti",
    tool_templates.MISTRAL_LIST: '[TOOL_CALLS] [{"name": "get_ti',
    tool_templates.MISTRAL: "[TOOL_CALLS]get_ti",
    tool_templates.GLM45: "<tool_call>get_ti",
    tool_templates.GLM47: "<tool_call>get_ti",
    tool_templates.MINIMAX_M2: '<minimax:tool_call>\n<invoke name="get_ti',
    tool_templates.PYTHONIC: "[get_ti",
}
"""A call that is cut off in its name."""


@pytest.mark.parametrize("template", WRITTEN)
def test_a_second_call_that_is_cut_off_before_its_name_is_left_out(template):
    separator = {tool_templates.LLAMA3: "; "}.get(template, "\n")
    text = WRITTEN[template] + separator + HEAD[template]
    writer = Writer(text + "me", template)
    for num_missing in range(len(HEAD[template]) + len(separator) + 1):
        cut = text[: len(text) - num_missing]
        expected = (None, [("get_weather", '{"city": "Köln"}')], "length")
        assert written_until(writer, cut) == expected, cut


@pytest.mark.parametrize("template", WRITTEN)
def test_a_first_call_that_is_cut_off_before_its_name_is_left_out(template):
    before = "" if template in (tool_templates.LLAMA3, tool_templates.PYTHONIC) else "Let me look."
    text = before + HEAD[template]
    writer = Writer(text + "me", template)
    for length in range(len(before), len(text) + 1):
        expected = (before or None, [], "length")
        assert written_until(writer, text[:length]) == expected if length else True


def test_a_stop_string_may_cut_off_a_call():
    for choice, text in (("auto", f"Sure.{CALL}"), ("required", CALL.removeprefix('<tool_call>\n{"name": "'))):
        writer = Writer(text)
        message = writer.choice(stop=["weather"], tool_choice=choice)["message"]
        assert (message["content"], calls_of(message)) == ("Sure." if choice == "auto" else None, [])
        events = writer.chat(stop=["weather"], tool_choice=choice, stream=True).events
        assert assembled(events) == (message["content"], [], "stop")


def test_text_that_is_cut_off_and_is_no_call_is_content():
    for template, text in (
        (tool_templates.HERMES, "It rains. <b>"),
        (tool_templates.HERMES, "Write <tool_call> like this. "),
        (tool_templates.LLAMA3, '{"name": "Bob", "age": 3'),
        (tool_templates.LLAMA3, '{"id": 5, "values": [1'),
    ):
        assert written_until(Writer(text + "…", template), text) == (text, [], "length")


def test_log_probabilities_and_token_ids_include_the_tokens_of_calls():
    writer = Writer(f"Let me look.\n{CALL}")
    asked = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    choice = writer.choice(**asked)
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    choices = [each for event in writer.chat(stream=True, **asked).events for each in event["choices"]]
    told = [token for each in choices if each["logprobs"] for token in each["logprobs"]["content"]]
    assert told == choice["logprobs"]["content"]
    assert [token for each in choices for token in each.get("token_ids", [])] == choice["token_ids"]


def test_a_tool_call_is_plain_text_in_a_request_without_tools():
    for body in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        choice = Writer(CALL).choice(**body)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "get_weather" not in Writer(CALL).prompt(**body)


# tool_choice


@pytest.mark.parametrize("template", WRITTEN)
def test_the_call_of_a_named_function_begins_in_the_prompt(template):
    ends = WRITTEN[template].partition(LAST_OF_PREFILL[template])[2]
    writer = Writer(ends, template)
    choice = writer.choice(tool_choice=named("get_weather"))
    assert calls_of(choice["message"]) == [("get_weather", '{"city": "Köln"}')]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    prompt = writer.prompt(tool_choice=named("get_weather"))
    assert prompt == writer.prompt() + WRITTEN[template].removesuffix(ends)
    events = writer.chat(tool_choice=named("get_weather"), stream=True).events
    assert assembled(events) == (None, calls_of(choice["message"]), "tool_calls")


@pytest.mark.parametrize(
    ("text", "arguments"), [("what?", "what?"), ("", ""), (' {"city": ', '{"city": '), (" [1]}\n</tool_call>", "[1]")]
)
def test_a_named_function_is_called_whatever_the_model_writes(text, arguments):
    writer = Writer(text)
    message = writer.choice(tool_choice=named("get_time"))["message"]
    assert calls_of(message) == [("get_time", arguments)]
    assert assembled(writer.chat(tool_choice=named("get_time"), stream=True).events)[1] == calls_of(message)


def test_a_named_function_is_called_once():
    writer = Writer(f' {{"city": "Köln"}}}}\n</tool_call>\n{OTHER_CALL}')
    assert calls_of(writer.choice(tool_choice=named("get_weather"))["message"]) == [("get_weather", '{"city": "Köln"}')]


def test_a_required_call_begins_in_the_prompt():
    writer = Writer('get_time", "arguments": {}}\n</tool_call>\n' + CALL)
    choice = writer.choice(tool_choice="required")
    assert calls_of(choice["message"]) == [("get_time", "{}"), ("get_weather", '{"city": "Köln"}')]
    assert choice["finish_reason"] == "tool_calls"
    assert writer.prompt(tool_choice="required") == writer.prompt() + '<tool_call>\n{"name": "'
    events = writer.chat(tool_choice="required", stream=True).events
    assert assembled(events) == (None, calls_of(choice["message"]), "tool_calls")


def test_a_required_call_of_the_only_function_has_its_name_in_the_prompt():
    writer = Writer("what?")
    choice = writer.choice(tool_choice="required", tools=TOOLS[:1])
    assert calls_of(choice["message"]) == [("get_weather", "what?")]


@pytest.mark.parametrize("text", ["what?", "", 'get_rain", "arguments": {}}', 'get_time", "x": }', 'get_time", "argu'])
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_output_without_the_required_call_is_an_error(text, is_stream, caplog):
    answer = Writer(text).chat(tool_choice="required", stream=is_stream)
    is_begun = is_stream and text != ""  # an error before the first event has its own status
    error = answer.events[-1]["error"] if is_begun else answer.json["error"]
    assert (error["code"], error["param"], error["type"]) == ("tool_not_called", "tool_choice", "server_error")
    assert is_begun or answer.status == 500
    assert not any(record.exc_info for record in caplog.records), "the server has nothing to mend"
    if is_begun:
        told = [choice["delta"] for event in answer.events[:-1] for choice in event["choices"]]
        assert told == [{"role": "assistant", "content": None}]


@pytest.mark.parametrize("template", WRITTEN)
def test_a_required_call_may_be_cut_off_before_its_name(template):
    name = "get_time" + REST_OF_CALL[template]
    for length in range(1, len("get_time") + 1):
        writer = Writer(name, template)
        assert written_until(writer, name[:length], tool_choice="required") == (None, [], "length")
        assert writer.choice(max_tokens=length, tool_choice="required")["message"]["content"] is None


def test_a_required_call_ends_the_reasoning_that_the_template_begins():
    writer = Writer(" {}}", tool_templates.THINKING)
    prompt = writer.prompt(tool_choice=named("get_time"))
    assert prompt.endswith('<think>\n\n</think>\n\n<tool_call>\n{"name": "get_time", "arguments":')


# what the model is held to


FORECAST = {
    "type": "function",
    "function": {
        "name": 'get "forecast"',
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
            "required": ["days", "unit"],
            "additionalProperties": False,
        },
    },
}
SHORT = {
    "type": "function",
    "function": {"name": "wait", "parameters": {"properties": {}, "additionalProperties": False}},
}


def strict(tool):
    return {**tool, "function": {**tool["function"], "strict": True}}


def constraint(writer, **body):
    writer.choice(**body)
    return writer.engine.params[-1].structured_outputs


def written_at_random(asked, rng, tokenizer_dir=demo_model_path()):  # noqa: B008
    """What a model without any sense writes, character by character where it can."""
    writer_tokens = Tokenizer.from_dir(tokenizer_dir)
    matcher, ids = GrammarCompiler(str(tokenizer_dir), writer_tokens.vocab_size, [END_OF_TEXT]).matcher(asked), []
    while END_OF_TEXT not in ids:
        allowed = np.flatnonzero(matcher.allowed_after(np.array(ids, np.int32))).tolist()
        ids.append(END_OF_TEXT if END_OF_TEXT in allowed and len(ids) > 400 else rng.choice(allowed))
    return writer_tokens.decode(ids[:-1], skip_special_tokens=False)


@pytest.mark.parametrize("template", WRITTEN)
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"tool_choice": "required"}, {'get "forecast"', "wait"}),
        ({"tool_choice": named('get "forecast"')}, {'get "forecast"'}),
        ({"tool_choice": "required", "tools": [SHORT]}, {"wait"}),
    ],
)
def test_the_constraint_of_a_required_call_allows_only_calls(template, choice, expected):
    body = {"tools": [FORECAST, SHORT], **choice}
    asked = constraint(Writer("wait" + REST_OF_CALL[template], template), **body)
    rng = random.Random(template)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (FORECAST, SHORT)}
    writer, called = Writer(template=template), set()
    for _ in range(10):
        writer.engine.text = written_at_random(asked, rng)
        message = writer.choice(**body)["message"]
        assert message["content"] is None
        assert message["tool_calls"]
        for name, arguments in calls_of(message):
            jsonschema.validate(json.loads(arguments), {"type": "object", **schemas[name]})
            called.add(name)
    assert called == expected


def test_strict_functions_are_called_by_their_schemas_or_not_at_all():
    body = {"tools": [strict(FORECAST), SHORT]}
    asked = constraint(Writer(), **body)
    rng = random.Random(1)
    call = '<tool_call>\n{"name": "get \\"forecast\\"", "arguments": {"days": 3, "unit": "C"}}\n</tool_call>'
    assert fits(asked, "It rains. <b>Really</b>, <tool")
    assert fits(asked, f"Let me look.\n{call}")
    assert fits(asked, f"{call}\n{call} Done.")
    for wrong in (call.replace("3", "30"), call.replace('"C"', '"K"'), call.replace("get", "set"), "<tool_call>what?"):
        assert not fits(asked, f"Let me look.\n{wrong}")
    for _ in range(5):
        message = Writer(written_at_random(asked, rng)).choice(**body)["message"]
        for name, arguments in calls_of(message):
            assert name in ('get "forecast"', "wait")
            json.loads(arguments)


@pytest.mark.parametrize(
    ("template", "body"),
    [
        (tool_templates.HERMES, {}),
        (tool_templates.HERMES, {"tools": [strict(FORECAST)], "tool_choice": "none"}),
        (tool_templates.LLAMA3, {"tools": [strict(FORECAST)]}),
        (tool_templates.PYTHONIC, {"tools": [strict(FORECAST)]}),
        (tool_templates.QWEN3_CODER, {"tools": [strict(tool("a<b"))]}),
        (tool_templates.QWEN3_CODER, {"tools": [strict(tool(" a "))]}),
        (tool_templates.GLM45, {"tools": [strict(tool("a<b"))]}),
        (tool_templates.MINIMAX_M2, {"tools": [strict(tool("a<b"))]}),
        (tool_templates.MISTRAL, {"tools": [strict(tool("a[b"))]}),
        (tool_templates.MISTRAL, {"tools": [strict(tool(" a "))]}),
    ],
)
def test_optional_calls_have_no_constraint_unless_the_form_can_enforce_a_strict_function(template, body):
    assert constraint(Writer("text", template), **body) is None


def tagged(name, *parameters):
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def test_calls_in_tags_have_the_parameters_of_the_schema():
    book = {
        "type": "object",
        "$defs": {"seat": {"type": "object", "properties": {"row": {"type": "integer"}}, "required": ["row"]}},
        "properties": {
            "day": {"enum": ["today", "to morrow"]},
            "seats": {"type": "array", "items": {"$ref": "#/$defs/seat"}, "minItems": 1},
            "name": {"type": ["string", "null"], "maxLength": 3},
            "window": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "like": {"type": "array", "items": {"$ref": "#/properties/seats"}},
        },
        "required": ["seats", "note"],
    }
    tools = [
        {"type": "function", "function": {"name": "book", "parameters": book, "strict": True}},
        {"type": "function", "function": {"name": "any"}},
    ]
    asked = constraint(Writer("text", tool_templates.QWEN3_CODER), tools=tools)
    seats, note = ("seats", '[{"row": 1}]'), ("note", "")
    for parameters in (
        [seats, note],
        [("day", "to morrow"), seats, ("name", 'x < "y"\n\n</parameter'), ("window", "null"), note],
        [seats, ("like", '["anything"]'), note],
    ):
        text = f"Let me see.\n{tagged('book', *parameters)}"
        assert fits(asked, text)
        choice = Writer(text, tool_templates.QWEN3_CODER).choice(tools=tools)
        assert list(json.loads(calls_of(choice["message"])[0][1])) == [key for key, _ in parameters]
    for parameters in (
        [seats],
        [note],
        [seats, seats, note],
        [("day", "yesterday"), seats, note],
        [("seats", "[]"), note],
        [("seats", '[{"row": "1"}]'), note],
        [seats, ("window", "True"), note],
        [seats, ("other", "1"), note],
    ):
        assert not fits(asked, tagged("book", *parameters))
    assert fits(asked, tagged("any", ("one", "1"), ("two", "")) + "\n" + tagged("any"))
    assert not fits(asked, tagged("other"))


def test_keywords_that_no_grammar_has_are_passed_over_unless_the_function_is_strict():
    odd = {
        "type": "function",
        "function": {"name": "odd", "parameters": {"type": "object", "not": {"required": ["x"]}}},
    }
    compiler = GrammarCompiler(demo_model_path(), VOCAB_SIZE, [END_OF_TEXT])
    body = {"tool_choice": named("odd")}
    compiler.matcher(constraint(Writer(" {}}"), tools=[odd], **body))
    with pytest.raises(InvalidRequest, match="not can't be enforced"):
        compiler.matcher(constraint(Writer(" {}}"), tools=[strict(odd)], **body))


def test_tools_whose_schemas_cannot_be_enforced_are_refused_naming_tools():
    def fail(index):
        raise InvalidRequest("structured_outputs.grammar='start…': no way")

    writer = Writer(" {}}")
    writer.engine.at_token = fail
    error = writer.chat(tool_choice=named("get_time")).error
    assert error == (400, "invalid_request_error", "tools")
    large = tool("large")
    large["function"]["parameters"]["description"] = "x" * 300_000
    assert Writer().chat(tools=[large], tool_choice="required").error == (400, "invalid_request_error", "tools")


WEATHER = {
    "type": "object",
    "properties": {"rain": {"type": "boolean"}, "unit": {"enum": ["</tool>", "C"]}},
    "required": ["rain", "unit"],
    "additionalProperties": False,
}
WEATHER_FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}


@pytest.mark.parametrize("template", WRITTEN)
def test_a_message_has_tool_calls_or_content_in_the_response_format(template):
    body = {"tools": [FORECAST, SHORT], "response_format": WEATHER_FORMAT}
    asked = constraint(Writer("{}", template), **body)
    rng = random.Random(template)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (FORECAST, SHORT)}
    writer, seen = Writer(template=template), set()
    for _ in range(20):
        writer.engine.text = written_at_random(asked, rng)
        choice = writer.choice(**body)
        message = choice["message"]
        seen.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(message["content"]), WEATHER)
            assert "tool_calls" not in message
        else:
            assert message["content"] is None
            for name, arguments in calls_of(message):
                jsonschema.validate(json.loads(arguments), {"type": "object", **schemas[name]})
        events = writer.chat(stream=True, **body).events
        assert assembled(events) == (message["content"], calls_of(message), choice["finish_reason"])
    assert seen == {"stop", "tool_calls"}


@pytest.mark.parametrize(
    ("asks", "content", "other"),
    [
        ({"response_format": {"type": "json_object"}}, '{"any": [1]}', "text"),
        ({"structured_outputs": {"json": WEATHER, "disable_any_whitespace": True}}, '{"rain":true,"unit":"C"}', "{ }"),
        ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, "2", "3"),
        ({"structured_outputs": {"json": "true"}}, "[false]", "text"),
        ({"structured_outputs": {"regex": 'a/b\\/c\n("|\\[/])?'}}, 'a/b/c\n"', "a/b"),
        ({"structured_outputs": {"regex": ""}}, "", " "),
        ({"structured_outputs": {"choice": ["so/so", 'a "quote"', "(x|y)\n"]}}, "(x|y)\n", "x"),
    ],
)
def test_structured_outputs_may_constrain_the_content_beside_tools(asks, content, other):
    asked = constraint(Writer(CALL), **asks)
    assert fits(asked, content)
    assert fits(asked, f"{CALL}\n{CALL}")
    for wrong in (other, f"{CALL}{content or 'x'}", "<tool_call>"):
        assert not fits(asked, wrong)
    one = constraint(Writer(CALL), parallel_tool_calls=False, **asks)
    assert fits(one, CALL)
    assert not fits(one, f"{CALL}\n{CALL}")


def test_schemas_of_functions_that_are_not_strict_are_enforced_as_far_as_grammars_can():
    odd = tool("odd")
    odd["function"]["parameters"] = {"type": "object", "not": {"required": ["x"]}}
    compiler = GrammarCompiler(demo_model_path(), VOCAB_SIZE, [END_OF_TEXT])
    compiler.matcher(constraint(Writer("{}"), tools=[odd], response_format=WEATHER_FORMAT))
    with pytest.raises(InvalidRequest, match="not can't be enforced"):
        compiler.matcher(constraint(Writer("{}"), tools=[strict(odd)], response_format=WEATHER_FORMAT))


@pytest.mark.parametrize("choice", ["required", named("get_time")])
@pytest.mark.parametrize("template", WRITTEN)
def test_a_required_call_wins_over_the_response_format(template, choice):
    asked = [
        constraint(Writer("get_time" + REST_OF_CALL[template], template), tool_choice=choice, **more)
        for more in ({}, {"response_format": WEATHER_FORMAT}, {"structured_outputs": {"grammar": 'start: "a"'}})
    ]
    assert asked[0] == asked[1] == asked[2]


@pytest.mark.parametrize(
    ("template", "asks", "param", "says"),
    [
        (
            tool_templates.QWEN3_CODER,
            {"response_format": WEATHER_FORMAT, "tools": [tool("a<b")]},
            "response_format",
            "can't be written in the tags",
        ),
        (
            tool_templates.HERMES,
            {"structured_outputs": {"grammar": 'start: "a"'}},
            "structured_outputs",
            "structured_outputs.grammar can't be combined with tools",
        ),
        (tool_templates.HERMES, {"structured_outputs": {"json": "[1"}}, "structured_outputs", "Expecting"),
    ],
)
def test_a_content_constraint_that_no_grammar_combines_with_calls_is_refused(template, asks, param, says):
    answer = Writer(CALL, template).chat(**asks)
    assert answer.error == (400, "invalid_request_error", param)
    assert says in answer.json["error"]["message"]
    assert Writer(CALL, template).chat(tool_choice="none", **asks).status == 200


def test_a_json_response_format_closes_the_reasoning_in_the_prompt():
    prompt = Writer("{}", tool_templates.THINKING).prompt(response_format={"type": "json_object"}, tools=None)
    assert prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": named("get_rain")}, "tool_choice"),
        ({"tool_choice": named("get_time"), "tools": None}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "add_generation_prompt": False}, "tool_choice"),
        ({"tool_choice": named("get_time"), "continue_final_message": True}, "tool_choice"),
    ],
)
def test_an_invalid_tool_choice_is_refused(body, param):
    assert Writer().chat(**body).error == (400, "invalid_request_error", param)


# the chat template


def test_calls_are_read_although_the_template_does_not_show_tools():
    for template in (None, "{% for m in messages %}{{ m.content }}{% endfor %}"):
        assert calls_of(Writer(CALL, template).choice()["message"]) == [("get_weather", '{"city": "Köln"}')]
        assert Writer("It rains.", template).choice()["message"]["content"] == "It rains."
        assert Writer(CALL, template).choice(tool_choice="none")["message"]["content"] == CALL


def test_a_required_call_follows_the_schema_although_the_template_does_not_show_tools():
    writer = Writer(CALL.removeprefix('<tool_call>\n{"name": "'), "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert calls_of(writer.choice(tool_choice="required")["message"]) == [("get_weather", '{"city": "Köln"}')]
    assert writer.engine.params[-1].structured_outputs is not None


def test_an_unknown_form_of_calls_is_refused_unless_tool_call_parser_is_given():
    assert Writer(CALL, tool_templates.OTHER_FORM).chat().error == (400, "invalid_request_error", "tools")
    choice = Writer(CALL, tool_templates.OTHER_FORM, tool_call_parser="hermes").choice()
    assert calls_of(choice["message"]) == [("get_weather", '{"city": "Köln"}')]
    with pytest.raises(InvalidConfig, match="'granite'"):
        ServerOptions(("fake",), tool_call_parser="granite")


@pytest.fixture(scope="module")
def with_special_tags(tmp_path_factory):
    """The demo model's tokenizer, for which the tags of calls are special tokens."""
    tags = ["<tool_call>", "</tool_call>", "<|python_tag|>"]
    return demo_with_special_tokens(tmp_path_factory.mktemp("special"), tags)


def test_tags_that_are_special_tokens_reach_the_parser(with_special_tags):
    writer = Writer(CALL)
    writer.engine.tokenizer = Tokenizer.from_dir(with_special_tags)
    assert calls_of(writer.choice()["message"]) == [("get_weather", '{"city": "Köln"}')]
    assert writer.engine.params[-1].skip_special_tokens is False
    plain = Writer(CALL)
    plain.choice()
    assert plain.engine.params[-1].skip_special_tokens is True


def test_grammars_have_tags_that_are_special_tokens(with_special_tags):
    def asked(template=tool_templates.HERMES, **body):
        writer = Writer('get_time", "arguments": {}}', template)
        writer.engine.tokenizer = Tokenizer.from_dir(with_special_tags)
        writer.engine.check = lambda *_: None  # its model doesn't know the tags
        return constraint(writer, **body)

    def may_write(asked, text):
        return fits(asked, text, with_special_tags)

    spelled = Tokenizer.from_dir(with_special_tags).encode(CALL, add_special_tokens=False)
    assert set(spelled) & Tokenizer.from_dir(with_special_tags).special_ids

    free = asked(tools=[strict(tool("get_weather"))])
    assert may_write(free, f"Let me look.\n{CALL}\n{CALL} Done.")
    assert may_write(free, "It is < 5 degrees.")
    for wrong in ("<tool_call>", CALL.replace("Köln", 'Köln", "b'), CALL.replace("weather", "rain")):
        assert not may_write(free, f"Let me look.\n{wrong}")

    either = asked(response_format=WEATHER_FORMAT)
    assert may_write(either, f"{CALL}\n{CALL}")
    assert may_write(either, '{"rain": true, "unit": "C"}')
    assert not may_write(either, "<tool_call>")
    assert not may_write(either, f"Sure.{CALL}")
    rng = random.Random(2)
    for _ in range(5):
        assert may_write(either, written_at_random(either, rng, with_special_tags))

    must = asked(tool_choice="required")
    assert may_write(must, CALL.removeprefix('<tool_call>\n{"name": "') + CALL)

    llama = asked(tool_templates.LLAMA3, response_format=WEATHER_FORMAT)
    call = WRITTEN[tool_templates.LLAMA3]
    for calls in (call, f"<|python_tag|>{call}", f"<|python_tag|>{call}; {call}"):
        assert may_write(llama, calls)
    assert not may_write(llama, "<|python_tag|>2 + 2")


def test_calls_and_their_results_reach_the_template():
    template = (
        "{{ tools }}{{ '\n' }}{% for m in messages %}{{ m.role }} {{ m.keys() | sort | join(',') }}:{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}("
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}){% endfor %}"
        "{% if m.name %}<{{ m.name }}>{% endif %}{{ '\n' }}{% endfor %}"
    )
    function = {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    messages = [
        {"role": "user", "content": "Rain?"},
        # as the client library gives it back
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "no"},
        {"role": "assistant", "content": "No.", "tool_calls": None},
        {"role": "user", "content": "Sure?"},
    ]
    prompt = Writer(CALL, template, tool_call_parser="hermes").prompt(messages=messages)
    assert prompt.splitlines()[1:] == [
        "user content,role:Rain?",
        "assistant content,role,tool_calls:get_weather(city=Köln)",
        "tool content,name,role,tool_call_id:no<get_weather>",
        "assistant content,role:No.",
        "user content,role:Sure?",
    ]


@pytest.mark.parametrize("arguments", ["", "{}", "[1]", '{"a": '])
def test_a_conversation_may_contain_call_arguments_that_are_no_object(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    expected = json.dumps(arguments) if arguments.startswith(("[", '{"')) else "{}"
    assert f'"arguments": {expected}}}' in Writer(CALL).prompt(messages=messages)


@pytest.mark.parametrize("call", [{}, {"function": None}, {"function": {"arguments": "{}"}}])
def test_a_call_without_a_function_is_refused(call):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    answer = Writer().chat(messages=messages)
    assert answer.error == (400, "invalid_request_error", "messages")
    assert "messages[1].tool_calls[0]" in answer.json["error"]["message"]


@pytest.mark.parametrize("call_id", [None, 1, ["a"], {}])
def test_tool_calls_in_the_history_may_have_any_ids(call_id):
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": call_id, "content": "no"}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, result]
    assert "<|im_start|>tool\nno<|im_end|>" in Writer(CALL).prompt(messages=messages)


# OpenAI's own client


def with_client(writer, use):
    async def run():
        http = httpx.AsyncClient(transport=httpx.ASGITransport(writer.app))
        async with AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0) as client:
            return await use(client.chat.completions)

    return asyncio.run(run())


ASKED = {"model": "fake", "messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS, "max_tokens": 1000}


def test_openais_client_reads_calls_and_sends_them_back():
    writer = Writer(CALL)

    async def use(completions):
        message = (await completions.create(**ASKED)).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "no"}
        conversation = [*ASKED["messages"], message, result]
        return message, await completions.create(**ASKED | {"messages": conversation})

    message, second = with_client(writer, use)
    assert message.content is None
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}
    assert second.choices[0].finish_reason == "tool_calls"


def test_openais_client_reads_streamed_calls():
    async def use(completions):
        async with completions.stream(**ASKED) as stream:
            events = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
            return [(each.index, each.name, each.arguments) for each in events], await stream.get_final_completion()

    done, final = with_client(Writer(f"Let me look.\n{CALL}\n{OTHER_CALL}"), use)
    assert done == [(0, "get_weather", '{"city": "Köln"}'), (1, "get_time", '{"city": "Köln"}')]
    (choice,) = final.choices
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather", "get_time"]
