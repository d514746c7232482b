"""Schemas and formats of tool calls, as OpenAI's client meets them. The engine writes given texts."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest
import tool_templates
from allowed_texts import fits
from call_formats import TEMPLATES, written
from fake_engine import FakeEngine
from openai import AsyncOpenAI, BadRequestError
from tokenizers_for_tests import demo_with_special_tokens

from raycore.server import ServerOptions, build_app
from raycore.text.tokenizer import Tokenizer

MISTRAL = {
    tool_templates.MISTRAL_LIST: '[TOOL_CALLS] [{"name": "book", "arguments": {"seats": 2}, "id": "VvvODy9mT"}]',
    tool_templates.MISTRAL: '[TOOL_CALLS]book[ARGS]{"seats": 2}',
}
BEGUN = {tool_templates.MISTRAL_LIST: '[TOOL_CALLS] [{"name": "', tool_templates.MISTRAL: "[TOOL_CALLS]"}
"""How the prompt ends if a call is required."""
BOOK = {
    "type": "object",
    "$defs": {"Class": {"enum": ["first", "second"]}, "Seat": {"type": "object", "properties": {"row": {}}}},
    "properties": {
        "seats": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "class": {"$ref": "#/$defs/Class"},
        "seat": {"$ref": "#/definitions/Place"},
        "train": {"type": "string"},
    },
}


PLACE = {"definitions": {"Place": {"$ref": "#/$defs/Seat"}}}
"""Definitions beside the parameters."""
STOP = {"name": "stop", "parameters": {"properties": {}}}


def tool(parameters=BOOK, **fields):
    return {"name": "book", "parameters": parameters, **(PLACE if parameters is BOOK else {}), **fields}


class Model:
    """A server whose model writes `text`, whatever it is asked, and OpenAI's client."""

    def __init__(self, text, template, tokenizer_dir=None):
        self.engine = FakeEngine(text, max_model_len=4000)
        if tokenizer_dir is not None:
            self.engine.tokenizer = Tokenizer.from_dir(tokenizer_dir)
            self.engine.check = lambda *_: None  # its model doesn't know the added tokens
        self._app = build_app(self.engine, ServerOptions(("fake",), chat_template=template))

    def _with_client(self, use):
        async def run():
            http = httpx.AsyncClient(transport=httpx.ASGITransport(self._app))
            async with AsyncOpenAI(
                api_key="none", base_url="http://test/v1", http_client=http, max_retries=0
            ) as client:
                return await use(client.chat.completions)

        return asyncio.run(run())

    def answer(self, *tools, messages=(), **body):
        """The choice of an answer. The same answer, streamed, has the same message."""
        functions = [{"type": "function", "function": each} for each in tools or [tool()]]
        conversation = [{"role": "user", "content": "A seat, please."}, *messages]
        asked = {"model": "fake", "messages": conversation, "tools": functions, "max_tokens": 1000, **body}

        async def use(completions):
            choice = (await completions.create(**asked)).choices[0]
            async with completions.stream(**asked) as stream:
                streamed = (await stream.get_final_completion()).choices[0]
            return choice, streamed

        choice, streamed = self._with_client(use)
        assert (streamed.message.content or None, streamed.finish_reason) == (
            choice.message.content,
            choice.finish_reason,
        )
        assert calls_of(streamed.message) == calls_of(choice.message)
        return choice

    def constraint(self, *tools, **body):
        self.answer(*tools, **body)
        return self.engine.params[-1].structured_outputs

    def prompt(self, **body):
        return self.engine.get_tokenizer().decode(
            self.answer(**body, extra_body={"return_token_ids": True}).prompt_token_ids, skip_special_tokens=False
        )


