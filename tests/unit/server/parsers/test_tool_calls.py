"""Calls are found in any piecemeal text, what only looks like one is text, and nothing is lost or told twice."""

from __future__ import annotations

import json

import pytest
from call_formats import check_places, read
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raycore.errors import InvalidConfig
from raycore.server.parsers.tool_calls import PARSERS, CallArguments, CallStart, Content, parser_named

SCHEMAS = {
    "typed": {
        "properties": {
            "count": {"type": "integer"},
            "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "label": {"type": ["string", "null"]},
            "items": {"type": "array"},
            "odd": {"type": None},
            "worse": {"type": 5},
        }
    }
}


def merged(deltas):
    """Deltas with neighbours joined that could have come as one."""
    result = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments):
            assert delta.index == last.index
            result[-1] = CallArguments(delta.index, last.text + delta.text)
        else:
            result.append(delta)
    return result


def parse(name, pieces, is_cut_off=False):
    parser = PARSERS[name](SCHEMAS)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(is_cut_off)
    check_places("".join(pieces), deltas)
    return merged(deltas)


def message(name, text):
    """(content, [(name, arguments)]) of a whole text."""
    return read(PARSERS[name](SCHEMAS), [text])


HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ONE = [("f", '{"a": 1}')]

HERMES = {
    "text": ("Hello, {you}.\n", "Hello, {you}.\n", []),
    "call": (HERMES_CALL, "", ONE),
    "call in one line": ('<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>', "", ONE),
    "text around calls": (
        f"First\n\n{HERMES_CALL}\n{HERMES_CALL}\n\nthen\n",
        "First\n\nthen\n",
        [ONE[0], ONE[0]],
    ),
    "white space only": (f" \n{HERMES_CALL}\n ", "", ONE),
    "nested, with brackets and tags in strings": (
        '<tool_call>{"name": "f", "arguments": {"a": [{"b": "}\\"</tool_call>"}], "c": {}}}</tool_call>',
        "",
        [("f", '{"a": [{"b": "}\\"</tool_call>"}], "c": {}}')],
    ),
    "arguments first": (
        '<tool_call>\n{ "arguments": {"a": "é"}, "name": "f"}\n</tool_call>',
        "",
        [("f", '{"a": "é"}')],
    ),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", ONE),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "null arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    "a name with escapes": ('<tool_call>{"name": "f\\u00e9", "arguments": {}}</tool_call>', "", [("fé", "{}")]),
    "half a character as a name": (
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        [],
    ),
    "half a character, arguments first": (
        '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>',
        "",
        [("f", '{"a": "\\ud800"}')],
    ),
    "no end": (HERMES_CALL.removesuffix("\n</tool_call>"), "", ONE),
    "half an end": (HERMES_CALL.removesuffix("call>"), "", ONE),
    "no closing bracket": ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>after', "after", ONE),
    "text instead of an end": (HERMES_CALL.replace("\n</tool_call>", " after"), " after", ONE),
    "cut off before the arguments": ('Well <tool_call>{"name": "f", "argu', 'Well <tool_call>{"name": "f", "argu', []),
    "cut off in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
    "broken arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> after',
        " after",
        [("f", '{"a": 1')],
    ),
    "arguments that are Python": (
        '<tool_call>{"name": "f", "arguments": {\'a\': True}}</tool_call>',
        "",
        [("f", "{'a': True}")],
    ),
    "a tag in prose": ("Write <tool_call> like this.", "Write <tool_call> like this.", []),
    "half a tag": ("1 < 2 <tool", "1 < 2 <tool", []),
    "two tags": (f"<tool_call>{HERMES_CALL}", "<tool_call>", ONE),
    "broken, then a call": (f'<tool_call>{{"name" oops}}</tool_call>\n{HERMES_CALL}', None, ONE),
    "not an object": ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    "another object": ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    "a name that is no text": (
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        [],
    ),
    "arguments that are no object": (
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [],
    ),
    "deeper than can be read": (
        f'<tool_call>{{"arguments": {{"a": {"[" * 20_000}{"]" * 20_000}}}, "name": "f"}}',
        f'<tool_call>{{"arguments": {{"a": {"[" * 20_000}{"]" * 20_000}}}, "name": "f"}}',
        [],
    ),
}

