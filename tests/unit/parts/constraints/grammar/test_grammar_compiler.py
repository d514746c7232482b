"""Which tokens a constraint allows, with the demo model's tokenizer, which can spell every text."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from waiting import LONG_S

from raycore.demo import demo_model_path
from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar import compiler as compiler_module
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.parts.constraints.grammar.gate import CompileLimits
from raycore.parts.constraints.grammar.native import NativeCompiler
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer_files import read_tokenizer_files

VOCAB = 352
"""More than the tokenizer knows, as models have it."""
EOS = [0, 3]
NATIVE = read_tokenizer_files(Path(demo_model_path())).native


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(demo_model_path(), VOCAB, EOS)


def ids_of(text: str) -> list[int]:
    return NATIVE.encode(text, add_special_tokens=False).ids


def allowed_after(compiler: GrammarCompiler, text: str, more: list[int] = [], stop=(), **asked) -> list[int]:  # noqa: B006
    matcher = compiler.matcher(StructuredOutputsParams(**asked), stop)
    return np.flatnonzero(matcher.allowed_after(np.array([*ids_of(text), *more], np.int32))).tolist()


def texts_after(compiler: GrammarCompiler, text: str, **asked) -> set[str]:
    return {NATIVE.decode([token_id], skip_special_tokens=False) for token_id in allowed_after(compiler, text, **asked)}


@pytest.mark.parametrize(
    ("asked", "text", "next_texts"),
    [
        ({"regex": "[0-9]{2}"}, "", set("0123456789")),
        ({"regex": "[0-9]{2}"}, "4", set("0123456789")),
        ({"regex": "[0-9]{2}"}, "42", {"<|endoftext|>", "<|im_end|>"}),
        ({"regex": "[0-9]{2}|[0-9]{2}x"}, "42", {"<|endoftext|>", "<|im_end|>", "x"}),
        ({"choice": ["What", "When", "3.5"]}, "", {"W", "Wh", "What", "3"}),
        ({"choice": ["3.5", "3"]}, "3", {".", "<|endoftext|>", "<|im_end|>"}),
        ({"json_object": True}, "", {"{"}),
        ({"json_object": True}, "{}", {"<|endoftext|>", "<|im_end|>"}),
        ({"json": {"type": "boolean"}}, "", {"t", "f"}),
        ({"json": {"enum": [1, None]}}, "", {"1", "n", "nu"}),
        ({"json": {"type": "array", "items": {"const": 1}}, "disable_any_whitespace": True}, "[1", {",", "]"}),
        ({"json": '{"type": "array", "items": {"const": 1}}'}, "[1", {",", "]", " ", "\n", "\t", "\r"}),
        ({"grammar": 'root ::= "a" tail\ntail ::= "b" | "c"'}, "a", {"b", "c"}),
        ({"grammar": 'start: "a" TAIL\nTAIL: /[bc]/'}, "a", {"b", "c"}),
    ],
)
def test_the_allowed_next_texts_follow_the_constraint(compiler, asked, text, next_texts):
    assert texts_after(compiler, text, **asked) == next_texts


def test_white_space_in_json_is_limited(compiler):
    """Some models would go on with it for ever."""
    schema = {"type": "array", "items": {"type": "integer"}}
    assert " " in texts_after(compiler, "[1," + " " * 31, json=schema)
    assert " " not in texts_after(compiler, "[1,\n" + " " * 31, json=schema)


def test_texts_in_json_have_no_special_tokens_and_no_halves_of_characters(compiler):
    allowed = allowed_after(compiler, '"', json={"type": "string"})
    assert not set(allowed) & {0, 1, 2, 3}
    assert max(allowed) < NATIVE.get_vocab_size()
    for token_id in allowed:
        assert not re.search(r"[\x00-\x1f]", NATIVE.decode([token_id]))


def test_a_property_cannot_be_named_by_an_escape(compiler):
    """llguidance would take `\\u0061` for another name than `a`, whose value may be anything."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert "u" not in texts_after(compiler, '{"\\', json=schema)
    assert "n" in texts_after(compiler, '{"\\', json=schema)


