"""Messages reach chat templates in one form, whoever renders them."""

from __future__ import annotations

import pytest
import tool_templates

from raycore.errors import InvalidRequest
from raycore.text.conversation import normalize_messages

RULE = {"role": "developer", "content": "Answer in French."}
ASKED = {"role": "user", "content": "Rain?"}


def call(arguments):
    return {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def assistant(**fields):
    return {"role": "assistant", **fields}


def rendered(tokenizer, messages, template, **variables):
    return tokenizer.apply_chat_template(messages, chat_template=template, **variables)


# the developer role


NAMES_IT = "{% for m in messages %}{% if m.role == 'developer' %}[dev]{{ m.content }}{% else %}.{% endif %}{% endfor %}"
KEEPS_IT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
REFUSES_IT = (
    "{% for m in messages %}{% if m.role not in ['system', 'user'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_a_developers_message_becomes_the_systems_where_the_template_drops_it(tokenizer):
    prompt = rendered(tokenizer, [RULE, ASKED], tool_templates.QWEN2_5)
    assert prompt == rendered(tokenizer, [{**RULE, "role": "system"}, ASKED], tool_templates.QWEN2_5)
    assert prompt.startswith("<|im_start|>system\nAnswer in French.<|im_end|>")
    later = rendered(tokenizer, [ASKED, RULE], tool_templates.QWEN2_5)
    assert "<|im_start|>system\nAnswer in French.<|im_end|>" in later


def test_a_developers_message_becomes_the_systems_where_the_template_refuses_the_role(tokenizer):
    assert rendered(tokenizer, [RULE, ASKED], REFUSES_IT) == "<system>Answer in French.<user>Rain?"


def test_a_developers_message_stays_where_the_template_names_and_renders_it(tokenizer):
    assert rendered(tokenizer, [RULE, ASKED], NAMES_IT) == "[dev]Answer in French.."
    assert rendered(tokenizer, [RULE, ASKED], KEEPS_IT) == "<system>Answer in French.<user>Rain?"


def test_a_template_that_names_the_developer_role_and_cannot_be_tried_is_used_as_it_is(tokenizer):
    needy = "{{ today + '' }}" + NAMES_IT
    assert rendered(tokenizer, [RULE, ASKED], needy, today="Monday") == "Monday[dev]Answer in French.."


def test_a_template_is_tried_with_the_tokenizers_special_tokens(tokenizer):
    assert rendered(tokenizer, [RULE], "{{ bos_token + '' }}" + NAMES_IT) == "<s>[dev]Answer in French."


def test_roles_other_than_developer_are_left_to_the_template(tokenizer):
    assert rendered(tokenizer, [{"role": "critic", "content": "Hm."}], KEEPS_IT) == "<critic>Hm."


# calls and their results


def test_arguments_given_as_text_become_an_object(tokenizer):
    for arguments in ('{"city": "Ulm"}', {"city": "Ulm"}):
        messages = [ASKED, assistant(content=None, tool_calls=[call(arguments)])]
        assert '"arguments": {"city": "Ulm"}}' in rendered(tokenizer, messages, tool_templates.HERMES)


@pytest.mark.parametrize(("text", "expected"), [("", {}), (" ", {}), ("[1]", "[1]"), ('{"a": ', '{"a": ')])
def test_arguments_that_are_no_object_stay_as_the_model_wrote_them(text, expected):
    (message,) = normalize_messages([assistant(tool_calls=[call(text)])])
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_a_tool_call_message_without_content_renders_no_content(tokenizer):
    for fields in ({}, {"content": None}):
        prompt = rendered(tokenizer, [ASKED, assistant(**fields, tool_calls=[call("{}")])], tool_templates.HERMES)
        assert "<|im_start|>assistant\n<tool_call>" in prompt


def test_fields_that_are_null_are_left_out():
    (message,) = normalize_messages([assistant(content="Yes.", tool_calls=None, name=None, refusal=None)])
    assert message == {"role": "assistant", "content": "Yes."}


def test_a_tool_result_gets_the_name_of_the_function_that_was_called():
    result = {"role": "tool", "tool_call_id": "call_1", "content": "no"}
    messages = normalize_messages([assistant(tool_calls=[call("{}")]), result, {**result, "name": "own"}])
    assert [message.get("name") for message in messages] == [None, "get_weather", "own"]


def test_reasoning_is_found_by_either_name():
    for fields in ({"reasoning": "So."}, {"reasoning_content": "So."}):
        (message,) = normalize_messages([assistant(content=None, **fields)])
        reasoning = {"reasoning": "So.", "reasoning_content": "So.", "thinking": "So."}
        assert message == {"role": "assistant", "content": "", **reasoning}


# refusals


def test_a_refusal_becomes_the_assistants_content_if_there_is_no_other():
    for fields in ({}, {"content": None}, {"content": ""}):
        (message,) = normalize_messages([assistant(refusal="I can't.", **fields)])
        assert message == {"role": "assistant", "content": "I can't."}
    (message,) = normalize_messages([assistant(refusal="I can't.", content="No.")])
    assert message["content"] == "No."


def test_parts_of_an_assistants_message_may_refuse():
    refusal = {"type": "refusal", "refusal": "I can't."}
    text = {"type": "text", "text": "Well."}
    assert normalize_messages([assistant(content=[refusal])])[0]["content"] == "I can't."
    assert normalize_messages([assistant(content=[text, refusal])])[0]["content"] == "Well.\nI can't."
    with pytest.raises(InvalidRequest, match=r"messages\[0\] has a content part .*refusal"):
        normalize_messages([{"role": "user", "content": [refusal]}])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (assistant(refusal=3), r"messages\[0\]\.refusal is 3: it must be a string"),
        (assistant(content="x", reasoning=["So."]), r"messages\[0\]\.reasoning is \['So\.'\]: it must be a string"),
        (assistant(refusal=None), r"messages\[0\] \(role 'assistant'\) has no 'content'"),
        (assistant(tool_calls=[]), r"messages\[0\] \(role 'assistant'\) has no 'content'"),
        (assistant(tool_calls="f()"), r"messages\[0\]\.tool_calls is 'f\(\)': it must be a list"),
        (assistant(tool_calls=["f()"]), r"messages\[0\]\.tool_calls\[0\] has no function with a name"),
        (assistant(tool_calls=[{"function": {}}]), r"messages\[0\]\.tool_calls\[0\] has no function with a name"),
        ({"role": "user", "content": [{"type": "refusal", "text": "x"}]}, r"messages\[0\] has a content part"),
    ],
)
def test_messages_of_the_wrong_shape_are_named(message, says):
    with pytest.raises(InvalidRequest, match=says):
        normalize_messages([message])


def test_messages_are_not_changed_in_place():
    message = assistant(content=None, tool_calls=[call('{"city": "Ulm"}')])
    normalize_messages([message])
    assert message == assistant(content=None, tool_calls=[call('{"city": "Ulm"}')])
