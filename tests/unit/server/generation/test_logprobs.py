"""What `logprobs` says about tokens: their places in the text, their names, their values."""

from __future__ import annotations

import asyncio
import math

import pytest
from asgi_client import Client
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from raycore.outputs import Logprob
from raycore.server import ServerOptions, build_app, load_adapters
from raycore.server.generation.logprobs import CompletionLogprobs, TokenNames, chat_logprobs
from raycore.server.generation.positions import Piece

PROMPTS = ["say the", " the  quick", "naïve café, 你好 🎉", "the</s> fox"]
OUTPUT = "the quick あ🎉 brown\n fox"


def client_of(engine, **options):
    chosen = ServerOptions(("fake",), **options)
    return Client(build_app(engine, chosen, asyncio.run(load_adapters(engine, chosen))))


class Completions:
    """Completions with `logprobs`, of outputs that a test chooses."""

    def __init__(self, tokenizer):
        self.engine = FakeEngine(tokenizer=tokenizer)
        self.client = client_of(self.engine)

    def of(self, ids, is_stream, **fields):
        """The text, `logprobs` and token ids of the completion with the output `ids`. A stream's parts are joined."""
        self.engine.token_ids = ids
        fields = {"logprobs": 2, "max_tokens": 100, "return_token_ids": True} | fields
        return joined(self.client.complete(**fields, stream=is_stream), is_stream)


@pytest.fixture(scope="module")
def completions(any_tokenizer):
    return Completions(any_tokenizer)


def joined(answer, is_stream):
    parts = [event["choices"][0] for event in answer.events] if is_stream else [answer.json["choices"][0]]
    names = parts[0]["logprobs"] or {}
    logprobs = {name: [each for part in parts for each in part["logprobs"][name]] for name in names}
    ids = [token_id for part in parts for token_id in part["token_ids"]]
    return "".join(part["text"] for part in parts), logprobs, [*parts[0]["prompt_token_ids"], *ids]


def check_places(tokenizer, text, logprobs, ids):
    """Every token's text is at its place, and together the tokens are the text.

    If the text ends with a part of a character, and then a stop token, that part is no token's.
    """
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert offsets == sorted(offsets)
    shown = ""
    for token_id, token, offset in zip(ids[-len(tokens) :], tokens, offsets, strict=True):
        if text.startswith(token, offset):
            shown += token
        else:
            assert token_id in tokenizer.special_ids
            assert token == tokenizer.token_text(token_id)
    assert text.startswith(shown)
    assert text[len(shown) :].strip("\ufffd") == ""


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_offsets_of_completion_logprobs_are_where_tokens_begin(completions, any_tokenizer, prompt, is_stream):
    ids, output = any_tokenizer.encode(prompt), any_tokenizer.encode(OUTPUT, add_special_tokens=False)
    for given_prompt, before in ((prompt, prompt), (ids, any_tokenizer.decode(ids, skip_special_tokens=False))):
        for echo in (False, True):
            text, logprobs, all_ids = completions.of(output, is_stream, prompt=given_prompt, echo=echo)
            assert text.endswith(OUTPUT)
            assert text.startswith(before) is echo
            check_places(any_tokenizer, text, logprobs, all_ids)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_output", [1, 2, 3])
def test_an_echo_ends_where_the_output_completes_its_last_character(completions, any_tokenizer, is_stream, num_output):
    ids, letter = any_tokenizer.encode("the 🎉!"), any_tokenizer.encode("x", add_special_tokens=False)
    prompt, output = ids[: -num_output - 1], ids[-num_output - 1 :]
    for after in (output, letter):
        text, logprobs, all_ids = completions.of(after, is_stream, prompt=prompt, echo=True)
        assert text == any_tokenizer.decode([*prompt, *after], skip_special_tokens=False)
        check_places(any_tokenizer, text, logprobs, all_ids)
        text, *_ = completions.of(after, is_stream, prompt=prompt, echo=True, max_tokens=0)
        assert text == any_tokenizer.decode(prompt, skip_special_tokens=False)


def check_answers(completions, tokenizer, prompt, output, **fields):
    """The text, which a stream and a whole answer agree on, with log probabilities and without."""
    whole = text, logprobs, all_ids = completions.of(output, False, prompt=prompt, **fields)
    assert completions.of(output, True, prompt=prompt, **fields) == whole
    check_places(tokenizer, *whole)
    assert len(logprobs["tokens"]) == len(all_ids) - (0 if fields["echo"] else len(prompt))
    for is_stream in (False, True):
        assert completions.of(output, is_stream, prompt=prompt, logprobs=None, **fields) == (text, {}, all_ids)
    return text


@settings(max_examples=40)
@given(st.data())
def test_streams_and_answers_have_the_same_logprobs_for_any_tokens(completions, any_tokenizer, data):
    ids = st.integers(1, any_tokenizer.vocab_size - 1)
    prompt, output = data.draw(st.lists(ids, min_size=1, max_size=12)), data.draw(st.lists(ids, max_size=12))
    fields = data.draw(st.fixed_dictionaries({"echo": st.booleans(), "skip_special_tokens": st.booleans()}))
    check_answers(completions, any_tokenizer, prompt, output, **fields)


