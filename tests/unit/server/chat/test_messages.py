"""The messages of a conversation, from a request to the prompt."""

from __future__ import annotations

import pytest
import tool_templates
from asgi_client import Client
from fake_engine import FakeEngine

from raycore.server import ServerOptions, build_app

ASKED = {"role": "user", "content": "Rain?"}
RULE = {"role": "developer", "content": "Answer in French."}
ARGUMENTS = '{"city": "Ulm"}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "no"}
REFUSED = "I can't help with that."


@pytest.fixture
def engine():
    return FakeEngine(max_model_len=4000)


def post(engine, template, messages, **body):
    client = Client(build_app(engine, ServerOptions(("fake",), chat_template=template)))
    return client.chat(messages=messages, return_token_ids=True, **body)


def prompt(engine, template, messages, **body):
    answer = post(engine, template, messages, **body)
    assert answer.status == 200, answer.body
    return engine.get_tokenizer().decode(answer.json["prompt_token_ids"], skip_special_tokens=False)


@pytest.mark.parametrize("template", [tool_templates.HERMES, tool_templates.QWEN2_5])
@pytest.mark.parametrize(
    "messages",
    [
        [RULE, ASKED],
        [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
        [ASKED, {"role": "assistant", "tool_calls": [CALL]}, RESULT],
        [ASKED, {"role": "assistant", "content": None, "refusal": REFUSED}, ASKED],
        [ASKED, {"role": "assistant", "content": "", "reasoning": "So."}, ASKED],
        [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    ],
    ids=["developer", "null content", "no content", "refusal", "reasoning", "parts"],
)
def test_a_prompt_is_the_same_over_http_and_in_python(engine, template, messages):
    # `LLM.chat` is this and nothing else
    expected = engine.get_tokenizer().apply_chat_template(messages, chat_template=template)
    assert prompt(engine, template, messages) == expected


def test_a_developer_message_reaches_every_template(engine):
    assert prompt(engine, tool_templates.QWEN2_5, [RULE, ASKED]).startswith("<|im_start|>system\nAnswer in French.")
    assert "<|im_start|>system\nAnswer in French." in prompt(engine, tool_templates.HERMES, [RULE, ASKED])


@pytest.mark.parametrize(
    "fields",
    [
        {"refusal": REFUSED},
        {"refusal": REFUSED, "content": None},
        {"refusal": REFUSED, "content": ""},
        {"content": [{"type": "refusal", "refusal": REFUSED}]},
    ],
)
def test_a_refusal_in_the_history_is_rendered_as_the_assistants_content(engine, fields):
    text = prompt(engine, tool_templates.HERMES, [ASKED, {"role": "assistant", **fields}, ASKED])
    assert f"<|im_start|>assistant\n{REFUSED}<|im_end|>" in text


def test_a_refusal_that_is_null_or_beside_content_is_not_rendered(engine):
    for refusal in (None, REFUSED):
        message = {"role": "assistant", "content": "No.", "refusal": refusal}
        text = prompt(engine, tool_templates.HERMES, [ASKED, message, ASKED])
        assert "<|im_start|>assistant\nNo.<|im_end|>" in text
        assert REFUSED not in text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "refusal": 3},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "user", "content": [{"type": "refusal", "refusal": REFUSED}]},
    ],
)
def test_messages_of_the_wrong_shape_are_refused(engine, message):
    answer = post(engine, tool_templates.HERMES, [message])
    assert answer.error == (400, "invalid_request_error", "messages")


def test_content_parts_are_echoed_as_their_text(engine):
    parts = [{"type": "text", "text": "The"}, {"type": "text", "text": "answer:"}]
    body = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    answer = post(engine, tool_templates.HERMES, [ASKED, {"role": "assistant", "content": parts}], **body)
    assert answer.json["choices"][0]["message"]["content"].startswith("The\nanswer:")
