"""Bodies of Anthropic's Messages API as chat requests."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from pydantic import ValidationError

from raycore.server.dialects.messages.protocol import MessagesRequest
from raycore.server.dialects.messages.systems import has_one_system
from raycore.server.dialects.messages.translation import chat_request, has_images
from raycore.server.http.errors import APIError, invalid_body

PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}
WEATHER = {"name": "get_weather", "description": "Of a city.", "input_schema": {"properties": {"city": {}}}}
ASKED = {"role": "user", "content": "How warm is it?"}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def text(words):
    return {"type": "text", "text": words}


def translated(has_one_system=False, **fields):
    """The fields of the chat request that a body sets."""
    body = MessagesRequest.model_validate({"model": "fake", "max_tokens": 9, "messages": [ASKED], **fields})
    return chat_request(body, has_one_system=has_one_system).model_dump(exclude_unset=True, by_alias=True)


def refusal(**fields):
    """(field, message) of the error for a body."""
    with pytest.raises((APIError, ValidationError)) as caught:
        translated(**fields)
    error = caught.value
    told = error if isinstance(error, APIError) else invalid_body(error.errors())
    assert told.status == 400
    return told.param, told.message


def test_a_text_is_a_message():
    assert translated() == {
        "model": "fake",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "How warm is it?"}]}],
    }


@pytest.mark.parametrize("system", ["Be brief.\nBe kind.", [text("Be brief."), text("Be kind.") | EPHEMERAL]])
def test_the_system_prompt_is_the_first_message(system):
    messages = translated(system=system)["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief.\nBe kind."}


def test_what_differs_with_every_request_of_a_client_is_left_out_of_the_system_prompt():
    system = [text("x-anthropic-billing-header: cc_version=2; cch=8f3a"), text("Be brief.")]
    assert translated(system=system)["messages"][0]["content"] == "Be brief."
    assert [each["role"] for each in translated(system=system[:1])["messages"]] == ["user"]


def test_system_messages_stay_where_they_are_if_the_template_takes_them_there():
    turns = [ASKED, {"role": "system", "content": "It is noon."}, ASKED]
    assert [each["role"] for each in translated(messages=turns)["messages"]] == ["user", "system", "user"]
    first, *others = translated(True, messages=turns, system="Be brief.")["messages"]
    assert first == {"role": "system", "content": "Be brief.\nIt is noon."}
    assert [each["role"] for each in others] == ["user", "user"]


@pytest.mark.parametrize(
    ("template", "has_one"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", False),
        ("{{ messages[0].content }}{% for m in messages[1:] if m.role == 'user' %}{{ m.content }}{% endfor %}", True),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
            "{% endif %}{{ m.content }}{% endfor %}",
            True,
        ),
    ],
)
def test_a_probe_finds_out_whether_a_template_takes_later_system_messages(template, has_one):
    assert has_one_system(FakeEngine().get_tokenizer(), template) is has_one


def test_consecutive_turns_of_a_role_are_one_turn():
    turns = [ASKED, {"role": "user", "content": [text("In Ulm.")]}, {"role": "assistant", "content": "Warm."}, ASKED]
    first, second, third = translated(messages=turns)["messages"]
    assert [part["text"] for part in first["content"]] == ["How warm is it?", "In Ulm."]
    assert (second["role"], third["role"]) == ("assistant", "user")


@pytest.mark.parametrize(
    ("source", "url"),
    [(PNG, "data:image/png;base64,aGk="), ({"type": "url", "url": "https://a/b.png"}, "https://a/b.png")],
)
def test_an_image_is_a_part_with_its_url(source, url):
    turns = [{"role": "user", "content": [{"type": "image", "source": source} | EPHEMERAL, text("What is it?")]}]
    (message,) = translated(messages=turns)["messages"]
    assert message["content"] == [{"type": "image_url", "image_url": {"url": url}}, text("What is it?")]
    assert has_images(MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": turns}))


def test_documents_and_results_of_searches_are_texts():
    blocks = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Ulm."}, "title": "Towns"},
        {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}, "context": "Letters"},
        {"type": "search_result", "source": "https://a", "title": "Ulm", "content": [text("A town.")]},
    ]
    (message,) = translated(messages=[{"role": "user", "content": blocks}])["messages"]
    texts = [part["text"] for part in message["content"]]
    assert texts == ["Towns\nUlm.", "Letters\na\nb", "Ulm\nhttps://a\nA town."]


def called(call_id, city):
    return {"type": "tool_use", "id": call_id, "name": "get_weather", "input": {"city": city}}


def result(call_id, content, **fields):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def test_calls_and_their_results():
    thinking = {"type": "thinking", "thinking": "Two towns.", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    turns = [
        ASKED,
        {
            "role": "assistant",
            "content": [thinking, redacted, text("Let me see."), called("a", "Ulm"), called("b", "Bonn")],
        },
        {
            "role": "user",
            "content": [
                result("a", [text("21"), {"type": "image", "source": PNG}]),
                result("b", "No such town.", is_error=True),
                text("And now?") | EPHEMERAL,
            ],
        },
    ]
    _, assistant, first, second, user = translated(messages=turns, tools=[WEATHER])["messages"]
    assert assistant == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning": "Two towns.",
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
            for name, city in (("a", "Ulm"), ("b", "Bonn"))
        ],
    }
    assert first == {"role": "tool", "tool_call_id": "a", "content": "21"}
    assert second == {"role": "tool", "tool_call_id": "b", "content": "Error: No such town."}
    assert [part["type"] for part in user["content"]] == ["image_url", "text"]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": [], "is_error": True}, "Error: "),
        ({"content": "error: none", "is_error": True}, "error: none"),
        ({"content": "fine", "is_error": False}, "fine"),
        ({"content": [{"type": "tool_reference", "tool_name": "get_time"}]}, "get_time"),
    ],
)
def test_results_of_tools_in_other_forms(fields, content):
    turns = [ASKED, {"role": "assistant", "content": [called("a", "Ulm")]}]
    turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", **fields}]})
    assert translated(messages=turns)["messages"][2:] == [{"role": "tool", "tool_call_id": "a", "content": content}]


def test_an_answer_that_the_request_begins_is_continued():
    fields = translated(messages=[ASKED, {"role": "assistant", "content": "It is"}])
    assert (fields["continue_final_message"], fields["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in translated()


def test_a_tool_is_a_function_and_its_schema_is_that_of_an_object():
    (tool,) = translated(tools=[{**WEATHER, "type": "custom", "strict": True, "defer_loading": True, **EPHEMERAL}])[
        "tools"
    ]
    assert tool == {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Of a city.",
            "parameters": {"type": "object", "properties": {"city": {}}},
            "strict": True,
        },
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_the_choice_of_tools(choice, expected):
    fields = translated(tools=[WEATHER], tool_choice=choice)
    assert {name: fields[name] for name in expected} == expected


def test_sampling():
    fields = translated(
        temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["END"], metadata={"user_id": "u"}, service_tier="auto"
    )
    assert {name: fields[name] for name in ("temperature", "top_p", "top_k", "stop", "user")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop": ["END"],
        "user": "u",
    }
    nulls = dict.fromkeys(
        ("temperature", "top_p", "top_k", "stop_sequences", "metadata", "system", "tools", "thinking")
    )
    assert translated(**nulls, stream=None) == translated()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 1024},
        ),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}}, {"reasoning_effort": "xhigh"}),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "none"}),
    ],
)
def test_thinking_sets_what_chat_templates_read(fields, expected):
    found = translated(**fields, max_tokens=2000)
    assert {name: value for name, value in found.items() if name not in ("model", "messages")} == expected


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_a_format_constrains_the_text(place):
    format_ = {"type": "json_schema", "schema": {"type": "object"}}
    fields = translated(**{place: {"format": format_} if place == "output_config" else format_})
    assert fields["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_unknown_fields_of_beta_versions_are_ignored():
    turns = [{"role": "user", "content": [text("Hi") | EPHEMERAL | {"citations": None}], "x": 1}]
    beta = {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}, "betas": ["a"], "speed": "fast"}
    assert translated(messages=turns, **beta)["messages"][0]["content"] == [text("Hi")]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages", "messages.0.role='robot'"),
        ({"messages": [{"role": "user", "content": 4}]}, "messages", "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "content.0.text.text"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages", "'hologram'"),
        ({"messages": [{"role": "user", "content": [called("a", "Ulm")]}]}, "messages", "messages.0.content.0"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": [result("a", "b")]}]},
            "messages",
            "messages.1.content.0",
        ),
        ({"messages": [ASKED, {"role": "assistant", "content": [called("a", "Ulm")]}]}, "messages", "tool_result"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}
                ]
            },
            "messages",
            "'file'",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "web_search_20250305"),
        ({"tools": [{"name": "get_time"}]}, "tools", "tools.0.input_schema is missing"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice", "name"),
        ({"tool_choice": {"type": "all"}}, "tool_choice", "tool_choice.type='all'"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens", "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking", "budget_tokens=10 isn't at least 1024"),
        ({"thinking": {"type": "enabled"}}, "thinking", "budget_tokens=None"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None, "thinking.budget_tokens=1024"),
        ({"mcp_servers": [{"url": "https://a"}]}, None, "mcp_servers"),
        ({"container": "c"}, None, "container"),
        ({"system": [{"type": "image", "source": PNG}]}, "system", "system.0"),
        ({"stop_sequences": "END"}, "stop_sequences", "stop_sequences"),
        ({"stop_sequences": ["\ud800"]}, "stop_sequences", "surrogate"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config", "xml"),
        ({"temperature": float("inf")}, "temperature", "temperature"),
        ({"service_tier": "fast"}, "service_tier", "service_tier='fast'"),
    ],
)
def test_an_error_names_what_is_wrong(fields, param, words):
    found, message = refusal(**fields)
    assert found == param
    assert words in message