LLAMA_CALL = '{"name": "f", "parameters": {"a": 1}}'
LLAMA3 = {
    "text": ("Hello.", "Hello.", []),
    "call": (LLAMA_CALL, "", ONE),
    "white space before": (f"\n\n{LLAMA_CALL}\n", "", ONE),
    "announced": (f"<|python_tag|>{LLAMA_CALL}", "", ONE),
    "announced behind text": (f"Well:\n<|python_tag|>{LLAMA_CALL}", "Well:", ONE),
    "several": (f"{LLAMA_CALL}; {LLAMA_CALL};{LLAMA_CALL}\n{LLAMA_CALL};", "", ONE * 4),
    "several, announced": (f"<|python_tag|>{LLAMA_CALL}; <|python_tag|>{LLAMA_CALL}", "", ONE * 2),
    "a type first": ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", ONE),
    "arguments": ('{"name": "f", "arguments": {"a": 1}}', "", ONE),
    "text behind": (f"{LLAMA_CALL}\n\nThat was it.", "\n\nThat was it.", ONE),
    "in the midst of text": (f"So {LLAMA_CALL}", f"So {LLAMA_CALL}", []),
    "another object": ('{"age": 3}', '{"age": 3}', []),
    "another object with a name": (' {"name": "Bob", "age": 3} ', ' {"name": "Bob", "age": 3} ', []),
    "only a name": ('{"name": "Bob"}', '{"name": "Bob"}', []),
    "code": ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "another object, then a call": (f'{{"a": 1}}<|python_tag|>{LLAMA_CALL}', '{"a": 1}', ONE),
    "cut off": ('{"name": "f", "par', '{"name": "f", "par', []),
}

CODER_CALL = "<tool_call>\n<function=f>\n<parameter=a>\nx\ny\n</parameter>\n</function>\n</tool_call>"
CODER_ONE = [("f", '{"a": "x\\ny"}')]


def typed(**values):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=typed>\n{parameters}</function>\n</tool_call>"


