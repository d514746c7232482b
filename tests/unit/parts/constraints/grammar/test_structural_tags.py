"""Which texts structural tags allow, in both forms, and what is refused."""

from __future__ import annotations

import json

import pytest

from raycore.demo import demo_model_path
from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.native import NativeCompiler
from raycore.structured_outputs import StructuredOutputsParams

COMPILER = NativeCompiler(demo_model_path(), 320, [0])
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": WEATHER, "end": "</function>"},
        {"begin": "<function=sum>", "schema": {"type": "array", "items": {"type": "integer"}}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def allows(tag, text: str) -> bool | None:
    """Whether `text` is a whole output. None: it is the beginning of one."""
    native = COMPILER.compile(StructuredOutputsParams(structural_tag=tag))
    for token_id in COMPILER.load().tokenize_str(text):
        if not native.consume_token(token_id):
            return False
    return True if native.is_accepting() else None


def of(format_):
    return {"type": "structural_tag", "format": format_}


def tag(begin, content, end, **fields):
    return {"type": "tag", "begin": begin, "content": content, "end": end, **fields}


TEXT = {"type": "any_text"}
DIGITS = {"type": "regex", "pattern": "[0-9]+"}
TAGS = [tag("<a>", DIGITS, "</a>"), tag("<b>", TEXT, ["</b>", "<end>"])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", True),
        ('It is <function=weather>{"city": "Ulm"}</function>, and <function=sum>[1, 2]</function> done', True),
        ("<function=sum>[]</function>", True),
        ("almost <functio", True),
        ("<function=sum>[1", None),
        ("<function=", None),
        ("<function=other>", False),
        ('<function=weather>{"town": "Ulm"}</function>', False),
        ("<function=sum>[1.5]", False),
        ("<function=sum>[1]</fun no", False),
    ],
)
@pytest.mark.parametrize("is_text", [False, True])
def test_the_form_with_structures_and_triggers(text, expected, is_text):
    assert allows(json.dumps(FUNCTIONS) if is_text else FUNCTIONS, text) is expected


TRIGGERED = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": TAGS}


@pytest.mark.parametrize(
    ("format_", "whole", "wrong"),
    [
        ({"type": "const_string", "value": 'say "hi"\n'}, ['say "hi"\n'], ["say", "say 'hi'", "x"]),
        ({"type": "json_schema", "json_schema": WEATHER}, ['{"city": "Ulm"}'], ["{}", "Ulm"]),
        (DIGITS, ["1", "123"], ["", "a"]),
        ({"type": "grammar", "grammar": 'root ::= "q" [0-9] | "r"'}, ["q1", "r"], ["q", "s"]),
        (TEXT, ["", "any\ntext"], []),
        ({**TEXT, "excludes": ["bad", "/*"]}, ["ba", "good"], ["a bad one", "x/*"]),
        ({**TEXT, "max_chars": 3}, ["", "abc"], ["abcd"]),
        ({"type": "or", "elements": [DIGITS, {"type": "const_string", "value": "none"}]}, ["7", "none"], ["x", ""]),
        ({"type": "sequence", "elements": [DIGITS, {"type": "const_string", "value": "-"}, DIGITS]}, ["1-2"], ["1-"]),
        ({"type": "optional", "content": DIGITS}, ["", "5"], ["x"]),
        ({"type": "star", "content": TAGS[0]}, ["", "<a>1</a><a>2</a>"], ["<a>1"]),
        ({"type": "plus", "content": TAGS[0]}, ["<a>1</a>", "<a>1</a><a>2</a>"], [""]),
        ({"type": "repeat", "min": 1, "max": 2, "content": TAGS[0]}, ["<a>1</a><a>2</a>"], ["", "<a>1</a>" * 3]),
        ({"type": "repeat", "min": 1, "max": -1, "content": TAGS[0]}, ["<a>1</a>" * 3], [""]),
        (TAGS[1], ["<b>x <a> y</b>", "<b><end>", "<b>1</c></b>"], ["<b>x", "x</b>", "<b></b>x"]),
        (
            {"type": "tags_with_separator", "tags": TAGS, "separator": ", "},
            ["", "<a>1</a>", "<a>1</a>, <b>x, y</b>, <a>2</a>"],
            ["<a>1</a>,", "<a>1</a><a>2</a>"],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": TAGS,
                "separator": ";",
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["<a>1</a>"],
            ["", "<a>1</a>;<a>2</a>"],
        ),
        (TRIGGERED, ["", "x <a>1</a> y <b>z</b>", "<"], ["<a>x", "<ab>", "x <a>1</a> <b>"]),
        ({**TRIGGERED, "at_least_one": True}, ["x <a>1</a> y"], ["x", ""]),
        ({**TRIGGERED, "stop_after_first": True}, ["x", "x <a>1</a>"], ["<a>1</a> y"]),
        ({**TRIGGERED, "excludes": ["bad"]}, ["x <a>1</a> y"], ["bad <a>1</a>", "<a>1</a> bad"]),
        (tag("<all>", TRIGGERED, "</all>"), ["<all>x <a>1</a> y</all>", "<all></all>"], ["<all>x", "<all></all>z"]),
        (
            {"type": "sequence", "elements": [tag("<think>", TEXT, "</think>"), TRIGGERED]},
            ["<think>a <a> b</think>", "<think>a</think>x <a>1</a>"],
            ["x", "<think>a", "<think></think><a>b"],
        ),
        (
            {
                "type": "sequence",
                "elements": [TEXT, tag("<a>", DIGITS, "</a>"), {"type": "const_string", "value": "!"}],
            },
            ["x <a>1</a>!", "<a>1</a>!"],
            ["x", "x <a>1</a>", "x <a>b"],
        ),
        (
            {"type": "dispatch", "rules": [["<n>", DIGITS], ["<w>", {"type": "const_string", "value": "w."}]]},
            ["a", "a <n>1 b <w>w. c"],
            ["<n>x", "<w>x"],
        ),
        (
            {"type": "dispatch", "rules": [["<n>", DIGITS]], "loop": False},
            ["a", "a <n>12"],
            ["a <n>1 b"],
        ),
    ],
)
def test_each_format_allows_its_texts_and_no_others(format_, whole, wrong):
    for text in whole:
        assert allows(of(format_), text) is True, text
    for text in wrong:
        assert allows(of(format_), text) is not True, text