def calls_of(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def coder(*parameters, name="book"):
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<function={name}>\n{values}</function>"


def test_argument_values_have_the_types_of_referenced_schemas():
    parameters = (("seats", "2"), ("class", "first"), ("seat", '{"row": 7}'), ("train", "123"))
    choice = Model(f"<tool_call>\n{coder(*parameters)}\n</tool_call>", tool_templates.QWEN3_CODER).answer()
    assert calls_of(choice.message) == [("book", {"seats": 2, "class": "first", "seat": {"row": 7}, "train": "123"})]
    choice = Model(coder(("seats", "null"), ("train", "null")), tool_templates.QWEN3_CODER).answer()
    assert calls_of(choice.message) == [("book", {"seats": None, "train": "null"})]


LOOP = {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/No"}}}, "a/$ref: $ref '#/$defs/No' points to nothing in this schema"),
        (
            {"properties": {"a": {"items": {"$ref": "https://a.test/b"}}}},
            "items/$ref: $ref 'https://a.test/b' points",
        ),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": LOOP}, "$ref '#/$defs/A' leads to nothing but"),
        ({"anyOf": [{"$ref": "#/$defs/A"}], "$defs": LOOP}, "$ref '#/$defs/A' leads to nothing but"),
    ],
)
@pytest.mark.parametrize("template", [tool_templates.HERMES, tool_templates.QWEN3_CODER, tool_templates.MISTRAL])
def test_unresolvable_references_in_tool_schemas_are_refused(template, parameters, says):
    with pytest.raises(BadRequestError, match="parameters of function 'book': #/") as raised:
        Model("text", template).answer(tool(parameters))
    assert raised.value.param == "tools"
    assert says in raised.value.message


def test_properties_and_values_named_ref_are_not_resolved_as_references():
    parameters = {"properties": {"$ref": {"enum": [{"$ref": "#/missing"}]}, "a": {"default": {"$ref": "#/missing"}}}}
    choice = Model(coder(("$ref", '{"$ref": "#/missing"}')), tool_templates.QWEN3_CODER).answer(tool(parameters))
    assert calls_of(choice.message) == [("book", {"$ref": {"$ref": "#/missing"}})]


def test_grammars_allow_the_values_that_the_parser_reads():
    asked = Model("text", tool_templates.QWEN3_CODER).constraint(tool(strict=True), STOP)
    right = [("seats", "2"), ("class", "second"), ("seat", '{"row": 1}'), ("train", "any <text>")]
    for call in (coder(*right), coder(("seats", "null")), coder(), coder(name="stop")):
        assert fits(asked, f"Let me see.\n<tool_call>\n{call}\n</tool_call>")
        assert fits(asked, f"Let me see.\n{call}\n"), "the parser reads it without a block, too"
    for wrong in (coder(("seats", "two")), coder(("class", "third")), coder(("seat", "1")), coder(name="other")):
        assert not fits(asked, f"Let me see.\n<tool_call>\n{wrong}\n</tool_call>")
        assert not fits(asked, f"Let me see.\n{wrong}\n")


@pytest.mark.parametrize("template", MISTRAL)
def test_mistrals_calls_are_read_and_sent_back(template):
    model = Model(f"Let me see.{MISTRAL[template]}", template)
    choice = model.answer()
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert calls_of(choice.message) == [("book", {"seats": 2})]
    (call,) = choice.message.tool_calls
    assert re.fullmatch("[0-9a-zA-Z]{9}", call.id), "Mistral's templates refuse other ids"
    result = {"role": "tool", "tool_call_id": call.id, "content": "booked"}
    assert model.answer(messages=[choice.message.to_dict(), result]).finish_reason == "tool_calls"


@pytest.mark.parametrize("template", MISTRAL)
def test_mistrals_calls_are_read_in_both_forms(template):
    for text in MISTRAL.values():
        assert calls_of(Model(text, template).answer().message) == [("book", {"seats": 2})]


@pytest.mark.parametrize("template", MISTRAL)
def test_mistrals_calls_are_begun_in_the_form_of_the_template(template):
    call, begun = MISTRAL[template], BEGUN[template]
    model = Model(call.removeprefix(begun), template)
    asked = model.constraint(tool(), STOP, tool_choice="required")
    assert calls_of(model.answer(tool(), STOP, tool_choice="required").message) == [("book", {"seats": 2})]
    assert fits(asked, call.removeprefix(begun))
    for wrong in ("two", "2.5", '"2"'):
        assert not fits(asked, call.removeprefix(begun).replace("2", wrong))
    assert not fits(asked, "text")