QWEN3_CODER = {
    "text": ("Hello.", "Hello.", []),
    "call": (CODER_CALL, "", CODER_ONE),
    "text around calls": (f"First\n{CODER_CALL}\n{CODER_CALL}\nthen", "First\nthen", CODER_ONE * 2),
    "no parameters": ("<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
    "in one line": (
        "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
        "",
        [("f", '{"a": "1"}')],
    ),
    "types": (
        typed(count=3, flag="True", label="4", items='["a"]', unknown="5", odd="6", worse="7"),
        "",
        [
            (
                "typed",
                '{"count": 3, "flag": true, "label": "4", "items": ["a"], "unknown": "5", "odd": "6", "worse": "7"}',
            )
        ],
    ),
    "values of other types": (typed(count="many", flag="None"), "", [("typed", '{"count": "many", "flag": null}')]),
    "code as a value": (
        "<tool_call>\n<function=f>\n<parameter=a>\n\n  if a < b: </x>\n\n</parameter>\n</function>\n</tool_call>",
        "",
        [("f", '{"a": "\\n  if a < b: </x>\\n"}')],
    ),
    "no end": (CODER_CALL.removesuffix("\n</function>\n</tool_call>"), "", CODER_ONE),
    "half an end": (CODER_CALL.removesuffix("ction>\n</tool_call>"), "", CODER_ONE),
    "only the call's end": (CODER_CALL.replace("</function>\n", ""), "", CODER_ONE),
    "cut off in a value": ("<tool_call>\n<function=f>\n<parameter=a>\nx</par", "", [("f", '{"a": "x</par"}')]),
    "cut off in a tag": ("<tool_call>\n<function=f>\n<parameter=", "", [("f", "{}")]),
    "text between parameters": ("<tool_call>\n<function=f>\nwell", "\nwell", [("f", "{}")]),
    "no function": ("<tool_call>\n<functio", "<tool_call>\n<functio", []),
    "another tag": ("<tool_call>\n<f=f>", "<tool_call>\n<f=f>", []),
    "a name that is none": ("<tool_call><function=a\nb>", "<tool_call><function=a\nb>", []),
}

CASES = [
    pytest.param(name, *case, id=f"{name}: {what}")
    for name, cases in (("hermes", HERMES), ("llama3_json", LLAMA3), ("qwen3_coder", QWEN3_CODER))
    for what, case in cases.items()
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_message_is_parsed_to_its_content_and_calls(name, text, content, calls):
    found_content, found_calls = message(name, text)
    assert found_calls == calls
    if content is not None:
        assert found_content == content


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_message_parsed_character_by_character_has_the_same_content_and_calls(name, text, content, calls):
    assert parse(name, text) == parse(name, [text])


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", "Well \n<tool_call", "Well"),
        ("hermes", "Well \n<tool_call>", "Well"),
        ("hermes", 'Well <tool_call>{"name": "f", "argu', "Well"),
        ("hermes", 'Well <tool_call>{"arguments": {"a": 1', "Well"),
        ("hermes", "Well <tool_call> is", "Well <tool_call> is"),
        ("hermes", "1 < 2 ", "1 < 2 "),
        ("hermes", f"{HERMES_CALL}\n ", ""),
        ("hermes", f"{HERMES_CALL}\n<tool_", ""),
        ("llama3_json", "{", ""),
        ("llama3_json", '{"name": "ty', ""),
        ("llama3_json", '{"name" :"typed", "par', ""),
        ("llama3_json", '{"name": "Bob", "age": 3', '{"name": "Bob", "age": 3'),
        ("llama3_json", '{"type": "x", "id": 3', '{"type": "x", "id": 3'),
        ("llama3_json", '<|python_tag|>{"type": "function", "na', ""),
        ("llama3_json", f'{LLAMA_CALL}; {{"type": "function", "na', ""),
        ("qwen3_coder", "Well\n<tool_call>\n<functio", "Well"),
        ("qwen3_coder", "Well\n<tool_call>\n<function=ty", "Well"),
        ("qwen3_coder", "Well <tool_call> is", "Well <tool_call> is"),
    ],
)
def test_the_beginning_of_a_call_that_is_cut_off_is_no_content(name, text, content):
    for pieces in ([text], text):
        deltas = parse(name, pieces, is_cut_off=True)
        assert "".join(delta.text for delta in deltas if isinstance(delta, Content)) == content


