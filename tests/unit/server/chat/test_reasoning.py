"""Reasoning in chat, by what clients send and get. The engine writes given texts, a few characters a token."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tool_templates
from asgi_client import Client
from fake_engine import END_OF_TEXT, VOCAB_SIZE, FakeEngine

from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig, InvalidRequest
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.server import ServerOptions, build_app
from raycore.text.tokenizer import Tokenizer

ASKED = [{"role": "user", "content": "How many?"}]
BOTH = ("deepseek_r1", "qwen3")
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Ulm"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
STRICT = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}, "strict": True}}]
THINKING_CODER = tool_templates.QWEN3_CODER + "{% if add_generation_prompt %}<think>\n{% endif %}"
JSON = {"response_format": {"type": "json_object"}}


class Reasoner:
    """A server whose model writes `text`, whatever it is asked."""

    def __init__(self, text, template=tool_templates.THINKING, parser="qwen3", **options):
        self.engine = FakeEngine(text, max_model_len=4000)
        self._client = Client(
            build_app(self.engine, ServerOptions(("fake",), chat_template=template, reasoning_parser=parser, **options))
        )

    def answer(self, **body):
        answer = self._client.chat(**{"max_tokens": 1000, "messages": ASKED, **body})
        assert answer.status == 200, answer.body
        return answer

    def message(self, **body):
        """(reasoning, content, finish reason), the same whole and streamed."""
        (choice,) = self.answer(**body).json["choices"]
        message = choice["message"]
        events = self.answer(stream=True, **body).events
        assert joined(events, "reasoning") == (message.get("reasoning") or "")
        assert joined(events, "content") == (message["content"] or "")
        assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
        return message.get("reasoning"), message["content"], choice["finish_reason"]

    def prompt(self, **body):
        ids = self.answer(return_token_ids=True, **body).json["prompt_token_ids"]
        return self.engine.get_tokenizer().decode(ids, skip_special_tokens=False)

    def constraint(self, **body):
        """(end of the reasoning, call that ends it too) of what the last request asked of the engine."""
        self.answer(**body)
        asked = self.engine.params[-1].structured_outputs
        return asked.after, asked.or_from


def joined(events, part, index=0):
    return "".join(
        choice["delta"].get(part) or "" for event in events for choice in event["choices"] if choice["index"] == index
    )


def use_tokens(reasoner, folder, texts, special):
    """Give the model's tokenizer, which is written to the folder, tokens for these texts."""
    demo = Path(demo_model_path())
    shutil.copy(demo / "tokenizer_config.json", folder)
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    tokenizer["added_tokens"] += [{"id": VOCAB_SIZE + i, "content": text, **flags} for i, text in enumerate(texts)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    reasoner.engine.tokenizer = Tokenizer.from_dir(folder)
    reasoner.engine.check = lambda *_: None  # it doesn't know so many


# reasoning and content


@pytest.mark.parametrize("parser", BOTH)
@pytest.mark.parametrize("template", [tool_templates.THINKING, tool_templates.QWEN3], ids=["open", "not open"])
def test_reasoning_is_separated_from_the_content(parser, template):
    reasoner = Reasoner("Seven < 8,\nso.</think>\n\nSeven.", template, parser)
    assert reasoner.message() == ("Seven < 8,\nso.", "\n\nSeven.", "stop")
    reasoner = Reasoner("<think>\nSo.\n</think>\n\nSeven.", template, parser)
    assert reasoner.message() == ("\nSo.\n", "\n\nSeven.", "stop")


@pytest.mark.parametrize("parser", BOTH)
def test_reasoning_without_an_end_is_the_whole_message(parser):
    assert Reasoner("Let me see", parser=parser).message() == ("Let me see", None, "stop")
    assert Reasoner("Let me see</thi", parser=parser).message() == ("Let me see</thi", None, "stop")
    reasoning, content, reason = Reasoner("Let me see, and so on", parser=parser).message(max_tokens=4)
    assert "Let me see, and so on".startswith(reasoning)
    assert (content, reason) == (None, "length")


def test_a_prompt_that_closes_the_reasoning_leaves_content_only():
    reasoner = Reasoner("Seven, </think>.", tool_templates.QWEN3)
    assert reasoner.message(chat_template_kwargs={"enable_thinking": False}) == (None, "Seven, </think>.", "stop")
    assert reasoner.message(reasoning_effort="none") == (None, "Seven, </think>.", "stop")
    assert reasoner.message(reasoning_effort="low")[0] == "Seven, "
    closed = Reasoner("Seven.", tool_templates.THINKING.replace("<think>\n", "<think></think>"), "deepseek_r1")
    assert closed.message() == (None, "Seven.", "stop")


def test_reasoning_is_turned_off_even_if_the_template_has_none():
    kwargs = {"enable_thinking": False}
    assert Reasoner("Seven.", tool_templates.HERMES).message(chat_template_kwargs=kwargs)[:2] == (None, "Seven.")
    always = Reasoner("Seven.", tool_templates.HERMES, "deepseek_r1")
    assert always.message(chat_template_kwargs=kwargs)[:2] == ("Seven.", None)


def test_the_content_is_the_whole_output_without_a_reasoning_parser():
    message = Reasoner("So.</think>Seven.", parser=None).answer().json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "So.</think>Seven.", "refusal": None}
    assert Reasoner("<think>So.</think>Seven.", parser=None).message() == (None, "<think>So.</think>Seven.", "stop")


