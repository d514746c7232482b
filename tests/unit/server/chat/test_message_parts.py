"""The parts of which a chat's answer consists, whole and as they arrive. The engine writes given texts."""

from __future__ import annotations

import asyncio

import pytest
import tool_templates
from fake_engine import FakeEngine

from raycore.server import ServerOptions
from raycore.server.chat.message import MessageRun
from raycore.server.chat.parts import CallBegin, ReasoningText
from raycore.server.contract.models import Models, RequestModel
from raycore.server.contract.service import Context, Service
from raycore.server.http.errors import APIError, with_names
from raycore.server.parsers.tool_calls import Content
from raycore.server.protocol import ChatCompletionRequest

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Ulm"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
PARTS = [
    ("reasoning", "So."),
    ("content", "I ask."),
    ("call", 0),
    ("arguments 0", '{"city": "Ulm"}'),
    ("content", "And again."),
    ("call", 1),
    ("arguments 1", '{"city": "Ulm"}'),
]


def prepared(text, **body):
    options = ServerOptions(("fake",), chat_template=tool_templates.HERMES, reasoning_parser="qwen3")
    given = {"messages": [{"role": "user", "content": "When?"}], "max_tokens": 1000, "tools": TOOLS, **body}
    request = ChatCompletionRequest.model_validate(given)
    context = Context(Service(FakeEngine(text, max_model_len=4000), options, Models(["fake"])))
    return MessageRun.prepare(context, request, RequestModel("fake"), "chat-1")


def joined(parts):
    """The parts, as (kind, text) with one entry for each run of a kind."""
    runs = []
    for part in parts:
        if isinstance(part, CallBegin):
            assert part.name == "get_time"
            runs.append(("call", part.index))
            continue
        kind = {ReasoningText: "reasoning", Content: "content"}.get(type(part)) or f"arguments {part.index}"
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + part.text)
        else:
            runs.append((kind, part.text))
    return runs


async def streamed(run):
    reader = run.reader()
    return [delta async for output in run.stream() for delta in reader.read(output)]


def test_parts_come_in_the_order_in_which_the_model_writes_them():
    run = prepared(f"<think>So.</think>I ask.{CALL}And again.{CALL}")
    (whole,) = asyncio.run(run.whole())
    assert (joined(whole.parts), whole.finish_reason) == (PARTS, "tool_calls")
    deltas = asyncio.run(streamed(run))
    assert joined([part for each in deltas for part in each.parts]) == PARTS
    assert [each.finish_reason for each in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "tool_calls"
    assert [token for each in deltas for token in each.token_ids] == whole.token_ids
    assert len(deltas) > len(PARTS)


def test_calls_after_the_first_are_left_out_if_calls_are_not_parallel():
    run = prepared(f"{CALL}And again.{CALL}", parallel_tool_calls=False)
    (whole,) = asyncio.run(run.whole())
    assert joined(whole.parts) == [*PARTS[2:5]]


def test_totals_count_the_tokens_of_all_choices():
    run = prepared("<think>So.</think>Yes.", n=2)
    choices = asyncio.run(run.whole())
    totals = run.counter().totals(choices[0].output)
    assert [each.index for each in choices] == [0, 1]
    assert totals.prompt == len(choices[0].output.prompt_token_ids)
    assert totals.output == sum(len(each.token_ids) for each in choices)
    counter = run.counter()
    for delta in asyncio.run(streamed(run)):
        last = counter.totals(delta.output)
    assert last == totals
    assert 0 < totals.reasoning < totals.output


@pytest.mark.parametrize(
    ("message", "param", "told"),
    [
        ("max_completion_tokens=0 isn't at least 1", "max_completion_tokens", ("max_output_tokens=0 isn't at least 1")),
        ("temperature=3 is too high", "temperature", "temperature=3 is too high"),
        ("it failed", None, "it failed"),
    ],
)
def test_an_error_names_the_field_of_the_client(message, param, told):
    error = with_names(APIError(400, message, param=param, code="c"), {"max_completion_tokens": "max_output_tokens"})
    assert error.message == told
    assert (error.status, error.code) == (400, "c")
    assert error.param == {"max_completion_tokens": "max_output_tokens"}.get(param, param)