def test_added_tokens_that_are_not_special_may_spell_what_a_grammar_says(tmp_path):
    """As Qwen's `<tool_call>`, which llguidance alone would take for a special token. No token changes its number."""
    tokenizer = json.loads((Path(demo_model_path()) / "tokenizer.json").read_text())
    added = [("<|new|>", True), ("<call>", False), ("<|newer|>", True), ("</call>", False)]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": 320 + i, "content": text, "special": special, **plain} for i, (text, special) in enumerate(added)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    compiler = GrammarCompiler(str(tmp_path), VOCAB, EOS)
    grammar = 'start: "<call>" /[a-z]{2,3}/ "</call>" | "<|new|>" | <|newer|>'
    texts = {text: 320 + i for i, (text, _) in enumerate(added)}
    first = allowed_after(compiler, "", grammar=grammar)
    assert set(first) & set(texts.values()) == {texts["<call>"], texts["<|newer|>"]}
    assert ids_of("<")[0] in first
    assert texts["</call>"] in allowed_after(compiler, "", [texts["<call>"], *ids_of("xy")], grammar=grammar)
    assert allowed_after(compiler, "", [texts["<|newer|>"]], grammar=grammar) == EOS


@pytest.mark.parametrize("text", ["{}", "", 'a.b*c[d]\n/e"\\-&#~^$|()?+ é😀'])
def test_the_texts_of_a_choice_are_taken_literally(compiler, text):
    ids = ids_of(text)
    for length in range(len(ids)):
        matcher = compiler.matcher(StructuredOutputsParams(choice=[text]))
        assert matcher.allowed_after(np.array(ids[:length], np.int32))[ids[length]]
    assert allowed_after(compiler, text, choice=[text]) == EOS


def test_a_choice_may_have_thousands_of_texts(compiler):
    choices = [f"number {i}." for i in range(5000)]
    assert texts_after(compiler, "number 4711", choice=choices) == {"."}
    assert allowed_after(compiler, choices[77], choice=choices) == EOS


def test_stop_tokens_are_allowed_once_an_output_is_complete(compiler):
    (stop,) = ids_of("x")
    assert allowed_after(compiler, "4", stop=[stop], regex="[0-9]{2}") == ids_of("0 1 2 3 4 5 6 7 8 9")[::2]
    assert allowed_after(compiler, "42", stop=[stop, 10**6], regex="[0-9]{2}") == [*EOS, stop]
    for end in (*EOS, stop):
        assert allowed_after(compiler, "42", [end, end, 100], [stop], regex="[0-9]{2}") == [*EOS, stop]


def test_a_matcher_can_start_from_any_part_of_an_output(compiler):
    asked = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "string"}}})
    ids = np.array(ids_of('{"a": "some text"}'), np.int32)
    step_by_step = compiler.matcher(asked)
    for length in range(len(ids) + 1):
        at_once = compiler.matcher(asked).allowed_after(ids[:length])
        assert np.array_equal(step_by_step.allowed_after(ids[:length]), at_once)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"json": "[1"}, "the schema isn't valid JSON: Expecting ',' delimiter"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"regex": "["}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"grammar": "start: nothing"}, 'unknown name: "nothing"'),
        ({"grammar": "((("}, "Expected name"),
    ],
)
def test_invalid_constraints_are_refused_with_the_reason(compiler, asked, match):
    with pytest.raises(InvalidRequest, match=re.compile(match, re.DOTALL)):
        compiler.matcher(StructuredOutputsParams(**asked))


def test_a_known_constraint_does_not_wait_for_others_that_are_compiled(compiler, monkeypatch):
    known = StructuredOutputsParams(regex="known")
    compiler.matcher(known)
    may_go_on = threading.Event()
    compile_one = NativeCompiler.compile
    monkeypatch.setattr(
        NativeCompiler, "compile", lambda self, asked: may_go_on.wait(LONG_S) and compile_one(self, asked)
    )
    begun = [compiler.begin(StructuredOutputsParams(regex=regex)) for regex in ("new", "(", "new")]
    assert begun[0] is begun[2]
    assert compiler.begin(known).done()
    compiler.matcher(known)
    assert not begun[0].done()
    may_go_on.set()
    assert compiler.matcher(StructuredOutputsParams(regex="new"))
    begun[1].result(LONG_S)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unclosed group"):
            compiler.matcher(StructuredOutputsParams(regex="("))