def test_a_client_may_leave_out_the_reasoning():
    reasoner = Reasoner("So.</think>Seven.")
    assert reasoner.message(include_reasoning=False) == (None, "Seven.", "stop")
    assert "reasoning" not in reasoner.answer(include_reasoning=False).json["choices"][0]["message"]
    assert reasoner.message(include_reasoning=True) == ("So.", "Seven.", "stop")


def test_each_of_n_choices_has_its_own_reasoning():
    reasoner = Reasoner("So.</think>Seven.")
    body = {"n": 3, "temperature": 1.0}
    for choice in reasoner.answer(**body).json["choices"]:
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("So.", "Seven.")
    events = reasoner.answer(stream=True, **body).events
    for index in range(3):
        assert (joined(events, "reasoning", index), joined(events, "content", index)) == ("So.", "Seven.")


@pytest.mark.parametrize("parser", BOTH)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_searched_for_in_the_content(parser, include):
    reasoner = Reasoner("One,\n\nTwo.</think>\n\nTwo, three.\n\nFour", parser=parser)
    for stop, end in ((["\n\n"], "\n\n"), ("three", "three"), (["Question:", "\n\n", "One"], "\n\n"), (">\n\nTwo", "")):
        found = reasoner.message(stop=stop, include_stop_str_in_output=include)
        content = "\n\nTwo, three.\n\nFour"
        if end:
            position = content.index(end, 2)
            content = content[: position + (len(end) if include else 0)]
        assert found == ("One,\n\nTwo.", content, "stop")
        for choice in reasoner.answer(stop=stop, n=2, temperature=1).json["choices"]:
            assert choice["stop_reason"] == (end or None)


@pytest.mark.parametrize("content", ["{}seven", "\n{}seven", " \n\n{}seven", "\n\nOf{}seven"])
@pytest.mark.parametrize("stop", ["\n\n", "\nQ:", "Q", "\n\nQ"])
def test_only_a_stop_string_of_white_space_may_follow_the_reasoning(content, stop):
    content = content.format("\n\nQ: ")
    reasoner = Reasoner(f"Hm, Q: {stop}</think>{content}")
    begin = 0 if stop.strip() else len(content) - len(content.lstrip())
    position = content.find(stop, begin)
    expected = content if position < 0 else content[:position] or None
    assert reasoner.message(stop=stop) == (f"Hm, Q: {stop}", expected, "stop")


def test_stop_strings_are_not_searched_in_reasoning_that_does_not_end():
    assert Reasoner("One, two").message(stop="two") == ("One, two", None, "stop")
    assert Reasoner("One, two", parser=None).message(stop="two") == (None, "One, ", "stop")


