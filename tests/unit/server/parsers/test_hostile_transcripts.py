"""What models write by mistake, in every format: calls are found, and their markup never gets into the content.

A format's table gives the content and the calls of each text. The result is the same for a text in pieces.
"""

from __future__ import annotations

import json

import pytest
from call_formats import TEMPLATES, check_places, parser_of, pieces_of, read, written

from raycore.server.chat.choice_reader import ChoiceReader
from raycore.server.chat.parts import CallBegin, ReasoningText
from raycore.server.chat.reasoning import Reasoning
from raycore.server.chat.tools import MessageReader, ToolUse
from raycore.server.parsers import reasoning
from raycore.server.parsers.tool_calls import PARSERS, CallArguments, Content
from raycore.server.parsers.tool_calls.harmony import HarmonyToolParser

SCHEMAS = {
    "find": {
        "type": "object",
        "$defs": {"Mode": {"enum": ["all", "one"]}, "Limit": {"type": "integer"}},
        "properties": {
            "text": {"type": "string"},
            "limit": {"anyOf": [{"$ref": "#/$defs/Limit"}, {"type": "null"}]},
            "mode": {"$ref": "#/$defs/Mode"},
            "where": {"type": "object"},
            "exact": {"type": "boolean"},
        },
    },
    "stop": {"type": "object", "properties": {}},
}
FIND = [("find", {"text": "a"})]
STOP = [("stop", {})]


def obj(name="find", arguments='{"text": "a"}', key="arguments"):
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(text):
    return f"<tool_call>\n{text}\n</tool_call>"


HERMES = {
    "keys after the arguments": (
        hermes('{"name": "find", "arguments": {"text": "a"}, "id": "}", "x": [{}]}'),
        "",
        FIND,
    ),
    "keys before the name": (hermes('{"id": "1", "type": "function", ' + obj()[1:]), "", FIND),
    "keys in between": (hermes('{"name": "find", "id": {"arguments": {}}, "arguments": {"text": "a"}}'), "", FIND),
    "arguments first": (hermes('{"arguments": {"text": "a"}, "type": "function", "name": "find"}'), "", FIND),
    "parameters first": (hermes('{"parameters": {"text": "a"}, "name": "find", "id": 5}'), "", FIND),
    "arguments as a string": (hermes(obj(arguments=json.dumps('{"text": "a"}'))), "", FIND),
    "a string first": (hermes('{"arguments": "{\\"text\\": \\"a\\"}", "name": "find"}'), "", FIND),
    "an empty string": (hermes(obj("stop", '""')), "", STOP),
    "a string that is no object": (hermes(obj(arguments='"what?"')), hermes(obj(arguments='"what?"')), []),
    "too many brackets": (hermes(obj() + "}}"), "", FIND),
    "text before the end": ("<tool_call>" + obj() + " so </tool_call> then", " so then", FIND),
    "no end": ("<tool_call>" + obj() + "<tool_call>" + obj("stop", "{}"), "", FIND + STOP),
    "broken keys": (hermes('{"name": "find", arguments: {}}'), hermes('{"name": "find", arguments: {}}'), []),
    "a key without a value": (hermes('{"name": "find", "id": }'), hermes('{"name": "find", "id": }'), []),
    "a name twice": (hermes('{"name": "find", "name": "stop", "arguments": {"text": "a"}}'), "", FIND),
    "no name": (hermes('{"arguments": {"text": "a"}}'), hermes('{"arguments": {"text": "a"}}'), []),
    "Python": (hermes("{'name': 'find'}"), hermes("{'name': 'find'}"), []),
    "white space everywhere": (
        '<tool_call>\n\n { "name" :\n"find" ,\t"arguments" : {"text": "a"} , "id" : 1 } \n\n</tool_call>',
        "",
        FIND,
    ),
    "two calls in one block": (
        "<tool_call>" + obj() + "\n</tool_call>\n<tool_call>\n" + obj("stop", "{}") + "</tool_call>",
        "",
        FIND + STOP,
    ),
    "a broken call, then a call": (
        hermes('{"name" find}') + "\n" + hermes(obj()),
        hermes('{"name" find}'),
        FIND,
    ),
}
LLAMA = {
    "keys after the parameters": ('{"name": "find", "parameters": {"text": "a"}, "id": "1"}', "", FIND),
    "a type first": ('{"type": "function", "name": "find", "parameters": {"text": "a"}}; ', "", FIND),
    "parameters first": ('{"parameters": {"text": "a"}, "name": "find"}', "", FIND),
    "arguments as a string": (obj(arguments='"{\\"text\\": \\"a\\"}"'), "", FIND),
    "two with keys after": (
        '{"name": "find", "parameters": {"text": "a"}, "x": 1}; {"name": "stop", "parameters": {}, "x": 1}',
        "",
        FIND + STOP,
    ),
    "behind a tag": ("Well.<|python_tag|>" + obj() + "}", "Well.", FIND),
    "another object": ('{"answer": {"name": "find"}}', '{"answer": {"name": "find"}}', []),
    "an object that describes a call": ("Write " + obj(), "Write " + obj(), []),
    "broken": ('{"name": "find" "parameters": {}}', '{"name": "find" "parameters": {}}', []),
}