def test_a_slow_constraint_delays_no_other(compiler, monkeypatch):
    may_go_on = threading.Event()
    compile_one = NativeCompiler.compile

    def compile_slowly(self, asked):
        assert asked.regex != "slow" or may_go_on.wait(LONG_S)
        return compile_one(self, asked)

    monkeypatch.setattr(NativeCompiler, "compile", compile_slowly)
    slow = compiler.begin(StructuredOutputsParams(regex="slow"))
    compiler.matcher(StructuredOutputsParams(regex="quick"))
    assert not slow.done()
    may_go_on.set()


def test_compiling_a_constraint_has_a_time_limit(compiler, monkeypatch):
    may_go_on = threading.Event()
    monkeypatch.setattr(compiler_module, "_COMPILE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(NativeCompiler, "compile", lambda self, asked: may_go_on.wait(LONG_S))
    with pytest.raises(InvalidRequest, match=r"compiling the constraint took longer than 0.01 s"):
        compiler.matcher(StructuredOutputsParams(regex="never"))
    may_go_on.set()


def test_threads_that_compile_have_a_larger_stack_than_the_check(compiler):
    before = threading.stack_size()
    assert CompileLimits().stack_bytes < compiler_module.STACK_BYTES
    compiler.matcher(StructuredOutputsParams(regex="stack"))
    assert threading.stack_size() == before


def test_only_the_latest_compiled_constraints_are_kept(monkeypatch):
    compiler = GrammarCompiler(demo_model_path(), VOCAB, EOS)
    first = StructuredOutputsParams(regex="first")
    compiler.matcher(first)
    monkeypatch.setattr(compiler_module, "_NUM_KEPT", 4)
    for i in range(10):
        compiler.matcher(StructuredOutputsParams(regex=f"other {i}"))
    assert len(compiler._compiled) == 4
    compiler.matcher(first)


def test_a_grammar_that_gets_too_complex_during_an_output_raises_with_the_reason(compiler):
    """A row of the parser holds 2,000 items at most."""
    alternatives = " | ".join(f'"a" r{i}' for i in range(3000))
    rules = "\n".join(f'r{i}: "{i}"' for i in range(3000))
    matcher = compiler.matcher(StructuredOutputsParams(grammar=f"start: {alternatives}\n{rules}"))
    with pytest.raises(InvalidRequest, match="can't be enforced"):
        matcher.allowed_after(np.array(ids_of("a"), np.int32))


def test_an_output_that_breaks_its_constraint_is_noticed(compiler):
    matcher = compiler.matcher(StructuredOutputsParams(regex="[0-9]+"))
    with pytest.raises(InvalidRequest, match=f"can't be enforced at token {ids_of('x')[0]}: "):
        matcher.allowed_after(np.array(ids_of("12x"), np.int32))


def test_random_walks_over_allowed_tokens_match_the_constraint(compiler):
    """Every token that is allowed can be followed to an end."""
    rng = random.Random(3)
    for pattern in (r"(ab|c){0,5}[x-z]", r"[0-9]{1,3}(\.[0-9]{1,3}){3}", r"[^a-z]{0,6}é?", "What (is|are) (you|he)\\?"):
        for _ in range(10):
            matcher, ids = compiler.matcher(StructuredOutputsParams(regex=pattern)), []
            while not ids or ids[-1] not in EOS:
                ids.append(rng.choice(np.flatnonzero(matcher.allowed_after(np.array(ids, np.int32))).tolist()))
            assert re.fullmatch(pattern, NATIVE.decode(ids))


def test_a_model_without_end_of_sequence_ids_cannot_be_constrained():
    with pytest.raises(InvalidRequest, match="no end-of-sequence token"):
        GrammarCompiler(demo_model_path(), VOCAB, []).matcher(StructuredOutputsParams(regex="a"))


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match=f"{tmp_path}.*doesn't exist"):
        GrammarCompiler(str(tmp_path), VOCAB, EOS).matcher(StructuredOutputsParams(regex="a"))


def test_without_llguidance_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r'pip install "raycore\[structured\]"'):
        GrammarCompiler(demo_model_path(), VOCAB, EOS).matcher(StructuredOutputsParams(regex="a"))