def test_stop_strings_are_searched_for_from_the_beginning_without_reasoning():
    for kwargs in ({"enable_thinking": False}, {}):
        reasoner = Reasoner("One, </think> two.", tool_templates.QWEN3)
        expected = (None, "One, ", "stop") if kwargs else ("One, ", " two.", "stop")
        assert reasoner.message(stop=["</think>", "<"], chat_template_kwargs=kwargs) == expected


def test_a_call_that_ends_the_reasoning_may_begin_with_a_stop_string():
    asked = {"tools": TOOLS, "stop": ["<tool", "Hm"]}
    assert Reasoner(f"Hm. {CALL}").message(**asked) == ("Hm. ", None, "stop")
    (choice,) = Reasoner(f"Hm. {CALL} Hm").answer(**asked | {"stop": "Hm"}).json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "Hm")


def test_the_sampling_parameters_have_the_tag_that_closes_the_reasoning():
    reasoner = Reasoner("One, two.</think>Two.")
    (choice,) = reasoner.answer(stop="Two", max_tokens=3).json["choices"]
    assert choice["finish_reason"] == "length"
    assert reasoner.engine.params[-1].stop_after == "</think>"


@pytest.mark.parametrize("special", [True, False])
def test_reasoning_tags_may_be_special_tokens(tmp_path, special):
    reasoner = Reasoner("<think>So.</think>Seven.", tool_templates.QWEN3)
    use_tokens(reasoner, tmp_path, ["<think>", "</think>"], special)
    assert reasoner.message() == ("So.", "Seven.", "stop")
    assert reasoner.engine.params[-1].skip_special_tokens is not special


def test_logprobs_and_token_ids_include_the_reasoning_tokens():
    reasoner = Reasoner("So.</think>Seven.")
    body = {"logprobs": True, "return_token_ids": True}
    (whole,) = reasoner.answer(**body).json["choices"]
    choices = [choice for event in reasoner.answer(stream=True, **body).events for choice in event["choices"]]
    assert [i for choice in choices for i in choice.get("token_ids", [])] == whole["token_ids"]
    logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert logprobs == whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in logprobs).startswith("So.</think>Seven.")


# usage


def test_usage_counts_the_reasoning_tokens():
    for text, reasoning in (
        ("So.</think>Seven.", "So.</think>"),
        ("Héé, so it goes on</think", "Héé, so it goes on</think<|im_end|>"),
        (f"Hm. {CALL}", "Hm. "),
    ):
        reasoner = Reasoner(text)
        expected = {"reasoning_tokens": len(reasoner.engine.get_tokenizer().encode(reasoning))}
        body = {"tools": TOOLS}
        assert reasoner.answer(**body).json["usage"]["completion_tokens_details"] == expected
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = reasoner.answer(stream=True, stream_options=options, **body).events
        counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[0] < 2
        assert counts[-1] == expected["reasoning_tokens"]
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    used = Reasoner("Seven.", tool_templates.QWEN3).answer(**body).json["usage"]
    assert used["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert "completion_tokens_details" not in Reasoner("Seven.", parser=None).answer().json["usage"]


# messages that go on, and histories


@pytest.mark.parametrize("parser", BOTH)
def test_a_continued_message_is_reasoning_or_content_as_it_began(parser):
    def go_on(begun):
        messages = [*ASKED, {"role": "assistant", "content": begun}]
        body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
        return Reasoner(" so.</think>Seven.", tool_templates.QWEN3, parser).message(**body)[:2]

    assert go_on("It is") == (None, " so.</think>Seven.")
    assert go_on("<think>It is") == (" so.", "Seven.")
    assert go_on("<think>It is.</think>Then") == (None, " so.</think>Seven.")
    assert go_on([{"type": "text", "text": "<think>It is"}]) == (" so.", "Seven.")
    assert go_on("") == (" so.", "Seven.")


def test_an_echoed_message_begins_the_content():
    messages = [*ASKED, {"role": "assistant", "content": "<think>It is"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True, "echo": True}
    assert Reasoner(" so.</think>Seven.", tool_templates.QWEN3).message(**body)[:2] == (" so.", "<think>It isSeven.")


@pytest.mark.parametrize("parser", [None, "qwen3"])
@pytest.mark.parametrize(
    "reasoning",
    [
        {"reasoning": "So."},
        {"reasoning_content": "So."},
        {"reasoning": "So.", "reasoning_content": "Another."},
        {"reasoning": None, "reasoning_content": "So."},
    ],
)
def test_reasoning_in_the_history_reaches_the_template_by_either_name(parser, reasoning):
    seen = (
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning }}|{{ m.reasoning_content }}|{{ m.content }}\n{% endfor %}"
    )
    messages = [*ASKED, {"role": "assistant", "content": "Seven.", **reasoning}, *ASKED]
    assert Reasoner("", seen, parser).prompt(messages=messages).splitlines()[1] == "assistant:So.|So.|Seven."
    messages[1]["content"] = None
    assert Reasoner("", seen, parser).prompt(messages=messages).splitlines()[1] == "assistant:So.|So.|"
    assert "<think>\nSo.\n</think>" in Reasoner("", tool_templates.QWEN3, parser).prompt(messages=messages)