def test_constrained_calls_in_mistrals_newer_form_may_have_ids():
    model = Model('[CALL_ID]VvvODy9mT[ARGS]{"seats": 2}', tool_templates.MISTRAL)
    named = {"type": "function", "function": {"name": "book"}}
    asked = model.constraint(tool(), tool_choice=named)
    assert fits(asked, model.engine.text)
    assert fits(asked, '{"seats": 2}')
    assert calls_of(model.answer(tool(), tool_choice=named).message) == [("book", {"seats": 2})]


@pytest.mark.parametrize("template", MISTRAL)
def test_strict_functions_are_called_by_their_schemas_in_mistrals_forms(template):
    call = MISTRAL[template]
    asked = Model("text", template).constraint(tool(strict=True))
    assert fits(asked, "It is [free].")
    assert fits(asked, f"Let me see.{call}")
    assert fits(asked, f"{call}{call}")
    for wrong in (call.replace("2", '"2"'), call.replace("book", "other"), "[TOOL_CALLS] what?"):
        assert not fits(asked, f"Let me see.{wrong}")


@pytest.fixture(scope="module")
def with_mistrals_tags(tmp_path_factory):
    """The demo model's tokenizer with Mistral's tags, which are special tokens."""
    tags = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
    return demo_with_special_tokens(tmp_path_factory.mktemp("mistral"), tags)


@pytest.mark.parametrize("template", MISTRAL)
def test_mistrals_tags_may_be_special_tokens(template, with_mistrals_tags):
    call = MISTRAL[template]
    model = Model(f"Let me see.{call}", template, with_mistrals_tags)
    choice = model.answer()
    assert (choice.message.content, calls_of(choice.message)) == ("Let me see.", [("book", {"seats": 2})])
    asked = model.constraint(tool(strict=True))
    assert fits(asked, f"Let me see.{call}{call}", with_mistrals_tags)
    assert not fits(asked, f"Let me see.{call.replace('2', 'two')}", with_mistrals_tags)
    required = Model(call.removeprefix(BEGUN[template]), template, with_mistrals_tags)
    asked = required.constraint(tool(), STOP, tool_choice="required")
    assert fits(asked, required.engine.text, with_mistrals_tags)
    assert not fits(asked, required.engine.text.replace("[ARGS]", "").replace('"name"', "name")[1:], with_mistrals_tags)


TAGGED = ["glm45", "glm47", "minimax_m2"]


@pytest.mark.parametrize("form", TAGGED)
def test_strict_functions_are_called_by_their_schemas_in_tags(form):
    arguments = {"seats": 2, "class": "first", "seat": {"row": 1}, "train": "any <text>"}
    call, stop = written(form, [("book", arguments)]), written(form, [("stop", {})])
    asked = Model("text", TEMPLATES[form]).constraint(tool(strict=True), STOP)
    assert fits(asked, "It is < 5 & free.")
    for right in (call, stop, f"{call}\n{stop} Done.", written(form, [("book", {}), ("stop", {})])):
        assert fits(asked, f"Let me see.{right}")
    for wrong in (
        call.replace(">2<", ">two<"),
        call.replace("first", "third"),
        call.replace("book", "other"),
        call.replace("train", "plane"),
    ):
        assert not fits(asked, f"Let me see.{wrong}")
    named = {"type": "function", "function": {"name": "book"}}
    begun = call[: call.index("book") + len("book")]
    rest = call.removeprefix(begun)
    for choice, text in (("required", "book" + rest), (named, rest.removeprefix('">').removeprefix("\n"))):
        required = Model(text, TEMPLATES[form])
        assert fits(required.constraint(tool(), STOP, tool_choice=choice), text)
        assert calls_of(required.answer(tool(), STOP, tool_choice=choice).message) == [("book", arguments)]


def test_glms_tags_may_be_special_tokens(tmp_path):
    tags = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    folder = demo_with_special_tokens(tmp_path, tags)
    for form in ("glm45", "glm47"):
        call = written(form, [("book", {"seats": 2, "train": "any <text>"})]).lstrip()
        model = Model(f"Let me see.{call}", TEMPLATES[form], folder)
        choice = model.answer()
        assert calls_of(choice.message) == [("book", {"seats": 2, "train": "any <text>"})]
        asked = model.constraint(tool(strict=True))
        assert fits(asked, f"Let me see.{call}{call}", folder)
        assert not fits(asked, f"Let me see.{call.replace('2', 'two')}", folder)
