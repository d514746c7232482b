"""What `thinking_token_budget` becomes, by endpoint and by what the prompt says of reasoning."""

from __future__ import annotations

import pytest
import tool_templates
from asgi_client import Client
from fake_engine import FakeEngine

from raycore.reasoning_tags import TAGS, ReasoningTags
from raycore.server import ServerOptions, build_app

ASKED = {"messages": [{"role": "user", "content": "How many?"}], "max_tokens": 5}
THINK = TAGS["qwen3"]


def asked_of(parser, path="/v1/chat/completions", **fields):
    """The status of the answer, and the parameters that the engine got."""
    engine = FakeEngine()
    options = ServerOptions(("fake",), chat_template=tool_templates.HERMES, reasoning_parser=parser)
    answer = Client(build_app(engine, options)).post(path, fields)
    return answer, engine.params[-1] if engine.params else None


@pytest.mark.parametrize(
    ("fields", "is_open"),
    [({}, True), ({"chat_template_kwargs": {"enable_thinking": False}}, False), ({"reasoning_effort": "none"}, False)],
)
def test_a_chat_says_whether_the_output_begins_with_reasoning(fields, is_open):
    _, params = asked_of("qwen3", thinking_token_budget=7, **ASKED, **fields)
    assert params.thinking_token_budget == 7
    assert params.reasoning_tags == ReasoningTags(THINK.opening, THINK.closing, is_open=is_open)


def test_harmony_is_ended_with_the_header_of_the_answer():
    _, params = asked_of("openai_gptoss", thinking_token_budget=0, **ASKED)
    assert params.reasoning_tags.forced == "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_a_completion_leaves_it_to_the_prompt():
    _, params = asked_of("qwen3", "/v1/completions", thinking_token_budget=7, prompt="1", max_tokens=5)
    assert params.reasoning_tags == THINK


@pytest.mark.parametrize("budget", [None, -1])
def test_no_budget_means_no_limit(budget):
    answer, params = asked_of(None, thinking_token_budget=budget, **ASKED)
    assert (answer.status, params.thinking_token_budget, params.reasoning_tags) == (200, None, None)


def test_an_invalid_budget_is_refused_by_name():
    answer, _ = asked_of("qwen3", thinking_token_budget=-2, **ASKED)
    assert (answer.status, answer.json["error"]["param"]) == (400, "thinking_token_budget")