def test_reasoning_that_is_no_text_is_refused():
    messages = [*ASKED, {"role": "assistant", "content": "Seven.", "reasoning": ["So."]}]
    assert Reasoner("")._client.chat(messages=messages).error == (400, "invalid_request_error", "messages")


def test_an_answers_message_can_be_sent_back():
    message = Reasoner("So it goes").answer().json["choices"][0]["message"]
    prompt = Reasoner("", tool_templates.QWEN3).prompt(messages=[*ASKED, message, *ASKED])
    assert "<|im_start|>assistant\n<think>\nSo it goes\n</think>\n\n<|im_end|>" in prompt


# tools


def call_of(answer):
    (choice,) = answer.json["choices"]
    (call,) = choice["message"]["tool_calls"]
    return choice["message"]["reasoning"], choice["message"]["content"], choice["finish_reason"], call["function"]


@pytest.mark.parametrize("parser", BOTH)
def test_reasoning_is_separated_before_calls_are_searched_for(parser):
    text = f"Is it <tool_call that I need?</think>\n\n{CALL}"
    reasoner = Reasoner(text, parser=parser)
    function = {"name": "get_time", "arguments": '{"city": "Ulm"}'}
    assert call_of(reasoner.answer(tools=TOOLS)) == ("Is it <tool_call that I need?", None, "tool_calls", function)
    events = reasoner.answer(tools=TOOLS, stream=True).events
    assert joined(events, "reasoning") == "Is it <tool_call that I need?"
    assert joined(events, "content") == ""
    calls = [call for event in events for c in event["choices"] for call in c["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "get_time"
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Ulm"}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_qwen_may_call_without_closing_its_reasoning():
    function = {"name": "get_time", "arguments": '{"city": "Ulm"}'}
    text = f"I need it. {CALL}"
    assert call_of(Reasoner(text).answer(tools=TOOLS)) == ("I need it. ", None, "tool_calls", function)
    assert Reasoner(text).message() == (text, None, "stop"), "there are no tools"
    assert Reasoner(text, parser="deepseek_r1").message(tools=TOOLS) == (text, None, "stop")


def test_reasoning_alone_calls_nothing():
    message = Reasoner("No need.</think>Seven.").answer(tools=TOOLS).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Seven.", "refusal": None, "reasoning": "No need."}
    assert Reasoner("No need.").message(tools=TOOLS) == ("No need.", None, "stop")


NAMED = {"type": "function", "function": {"name": "get_time"}}
OTHER = {"type": "function", "function": {"name": "get_rain", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("parser", BOTH)
@pytest.mark.parametrize("tools", [TOOLS, [*TOOLS, OTHER]])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_reasoning_comes_before_a_required_call(parser, tools, choice):
    body = {"tools": tools, "tool_choice": choice}
    reasoner = Reasoner(f"Which?</think>\n\n{CALL}", parser=parser)
    function = {"name": "get_time", "arguments": '{"city": "Ulm"}'}
    assert call_of(reasoner.answer(**body)) == ("Which?", None, "tool_calls", function)
    events = reasoner.answer(stream=True, **body).events
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    called = next(i for i, delta in enumerate(deltas) if "tool_calls" in delta)
    assert "".join(delta.get("reasoning", "") for delta in deltas[:called]) == "Which?"
    assert reasoner.prompt(**body).endswith("<think>\n")
    assert reasoner.constraint(**body) == ("</think>", "<tool_call>" if parser == "qwen3" else None)
    (may_begin, may_not) = ("\n\n<tool_call>\n{", "Well, <tool_call>\n{")
    asked = reasoner.engine.params[-1].structured_outputs
    assert follows(asked, f"Which?</think>{may_begin}")
    assert not follows(asked, f"Which?</think>{may_not}")
    assert follows(asked, f"Which?</think>{CALL}<|im_end|>")
    assert not follows(asked, f"Which?</think>{CALL.replace('get_time', 'get_snow')}")
    assert follows(asked, f"Which?</think>{CALL.replace('get_time', 'get_rain')}") is (
        choice == "required" and len(tools) == 2
    )


@functools.lru_cache(maxsize=2)
def held_to(folder):
    return Tokenizer.from_dir(folder), GrammarCompiler(folder, VOCAB_SIZE + 10, [END_OF_TEXT, 3])


def follows(asked, text, tokenizer_dir=None):
    """Whether a model that is held to this could write the text."""
    tokenizer, compiler = held_to(str(tokenizer_dir or demo_model_path()))
    matcher = compiler.matcher(asked)
    ids = tokenizer.encode(text, add_special_tokens=False)
    try:
        matcher.allowed_after(np.array(ids, np.int32))
    except InvalidRequest:
        return False
    return True


def test_reasoning_may_take_all_tokens_before_a_required_call():
    assert Reasoner("Which?").message(tools=TOOLS, tool_choice="required") == ("Which?", None, "stop")
    answer = Reasoner("Which?</think>None.")._client.chat(messages=ASKED, tools=TOOLS, tool_choice="required")
    assert answer.json["error"]["code"] == "tool_not_called"


@pytest.mark.parametrize("parser", BOTH)
def test_a_required_call_may_be_cut_off_after_the_reasoning(parser):
    text = 'Which?</think>\n\n<tool_call>\n{"name": "get'
    reasoner = Reasoner(text + '_time", "arguments": {}}', parser=parser)
    for num_missing in range(len('\n\n<tool_call>\n{"name": "get')):
        num_tokens = len(reasoner.engine.get_tokenizer().encode(text[: len(text) - num_missing]))
        body = {"tools": [*TOOLS, OTHER], "tool_choice": "required", "max_tokens": num_tokens}
        assert reasoner.message(**body) == ("Which?", None, "length")


UNSAYABLE = [{"type": "function", "function": {"name": "get_time", "parameters": {"properties": {"a<b": {}}}}}]


@pytest.mark.parametrize(
    ("parser", "template", "tools"),
    [
        (None, tool_templates.THINKING, TOOLS),
        ("qwen3", THINKING_CODER, UNSAYABLE),
        ("deepseek_r1", THINKING_CODER, UNSAYABLE),
    ],
)
def test_no_reasoning_comes_before_a_call_that_only_the_prompt_can_enforce(parser, template, tools):
    reasoner = Reasoner('{"city": "Ulm"}}' if parser is None else "</function>", template, parser)
    body = {"tools": tools, "tool_choice": "required"}
    (choice,) = reasoner.answer(**body).json["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_time"
    assert choice["message"].get("reasoning") is None
    assert "<think>\n\n</think>\n\n<tool_call>" in reasoner.prompt(**body)
    asked = reasoner.engine.params[-1].structured_outputs
    assert asked is None or asked.after is None


def test_the_prompt_begins_the_call_without_reasoning():
    body = {"tools": TOOLS, "tool_choice": "required", "chat_template_kwargs": {"enable_thinking": False}}
    reasoner = Reasoner('{"city": "Ulm"}}', tool_templates.QWEN3)
    assert call_of(reasoner.answer(**body))[0] is None


# constraints


@pytest.mark.parametrize("parser", BOTH)
def test_a_constraint_applies_to_the_content_after_the_reasoning(parser):
    for template in (tool_templates.THINKING, tool_templates.QWEN3):
        reasoner = Reasoner("So.</think>{}", template, parser)
        assert reasoner.message(**JSON) == ("So.", "{}", "stop")
        assert reasoner.constraint(**JSON) == ("</think>", None)
        assert reasoner.constraint(structured_outputs={"regex": ".*"}) == ("</think>", None)
        assert reasoner.prompt(**JSON) == reasoner.prompt()


def test_a_constraint_holds_from_the_beginning_without_reasoning():
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert Reasoner("{}", tool_templates.QWEN3).constraint(**JSON, **off) == (None, None)
    without = Reasoner("{}", parser=None)
    assert without.constraint(**JSON) == (None, None)
    assert without.prompt(**JSON).endswith("<think>\n\n</think>\n\n")


def test_a_constraint_on_calls_begins_with_one_that_ends_the_reasoning():
    body = {"tools": STRICT}
    assert Reasoner(CALL).constraint(**body) == ("</think>", "<tool_call>")
    assert Reasoner(CALL, parser="deepseek_r1").constraint(**body) == ("</think>", None)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_in_tags_follow_reasoning(choice):
    call = "<tool_call>\n<function=get_time>\n<parameter=city>\nUlm\n</parameter>\n</function>\n</tool_call>"
    reasoner = Reasoner(f"Which?</think>\n\n{call}", THINKING_CODER)
    body = {"tools": [*TOOLS, OTHER], "tool_choice": choice}
    assert call_of(reasoner.answer(**body))[0] == "Which?"
    asked = reasoner.engine.params[-1].structured_outputs
    assert follows(asked, f"Which?</think>\n\n{call}<|im_end|>")
    assert follows(asked, f"Which? {call.replace('get_time', 'get_rain')}") is (choice == "required")
    assert not follows(asked, f"Which?</think>{call.replace('get_time', 'get_snow')}")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("body", [{"tool_choice": "required"}, {"tool_choice": NAMED}, JSON])
def test_calls_whose_tags_are_tokens_follow_reasoning(tmp_path, special, body):
    reasoner = Reasoner(f"Which?</think>{CALL}")
    use_tokens(reasoner, tmp_path, ["<tool_call>", "</tool_call>", "</think>"], special)
    answer = reasoner.answer(tools=TOOLS, **body)
    assert call_of(answer)[0] == "Which?"
    asked = reasoner.engine.params[-1].structured_outputs
    assert (asked.after, asked.or_from) == ("</think>", "<tool_call>")
    assert follows(asked, f"Which?</think>{CALL}<|im_end|>", tmp_path)
    assert follows(asked, f"Which? {CALL}<|im_end|>", tmp_path)
    assert follows(asked, "Which?</think>{}<|im_end|>", tmp_path) is (body is JSON)
    assert not follows(asked, f"Which? {CALL.replace('get_time', 'get_snow')}", tmp_path)
    assert not follows(asked, "Which?</think>Well", tmp_path)


def test_clients_cannot_set_the_tag_after_which_a_constraint_begins():
    answer = Reasoner("")._client.chat(messages=ASKED, structured_outputs={"regex": "a", "after": "b"})
    assert answer.status == 200
    assert answer.headers["x-raycore-ignored-fields"] == "structured_outputs.after"
    answer = Reasoner("")._client.chat(messages=ASKED, stop_after="b")
    assert answer.headers["x-raycore-ignored-fields"] == "stop_after"


def test_an_unknown_parser_is_refused_with_the_known_ones():
    with pytest.raises(InvalidConfig, match="reasoning_parser='granite' is not supported: use 'deepseek_r1', 'qwen3'"):
        ServerOptions(("fake",), reasoning_parser="granite")