@pytest.mark.parametrize("fields", [{}, {"stop_token_ids": [3 + 0x80]}])
@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (b"\xc2", b"\x80\x80", "\x80\ufffd"),
        (b"\xc2", b"\xc2\x80", "\ufffd" * 3),
        (b"\0\xc2", b"\x80", "\0\x80"),
        (b"\0\xc2", b"\2", "\0\ufffd\ufffd"),
        (b"\xef\xbf", b"\xbd", "\ufffd"),
        (b"\xef\xbf\xbd", b"\x80", "\ufffd" * 4),
        (b"\x80" * 15 + "🎉".encode()[:3], "🎉".encode()[3:], "\ufffd" * 15 + "🎉"),
    ],
)
def test_characters_before_invalid_bytes_are_kept(llama2_tokenizer, prompt, output, expected, fields):
    completions = Completions(llama2_tokenizer)
    prompt, output = ([3 + byte for byte in each] for each in (prompt, output))
    fields = {"skip_special_tokens": False} | fields
    text = check_answers(completions, llama2_tokenizer, prompt, output, echo=True, **fields)
    assert text == expected or "stop_token_ids" in fields
    assert text.endswith(check_answers(completions, llama2_tokenizer, prompt, output, echo=False, **fields))


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_echo_without_text_has_log_probabilities(completions, any_tokenizer, is_stream):
    end = any_tokenizer.eos_token_id
    for max_tokens in (0, 100):
        _, logprobs, _ = completions.of([end + 10], is_stream, prompt=[end, end], echo=True, max_tokens=max_tokens)
        assert logprobs["tokens"][:2] == ["</s>"] * 2
        assert logprobs["token_logprobs"][:2] == [None, -0.5]


def test_a_token_that_a_stop_string_cuts_off_stays_where_the_model_has_written_it(completions, any_tokenizer):
    ids = any_tokenizer.encode(OUTPUT, add_special_tokens=False)
    text, logprobs, _ = whole = completions.of(ids, False, prompt="say", stop=["rown"])
    assert text.endswith(" b")
    offsets = logprobs["text_offset"]
    assert offsets == completions.of(ids, False, prompt="say")[1]["text_offset"][: len(offsets)]
    assert completions.of(ids, True, prompt="say", stop=["rown"]) == whole


# ---- names


def same_text(tokenizer):
    """Two tokens with the same text, for bytes that are no text on their own, and the end of sequence."""
    ids = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.token_text(token_id) == "\ufffd"]
    return ids[0], ids[1], tokenizer.eos_token_id


def test_the_sampled_token_has_its_own_logprob_beside_others_of_equal_text(any_tokenizer):
    one, other, end = same_text(any_tokenizer)
    names = TokenNames(any_tokenizer, are_ids=False)
    for sampled in (one, other):
        position = {sampled: Logprob(-3.0, 3)} | {one: Logprob(-0.5, 1), other: Logprob(-1.0, 2)}
        position[end], position[10**6], position[10**6 + 1] = Logprob(-2.0, 3), Logprob(-math.inf, 4), Logprob(-7.0, 5)
        for num_top, piece in ((5, ""), (5, "あ"), (2, "\ufffd")):
            logprobs = CompletionLogprobs(names, num_top)
            logprobs.add([sampled], [position], [Piece(0, piece)])
            told = logprobs.as_dict()
            ((name,), (value,), (top,)) = told["tokens"], told["token_logprobs"], told["top_logprobs"]
            assert top[name] == value == position[sampled].logprob
            shown = [each.logprob for token_id, each in position.items() if each.rank <= num_top or token_id == sampled]
            assert sorted(top.values()) == sorted(max(each, -9999.0) for each in shown)
            assert top.get("</s>", -2.0) == -2.0


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("by_option", [False, True])
def test_tokens_may_be_named_by_their_ids(any_tokenizer, is_stream, by_option):
    engine = FakeEngine(OUTPUT, tokenizer=any_tokenizer)
    client = client_of(engine, return_tokens_as_token_ids=by_option, chat_template="{{ messages[0].content }}")
    fields = {"max_tokens": 100, "return_token_ids": True, "stream": is_stream}
    fields |= {} if by_option else {"return_tokens_as_token_ids": True}

    def choices(answer):
        return [choice for body in (answer.events if is_stream else [answer.json]) for choice in body["choices"]]

    completed = choices(client.complete(**fields, prompt="say the", logprobs=3, echo=True))
    chats = choices(client.chat(**fields, logprobs=True, top_logprobs=3))
    ids = [*completed[0]["prompt_token_ids"], *(each for part in completed for each in part["token_ids"])]
    named = [f"token_id:{token_id}" for token_id in ids]
    assert [each for part in completed for each in part["logprobs"]["tokens"]] == named
    tops = [each for part in completed for each in part["logprobs"]["top_logprobs"]]
    assert all(name in top and len(top) == 3 for name, top in zip(named[1:], tops[1:], strict=True))
    told = [each for part in chats if part["logprobs"] for each in part["logprobs"]["content"]]
    output = [each for part in chats for each in part.get("token_ids") or []]
    assert [each["token"] for each in told] == [f"token_id:{token_id}" for token_id in output]
    assert [bytes(each["bytes"]) for each in told] == [any_tokenizer.token_bytes(token_id) for token_id in output]
    override = choices(client.complete(**fields | {"return_tokens_as_token_ids": False}, logprobs=0))
    assert not any(name.startswith("token_id:") for part in override for name in part["logprobs"]["tokens"])


def test_chat_logprobs_have_the_bytes_of_half_a_character(any_tokenizer):
    ids = any_tokenizer.encode("あ🎉", add_special_tokens=False)
    positions = [{token_id: Logprob(-0.5, 1)} for token_id in ids]
    content = chat_logprobs(TokenNames(any_tokenizer, are_ids=False), ids, positions, 1)["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode().strip() == "あ🎉"
    assert all(each["top_logprobs"][0]["bytes"] == each["bytes"] for each in content)
