"""Calls of tools: one by name, and any that is required."""

import json

from servers import serving

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message['content'] or '' }}{% endfor %}"
)
COMPACT = '{"backend": "xgrammar", "disable_any_whitespace": true}'  # a small model may write blanks without end
FLAGS = ["--enable-auto-tool-choice", "--tool-call-parser", "pythonic", "--structured-outputs-config", COMPACT]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1, 2]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}

with serving(*FLAGS, "--chat-template", TEMPLATE) as (url, client):
    common = {
        "model": "demo",
        "messages": [{"role": "user", "content": "27 + 58 ="}],
        "tools": [TOOL],
        "max_tokens": 450,
        "temperature": 0,
    }
    named = client.chat.completions.create(tool_choice={"type": "function", "function": {"name": "add"}}, **common)
    (call,) = named.choices[0].message.tool_calls
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert 0 <= arguments["a"] <= 99
    assert arguments["b"] in (1, 2)
    required = client.chat.completions.create(tool_choice="required", **common)
    calls = required.choices[0].message.tool_calls
    assert calls
    assert all(set(json.loads(each.function.arguments)) == {"a", "b"} for each in calls)
    auto = client.chat.completions.create(tool_choice="auto", **common)
    assert auto.choices[0].message.content
    assert not auto.choices[0].message.tool_calls
    streamed = client.chat.completions.create(
        tool_choice={"type": "function", "function": {"name": "add"}}, stream=True, **common
    )
    parts = [call for chunk in streamed if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert json.loads("".join(part.function.arguments or "" for part in parts)) == arguments