NAMES_OF_PARSERS = ["hermes", "llama3_json", "qwen3_coder", "mistral", "glm45", "minimax_m2", "pythonic"]
FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        ";",
        "\n",
        " ",
        "<",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        "é",
    ),
    *(
        "<function=f>",
        "<function=",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "text",
        "1",
        "tool",
        "_call>",
        "{}",
    ),
    *("<function=typed>", "<parameter=count>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '[TOOL_CALLS][{"name": "f", '),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>typed\n", "<arg_key>count</arg_key>\n"),
    *(
        '<invoke name="typed">\n',
        '<parameter name="count">',
        "</invoke>",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    *("[f(", "typed(", "count=", "'a'", ")", "```tool_code", "```", "="),
    *('"name"', '"f"', '"arguments"', '"parameters"', '{"name": "f", ', '"arguments": {', '"parameters": {"a": '),
    *(HERMES_CALL, LLAMA_CALL, CODER_CALL, '{"arguments": {"b": "}"}, "name": "g"}', '{"name": "h"}'),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@given(st.sampled_from(NAMES_OF_PARSERS), TEXTS, st.data())
def test_any_split_of_a_text_gives_the_same_content_and_calls(name, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(name, pieces) == parse(name, [text])


@given(st.sampled_from(NAMES_OF_PARSERS), TEXTS, st.data())
def test_any_split_of_a_text_that_is_cut_off_gives_the_same_content_and_calls(name, text, data):
    cut = data.draw(st.integers(0, len(text)))
    whole = parse(name, [text], is_cut_off=True)
    assert parse(name, [text[:cut], text[cut:]], is_cut_off=True) == whole
    complete = parse(name, [text])
    assert [each for each in whole if isinstance(each, CallStart)] == [c for c in complete if isinstance(c, CallStart)]


@given(st.sampled_from(NAMES_OF_PARSERS), TEXTS)
@example("llama3_json", "{" * 3)
def test_text_without_calls_is_the_content_unchanged(name, text):
    content, calls = message(name, text)
    if not calls:
        assert content == text
    assert all(called for called, _ in calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,10}", fullmatch=True)
WORDS = st.from_regex(r"[a-zA-Z,.]([a-zA-Z,. \n]{0,10}[a-zA-Z,.])?", fullmatch=True)


@settings(max_examples=50)
@given(st.lists(WORDS | st.tuples(NAMES, st.dictionaries(st.text(), VALUES, max_size=3), st.booleans()), max_size=5))
def test_written_calls_and_text_are_parsed_back(parts):
    texts, expected = [], []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        else:
            name, arguments, is_name_first = part
            fields = [("name", name), ("arguments", arguments)][:: 1 if is_name_first else -1]
            texts.append(f"\n<tool_call>\n{json.dumps(dict(fields))}\n</tool_call>\n")
            expected.append((name, arguments))
    content, calls = message("hermes", "".join(texts))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == expected
    assert "".join(content.split()) == "".join("".join(part.split()) for part in parts if isinstance(part, str))


def test_arguments_of_a_call_are_parsed_piece_by_piece():
    parser = PARSERS["hermes"]({})
    assert parser.feed("Let me see.\n<tool") == [Content("Let me see.")]
    assert parser.feed('_call>\n{"name": "f", "arguments": ') == []
    assert parser.feed('{"a": "x') == [CallStart(0, "f"), CallArguments(0, '{"a": "x')]
    assert parser.feed('}y"') == [CallArguments(0, '}y"')]
    assert parser.feed("}") == [CallArguments(0, "}")]
    assert parser.feed("}\n</tool_call>") == []
    assert parser.finish() == []


def test_an_object_that_is_no_call_is_not_held_back():
    parser = PARSERS["llama3_json"]({})
    assert merged(parser.feed('{"answer": 4')) == [Content('{"answer": 4')]


@pytest.mark.parametrize(
    ("name", "text", "arguments", "content"),
    [
        ("hermes", ' {"a": 1}}\n</tool_call>', '{"a": 1}', ""),
        ("hermes", " null}\n</tool_call> so", "null", " so"),
        ("hermes", " what? I", "what? I", ""),
        ("hermes", "", "", ""),
        ("llama3_json", ' {"a": 1}}', '{"a": 1}', ""),
        ("llama3_json", " what; {", "what; {", ""),
        ("qwen3_coder", "<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", '{"a": "1"}', ""),
        ("qwen3_coder", "what?", "{}", "what?"),
        ("glm45", "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", '{"a": "1"}', ""),
        ("glm45", "what?", "{}", "what?"),
        ("minimax_m2", '<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>', '{"a": "1"}', ""),
    ],
)
def test_text_after_a_prefilled_function_name_is_parsed_as_arguments(name, text, arguments, content):
    for pieces in ([text], text):
        parser = PARSERS[name]({})
        assert parser.begin("f") == [CallStart(0, "f")]
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
        check_places(text, deltas)
        assert "".join(delta.text for delta in deltas if isinstance(delta, CallArguments)) == arguments
        assert "".join(delta.text for delta in deltas if isinstance(delta, Content)) == content


@pytest.mark.parametrize(
    ("name", "call"), [("hermes", HERMES_CALL), ("llama3_json", LLAMA_CALL), ("qwen3_coder", CODER_CALL)]
)
def test_the_prefill_of_a_parser_begins_the_calls_that_it_reads(name, call):
    for prefill in (PARSERS[name].prefill("f"), PARSERS[name].prefill(None)):
        assert call.startswith(prefill)


def test_an_unknown_tool_call_parser_is_refused_with_the_known_ones():
    with pytest.raises(InvalidConfig, match=r"'granite'.*hermes"):
        parser_named("granite")