def parameters(**values):
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())


def function(name="find", inner="<parameter=text>\na\n</parameter>\n"):
    return f"<function={name}>\n{inner}</function>"


CODER = {
    "no block": (function(), "", FIND),
    "no block, with text": (f"Well.\n{function()}\n{function('stop', '')}\nDone.", "Well.\nDone.", FIND + STOP),
    "no block, an unknown name": (function("other"), function("other"), []),
    "no block, no parameters": ("Use <function=find> here.", "Use <function=find> here.", []),
    "only the block's end": (f"{function()}\n</tool_call>", "", FIND),
    "two functions in a block": (hermes(f"{function()}\n{function('stop', '')}"), "", FIND + STOP),
    "text between functions": (hermes(f"{function()} and {function('stop', '')}"), " and", FIND + STOP),
    "a value without an end": (
        hermes(function(inner="<parameter=text>\na\n<parameter=limit>\n5\n")),
        "",
        [("find", {"text": "a", "limit": 5})],
    ),
    "values without an end, in one line": (
        "<tool_call><function=find><parameter=text>a<parameter=limit>5</function></tool_call>",
        "",
        [("find", {"text": "a", "limit": 5})],
    ),
    "no ends but the block's": (hermes("<function=find>\n<parameter=text>\na"), "", FIND),
    "no ends, then a call": (
        "<tool_call>\n<function=find>\n<parameter=text>\na\n</tool_call>\n" + hermes(function("stop", "")),
        "",
        FIND + STOP,
    ),
    "an end without a value": (
        hermes(function(inner="<parameter=text></parameter>")),
        "",
        [("find", {"text": ""})],
    ),
    "an end in a value": (
        hermes(function(inner=parameters(text="a</parameter> b\n</parameter>\nc </function> d </tool_call> e"))),
        "",
        [("find", {"text": "a</parameter> b\n</parameter>\nc </function> d </tool_call> e"})],
    ),
    "a call in a value": (
        hermes(function(inner=parameters(text=hermes(function()), limit="null"))),
        "",
        [("find", {"text": hermes(function()), "limit": None})],
    ),
    "a parameter's tag in a value": (
        hermes(function(inner=parameters(text="Use <parameter=limit> or\n<parameter=other>."))),
        "",
        [("find", {"text": "Use <parameter=limit> or\n<parameter=other>."})],
    ),
    "the beginning of a call in a value": (
        hermes(function(inner=parameters(text="<tool_call>\n<function=find>", limit=3))) + hermes(function()),
        "",
        [("find", {"text": "<tool_call>\n<function=find>", "limit": 3}), *FIND],
    ),
    "a function's tag in a value": (
        hermes(function(inner=parameters(text="Use <function=find> first", limit=3))),
        "",
        [("find", {"text": "Use <function=find> first", "limit": 3})],
    ),
    "spaces in tags": (
        "<tool_call>\n\n <function= find >\n <parameter= text >\na\n</parameter>\n\n </function>\n </tool_call>",
        "",
        FIND,
    ),
    "types": (
        hermes(function(inner=parameters(limit="5", mode="all", where='{"a": [1, {"b": null}]}', exact="True"))),
        "",
        [("find", {"limit": 5, "mode": "all", "where": {"a": [1, {"b": None}]}, "exact": True})],
    ),
    "values that aren't of the type": (
        hermes(function(inner=parameters(limit="five", where="{'a': 1}", exact="5", text="null"))),
        "",
        [("find", {"limit": "five", "where": "{'a': 1}", "exact": "5", "text": "null"})],
    ),
    "strings stay as they are": (
        hermes(function(inner=parameters(text='  "123" \n', mode="5"))),
        "",
        [("find", {"text": '  "123" \n', "mode": "5"})],
    ),
    "a function that isn't known": (
        hermes(function("other", parameters(limit="5"))),
        "",
        [("other", {"limit": "5"})],
    ),
    "text before the function's end": (
        "<tool_call>\n<function=find>\n<parameter=text>\na\n</parameter>\nso </function> then </tool_call> on",
        "\nso then on",
        FIND,
    ),
    "text after the parameters": (
        "<tool_call>\n<function=find>\n<parameter=text>\na\n</parameter>\nso it is",
        "\nso it is",
        FIND,
    ),
}
OLDER = {
    "keys after the arguments": (
        '[TOOL_CALLS] [{"name": "find", "arguments": {"text": "a"}, "id": "VvvODy9mT"}]',
        "",
        FIND,
    ),
    "arguments first": ('[TOOL_CALLS][{"arguments": {"text": "a"}, "name": "find"}]', "", FIND),
    "without a list": (f"[TOOL_CALLS]{obj()}", "", FIND),
    "without a comma": (f"[TOOL_CALLS] [{obj()}\n{obj('stop', '{}')}]", "", FIND + STOP),
    "a comma at the end": (f"[TOOL_CALLS][{obj()},]", "", FIND),
    "no end": (f"[TOOL_CALLS][{obj()}", "", FIND),
    "two lists": (f"[TOOL_CALLS][{obj()}] [TOOL_CALLS][{obj('stop', '{}')}]", "", FIND + STOP),
    "an empty list": ("[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    "a broken object": ('[TOOL_CALLS][{"name" "find"}]', '[TOOL_CALLS][{"name" "find"}]', []),
    "arguments as a string": (f"[TOOL_CALLS][{obj(arguments=json.dumps(json.dumps(FIND[0][1])))}]", "", FIND),
    "text after the list": (f"[TOOL_CALLS][{obj()}]\nDone.", "\nDone.", FIND),
    "a list of something else": ("[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
}
NEWER = {
    "without a tag": ('[TOOL_CALLS]find{"text": "a"}', "", FIND),
    "with an id": ('[TOOL_CALLS]find[CALL_ID]VvvODy9mT[ARGS]{"text": "a"}', "", FIND),
    "spaces": ('[TOOL_CALLS] find [ARGS] {"text": "a"}\n[TOOL_CALLS] stop {}', "", FIND + STOP),
    "too many brackets": ('[TOOL_CALLS]find[ARGS]{"text": "a"}}[TOOL_CALLS]stop[ARGS]{}', "", FIND + STOP),
    "no arguments": ("[TOOL_CALLS]find[ARGS]", "[TOOL_CALLS]find[ARGS]", []),
    "no object": ("[TOOL_CALLS]find[ARGS]what?", "[TOOL_CALLS]find[ARGS]what?", []),
    "no name": ("[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS][ARGS]{}", []),
    "a sentence": ("[TOOL_CALLS] is Mistral's tag: {}", "[TOOL_CALLS] is Mistral's tag: {}", []),
    "text after a call": ('[TOOL_CALLS]find[ARGS]{"text": "a"} Done.', " Done.", FIND),
    "both forms": (f"[TOOL_CALLS][{obj()}][TOOL_CALLS]stop[ARGS]{{}}", "", FIND + STOP),
}


def pair(key, value, space="\n"):
    return f"<arg_key>{key}</arg_key>{space}<arg_value>{value}</arg_value>{space}"


TEXT = pair("text", "a")


def glm(name="find", inner=TEXT):
    return f"<tool_call>{name}\n{inner}</tool_call>"


GLM = {
    "in one line": (f"<tool_call>find{pair('text', 'a', '')}</tool_call>", "", FIND),
    "in several lines": (glm(), "", FIND),
    "no parameters, in one line": ("<tool_call>stop</tool_call>", "", STOP),
    "spaces": (f"<tool_call>\n find \n\n{pair(' text ', 'a', '  ')}\n </tool_call> ", "", FIND),
    "text around": (f"Well.\n{glm()}\nSo\n{glm('stop', '')} Done.", "Well.\nSo Done.", FIND + STOP),
    "no end": (f"<tool_call>find\n{pair('text', 'a')}", "", FIND),
    "half an end": (f"<tool_call>find\n{pair('text', 'a')}</tool_", "", FIND),
    "no end, then a call": (f"<tool_call>find\n{pair('text', 'a')}{glm('stop', '')}", "", FIND + STOP),
    "no end, no parameters": ("<tool_call>stop\n", "", STOP),
    "no end of a name": ("<tool_call>stop", "<tool_call>stop", []),
    "no end of an unknown name": ("<tool_call>other\n", "<tool_call>other\n", []),
    "a value without an end": (
        glm(inner=f"<arg_key>text</arg_key>\n<arg_value>a\n{pair('limit', 5)}"),
        "",
        [("find", {"text": "a", "limit": 5})],
    ),
    "no ends but the call's": ("<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>a\n</tool_call>", "", FIND),
    "no ends, then a call": (
        f"<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>a\n</tool_call>\n{glm('stop', '')}",
        "",
        FIND + STOP,
    ),
    "a key without an end": (glm(inner="<arg_key>text\n<arg_value>a</arg_value>\n"), "", FIND),
    "a value without a beginning": (glm(inner="<arg_key>text</arg_key>\na</arg_value>\n"), "", FIND),
    "a key only": (glm(inner="<arg_key>text</arg_key>\n") + " x", " x", [("find", {"text": ""})]),
    "an empty value": (glm(inner=pair("text", "")), "", [("find", {"text": ""})]),
    "ends in a value": (
        glm(inner=pair("text", "a</arg_value> b\n</arg_value>\nc </tool_call> d </arg_key>")),
        "",
        [("find", {"text": "a</arg_value> b\n</arg_value>\nc </tool_call> d </arg_key>"})],
    ),
    "a call in a value": (
        glm(inner=pair("text", glm()) + pair("limit", "null")),
        "",
        [("find", {"text": glm(), "limit": None})],
    ),
    "keys in a value": (
        glm(inner=pair("text", "Use <arg_key>limit</arg_key> or\n<arg_key>other</arg_key> <arg_value>.")),
        "",
        [("find", {"text": "Use <arg_key>limit</arg_key> or\n<arg_key>other</arg_key> <arg_value>."})],
    ),
    "the beginning of a call in a value": (
        glm(inner=pair("text", "<tool_call>find\n<arg_key>") + pair("limit", 3)) + glm(),
        "",
        [("find", {"text": "<tool_call>find\n<arg_key>", "limit": 3}), *FIND],
    ),
    "a tag in a value": (
        glm(inner=pair("text", "Write <tool_call> first") + pair("limit", 3)) + glm("stop", ""),
        "",
        [("find", {"text": "Write <tool_call> first", "limit": 3}), *STOP],
    ),
    "types": (
        glm(inner=pair("limit", 5) + pair("mode", "all") + pair("where", '{"a": [1, null]}') + pair("exact", "True")),
        "",
        [("find", {"limit": 5, "mode": "all", "where": {"a": [1, None]}, "exact": True})],
    ),
    "values that aren't of the type": (
        glm(inner=pair("limit", "five") + pair("where", "{'a': 1}") + pair("exact", 5)),
        "",
        [("find", {"limit": "five", "where": "{'a': 1}", "exact": "5"})],
    ),
    "strings stay as they are": (
        glm(inner=pair("text", '\n  "123" \n')),
        "",
        [("find", {"text": '\n  "123" \n'})],
    ),
    "a function that isn't known, with a value": (
        glm("other", pair("limit", 5)),
        "",
        [("other", {"limit": "5"})],
    ),
    "text before the end": (f"{glm().removesuffix('</tool_call>')}so </tool_call> on", "\nso on", FIND),
    "text instead of parameters": ("<tool_call>find\nwell</tool_call>", "<tool_call>find\nwell</tool_call>", []),
    "another format": (hermes(obj()), hermes(obj()), []),
    "no name": (f"<tool_call>{pair('text', 'a')}</tool_call>", f"<tool_call>{pair('text', 'a')}</tool_call>", []),
    "a sentence in tags": ("<tool_call>not a name</tool_call>", "<tool_call>not a name</tool_call>", []),
}


def quoted(key, value):
    return f'<parameter name="{key}">{value}</parameter>\n'


TEXT_QUOTED = quoted("text", "a")


def invoke(name="find", inner=TEXT_QUOTED):
    return f'<invoke name="{name}">\n{inner}</invoke>\n'


def minimax(*invokes):
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


MINIMAX = {
    "a block for each": (f"{minimax(invoke())}\n{minimax(invoke('stop', ''))}", "", FIND + STOP),
    "in one line": (minimax(invoke()).replace("\n", ""), "", FIND),
    "no block": (invoke(), "", FIND),
    "no block, with text": (f"Well.\n{invoke()}{invoke('stop', '')}\nDone.", "Well.\n\nDone.", FIND + STOP),
    "no block, an unknown name": (invoke("other"), invoke("other"), []),
    "no block, no parameters": ('Use <invoke name="find"> here.', 'Use <invoke name="find"> here.', []),
    "only the block's end": (f"{invoke()}</minimax:tool_call>", "", FIND),
    "no block's end": (f"<minimax:tool_call>\n{invoke()}{invoke('stop', '')}", "", FIND + STOP),
    "half a block's end": (f"<minimax:tool_call>\n{invoke()}</minimax:tool", "", FIND),
    "text between functions": (minimax(invoke(), "and ", invoke("stop", "")), "\nand", FIND + STOP),
    "no quotes": (minimax(invoke()).replace('"', ""), "", FIND),
    "spaces": (
        '<minimax:tool_call>\n\n <invoke name= "find" >\n <parameter name= "text" >a</parameter>\n\n </invoke>\n '
        "</minimax:tool_call>",
        "",
        FIND,
    ),
    "a value without an end": (
        minimax(invoke(inner=f'<parameter name="text">a\n{quoted("limit", 5)}')),
        "",
        [("find", {"text": "a", "limit": 5})],
    ),
    "no ends but the block's": (minimax('<invoke name="find">\n<parameter name="text">a\n'), "", FIND),
    "no ends, then a call": (
        minimax('<invoke name="find">\n<parameter name="text">a\n') + minimax(invoke("stop", "")),
        "",
        FIND + STOP,
    ),
    "no function's end": (minimax(f'<invoke name="find">\n{TEXT_QUOTED}'), "", FIND),
    "an empty value": (minimax(invoke(inner=quoted("text", ""))), "", [("find", {"text": ""})]),
    "ends in a value": (
        minimax(invoke(inner=quoted("text", "a</parameter> b\n</parameter>\nc </invoke> d </minimax:tool_call> e"))),
        "",
        [("find", {"text": "a</parameter> b\n</parameter>\nc </invoke> d </minimax:tool_call> e"})],
    ),
    "a call in a value": (
        minimax(invoke(inner=quoted("text", minimax(invoke())) + quoted("limit", "null"))),
        "",
        [("find", {"text": minimax(invoke()), "limit": None})],
    ),
    "the beginning of a call in a value": (
        minimax(invoke(inner=quoted("text", '<minimax:tool_call>\n<invoke name="find">') + quoted("limit", 3)))
        + minimax(invoke()),
        "",
        [("find", {"text": '<minimax:tool_call>\n<invoke name="find">', "limit": 3}), *FIND],
    ),
    "another parameter's tag in a value": (
        minimax(invoke(inner=quoted("text", 'Use <parameter name="other">.'))),
        "",
        [("find", {"text": 'Use <parameter name="other">.'})],
    ),
    "types": (
        minimax(
            invoke(
                inner=quoted("limit", 5)
                + quoted("mode", "all")
                + quoted("where", '{"a": [1]}')
                + quoted("exact", "true")
            )
        ),
        "",
        [("find", {"limit": 5, "mode": "all", "where": {"a": [1]}, "exact": True})],
    ),
    "values in lines of their own": (
        minimax(invoke(inner=quoted("limit", "\n5\n") + quoted("text", "\na\n"))),
        "",
        [("find", {"limit": 5, "text": "\na\n"})],
    ),
    "values that aren't of the type": (
        minimax(invoke(inner=quoted("limit", "five") + quoted("where", "{'a': 1}") + quoted("exact", 5))),
        "",
        [("find", {"limit": "five", "where": "{'a': 1}", "exact": "5"})],
    ),
    "a function that isn't known, with a value": (
        minimax(invoke("other", quoted("limit", 5))),
        "",
        [("other", {"limit": "5"})],
    ),
    "text before the function's end": (
        minimax(invoke().replace("</invoke>", "so </invoke> then")) + " on",
        "\nso then on",
        FIND,
    ),
    "no function": (minimax("what?"), minimax("what?").removesuffix("\n"), []),
}


def fenced(text):
    return f"```tool_code\n{text}\n```"


PYTHONIC = {
    "a fence": (fenced("[find(text='a')]"), "", FIND),
    "a fence without a list": (fenced("find(text='a')\nstop()"), "", FIND + STOP),
    "a fence behind text": ("Well.\n" + fenced("[find(text='a')]") + "\nDone.", "Well.\nDone.", FIND),
    "a fence without an end": ("```tool_code\n[find(text='a')]\n", "", FIND),
    "a fence of something else": (fenced("print(1)"), fenced("print(1)"), []),
    "another fence": ("```python\nfind(text='a')\n```", "```python\nfind(text='a')\n```", []),
    "spaces": ("[ find( text = 'a' ) , stop( ) ]", "", FIND + STOP),
    "lists": ("[find(text='a')]\n[stop()]", "", FIND + STOP),
    "no end": ("[find(text='a')", "", FIND),
    "no parenthesis": ("[find(text='a']", "", FIND),
    "no end of a value": ("[find(limit=5", "", [("find", {"limit": 5})]),
    "a comma at the end": ("[find(text='a',),]", "", FIND),
    "in the midst of text": ("So [find(text='a')]", "So [find(text='a')]", []),
    "text behind": ("[stop()]. Done.", ". Done.", STOP),
    "types": (
        "[find(limit=None, mode='all', where={'a': [1, {'b': None}]}, exact=True)]",
        "",
        [("find", {"limit": None, "mode": "all", "where": {"a": [1, {"b": None}]}, "exact": True})],
    ),
    "types in JSON": (
        '[find(limit=null, where={"a": [true]}, exact=false)]',
        "",
        [("find", {"limit": None, "where": {"a": [True]}, "exact": False})],
    ),
    "values in other types": (
        "[find(limit='5', exact='true', text=7, where='x')]",
        "",
        [("find", {"limit": 5, "exact": True, "text": "7", "where": "x"})],
    ),
    "quotes and brackets in a value": (
        "[find(text='it\\'s \")], [(', limit=3)]",
        "",
        [("find", {"text": "it's \")], [(", "limit": 3})],
    ),
    "a newline in a value": ("[find(text='a\nb')]", "", [("find", {"text": "a\nb"})]),
    "a value that is no literal": ("[find(text=other(1, 2))]", "", [("find", {"text": "other(1, 2)"})]),
    "a value without a name": ("[find('x', text='a')]", "[find('x', text='a')]", []),
    "a second value without a name": ("[find(text='a', 'x')]", "", FIND),
    "a function that isn't known, with a value": ("[other(a=5)]", "", [("other", {"a": 5})]),
    "a link": ("[text](https://a.test/?b=1)", "[text](https://a.test/?b=1)", []),
    "a list": ("[1, 2]", "[1, 2]", []),
    "a comparison": ("[f(a==1)]", "[f(a==1)]", []),
    "a comprehension": ("[f(x) for x in y]", "[f(x) for x in y]", []),
}
OWN = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "qwen3_coder": CODER,
    "mistral, older": OLDER,
    "mistral, newer": NEWER,
    "glm45": GLM,
    "glm47": GLM,
    "minimax_m2": MINIMAX,
    "pythonic": PYTHONIC,
}
AT_BEGINNING = ("llama3_json", "pythonic")
"""The formats whose calls begin the message."""
HARD = 'A "quoted" \\ {brace} [x] </a> \u00e9\u4f60 \U0001f600 \n<tool_call> [TOOL_CALLS] <|python_tag|> </tool_call> ;'


def common(form):
    """Texts that occur in every format."""
    call, stop = written(form, FIND), written(form, STOP)
    both = written(form, FIND + STOP)
    many = {"text": HARD, "where": {"a": [{"b": {"c": "}"}}, []], "é": ""}, "limit": 3, "exact": False}
    before = "" if form in AT_BEGINNING else "Let me see."
    name = "unknown" if form != "qwen3_coder" else "stop"
    yield "a call", (call, "", FIND)
    yield "no arguments", (stop, "", STOP)
    yield "two calls", (both, "", FIND + STOP)
    yield "white space around", (f"\n {call}\n\n", "", FIND)
    yield "text before", (f"{before}\n{call}", before, FIND)
    yield "text after", (f"{call}\n\nThat was it.", "\n\nThat was it.", FIND)
    yield "hard values", (written(form, [("find", many)]), "", [("find", many)])
    yield "a function that isn't known", (written(form, [(name, {})]), "", [(name, {})])
    yield "just text", ("1 < 2, {x}; [y] <b>", "1 < 2, {x}; [y] <b>", [])
    yield "the end of a call", ("} ] </tool_call> </function>", "} ] </tool_call> </function>", [])
    for tag in (
        "<tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "<function=",
        "<arg_key>",
        "</tool_call>",
        "<minimax:tool_call>",
        '<invoke name="',
    ):
        yield f"{tag} in a sentence", (f"Models write {tag} before calls.", f"Models write {tag} before calls.", [])
        yield f"{tag} at the end", (f"Models write {tag}", f"Models write {tag}", [])


CASES = [
    pytest.param(form, *case, id=f"{form}: {title}")
    for form in TEMPLATES
    for title, case in [*common(form), *OWN[form].items()]
]


def test_every_tool_call_parser_has_a_table_of_hostile_texts():
    # Harmony has tables of its own: its tags are special tokens, so no text has them
    assert {parser_of(form) for form in OWN} == {*PARSERS.values()} - {HarmonyToolParser}


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_hostile_texts_are_parsed_to_their_content_and_calls_in_any_pieces(form, text, content, calls):
    whole = read(parser_of(form)(SCHEMAS), [text])
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == calls
    assert whole.content == content
    for size in (1, 3, 7):
        assert read(parser_of(form)(SCHEMAS), pieces_of(text, size)) == whole


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_message_that_is_cut_off_has_no_markup_in_its_content(form):
    before = "" if form in AT_BEGINNING else "Let me see. "
    text = before + written(form, [("find", {"text": "é <b>", "limit": 12, "where": {"a": "}"}}), ("stop", {})])
    complete = read(parser_of(form)(SCHEMAS), [text]).calls
    for length in range(len(text)):
        whole = read(parser_of(form)(SCHEMAS), [text[:length]], is_cut_off=True)
        assert before.startswith(whole.content)
        for (name, arguments), (complete_name, complete_arguments) in zip(whole.calls, complete, strict=False):
            assert name == complete_name
            assert complete_arguments.startswith(arguments)
        for size in (1, 3, 7):
            pieces = pieces_of(text[:length], size)
            assert read(parser_of(form)(SCHEMAS), pieces, is_cut_off=True) == whole


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_a_call_in_reasoning_is_reasoning(form, size):
    call = written(form, FIND)
    use = ToolUse(parser_of(form), SCHEMAS, None, False, False, frozenset())
    thinking = Reasoning(reasoning.parser_named("deepseek_r1"), True, use.parser.opening)
    text = f"<think>I could write {call}.</think>{call}"
    whole = ChoiceReader(thinking, MessageReader(use, is_prefilled=False)).read(text, "stop", None)
    reader = ChoiceReader(thinking, MessageReader(use, is_prefilled=False))
    pieces = [part for piece in pieces_of(text, size) for part in reader.read(piece, None, None)]
    for parts in (whole, pieces + reader.read("", "stop", None)):
        assert "".join(part.text for part in parts if isinstance(part, ReasoningText)) == f"I could write {call}."
        assert not any(isinstance(part, Content) for part in parts)
        check_places(text, parts)
        assert [part.name for part in parts if isinstance(part, CallBegin)] == [FIND[0][0]]
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert json.loads(arguments) == FIND[0][1]