@pytest.mark.parametrize(
    "format_",
    [
        tag("<|im_end|>", DIGITS, "."),
        tag({"type": "token", "token": "<|im_end|>"}, DIGITS, {"type": "token", "token": "<|im_end|>"}),
        tag({"type": "token", "token": 3}, DIGITS, "."),
        tag("<|im_end|>", TEXT, "<|im_end|>"),
        {
            "type": "triggered_tags",
            "triggers": ["<|im_end|>"],
            "tags": [tag("<|im_end|>5", DIGITS, ".")],
            "at_least_one": True,
        },
    ],
)
def test_special_tokens_in_tags_are_these_tokens(format_):
    im_end, ids = 3, COMPILER.load().tokenize_str("51.")
    native = COMPILER.compile(StructuredOutputsParams(structural_tag=of(format_)))
    whole = [im_end, *ids] if "." in str(format_) else [im_end, *ids[:-1], im_end]
    if format_.get("end") == "<|im_end|>":
        whole = [im_end, *ids, im_end]
    for token_id in whole:
        assert not native.is_accepting()
        assert native.consume_token(token_id)
    assert native.is_accepting()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "isn't valid JSON"),
        ({}, "#/format is missing: give an object"),
        (of({"type": "poem"}), "#/format/type: 'poem' isn't one of any_text, const_string"),
        (of({"type": "_tag"}), "#/format/type: '_tag' isn't one of"),
        (of({"type": "regex"}), "#/format/pattern is missing: give a string"),
        ({"structures": [{"begin": "x", "end": "y"}], "triggers": ["z"]}, "#/tags/0/begin: 'x' begins with 0 triggers"),
        ({"structures": [{"begin": 5, "end": "y"}], "triggers": ["z"]}, "#/structures/0/begin is 5: give a string"),
        (of({**TRIGGERED, "triggers": ["<", "<a"]}), "begins with 2 triggers: it needs one"),
        (of({**TEXT, "max_tokens": 5}), "#/format/max_tokens can't be enforced"),
        (of({"type": "sequence", "elements": [TEXT, DIGITS]}), "#/format/elements/1: free text before 'regex'"),
        (of({"type": "repeat", "min": 3, "max": 2, "content": DIGITS}), "min=3 and max=2"),
        (of({"type": "json_schema", "json_schema": {"not": {}}}), "#/format/json_schema/not: not can't be enforced"),
        (of({"type": "json_schema", "json_schema": WEATHER, "style": "qwen_xml"}), "#/format/style: 'qwen_xml'"),
        (of({"type": "token", "token": "nothing"}), "neither a token id nor the text of a special token"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(given, message):
    with pytest.raises(InvalidRequest) as caught:
        COMPILER.compile(StructuredOutputsParams(structural_tag=given))
    assert message in str(caught.value)


def test_formats_are_limited_in_depth_and_number():
    deep = DIGITS
    for _ in range(60):
        deep = {"type": "optional", "content": deep}
    many = {"type": "or", "elements": [DIGITS] * 2100}
    for given, message in ((deep, "nests formats more than 50 deep"), (many, "has over 2000 formats")):
        with pytest.raises(InvalidRequest, match=message):
            COMPILER.compile(StructuredOutputsParams(structural_tag=of(given)))
    with pytest.raises(InvalidRequest, match=r"structured_outputs.structural_tag has \d+ characters; at most"):
        StructuredOutputsParams(structural_tag=of({"type": "const_string", "value": "x" * (1 << 18)}))
