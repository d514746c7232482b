"""Masks of many outputs at once are those of each alone, also after drafts."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from raycore.demo import demo_model_path
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.parts.constraints.grammar.masks import MaskMaker, Masks, Output
from raycore.parts.constraints.grammar.matcher import mask_bytes
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer import Tokenizer

EOS = [0, 3]
TOKENS = Tokenizer.from_dir(demo_model_path())


def encode(text: str) -> NDArray[np.int32]:
    return np.array(TOKENS.encode(text), np.int32)


def output(compiler: GrammarCompiler, regex: str, text: str, drafts: str = "", after: str | None = None) -> Output:
    matcher = compiler.matcher(StructuredOutputsParams(regex=regex, after=after))
    drafted = encode(drafts) if drafts else np.empty(0, np.int32)
    return Output(matcher, np.concatenate([encode(text) if text else drafted[:0], drafted]), len(drafted))


def allowed(masks: Masks, vocab_size: int) -> dict[tuple[int, int], list[int]]:
    """The tokens that may come, by output and number of drafts before."""
    bits = np.unpackbits(masks.bits_RB, axis=1, bitorder="little")
    assert not bits[:, vocab_size:].any()
    return {row: np.flatnonzero(own).tolist() for row, own in zip(masks.rows, bits, strict=True)}


@pytest.mark.parametrize("vocab_size", [320, 300, 331, 352, 260])
def test_masks_are_those_of_each_output_alone(vocab_size: int) -> None:
    compiler = GrammarCompiler(demo_model_path(), vocab_size, EOS)
    asked = [("[a-c]+", "ab"), ("[0-9]{3}", "12"), ("[0-9]{3}", "123"), ("x", ""), ("(é|ü)+", "é")]
    masks = MaskMaker(vocab_size).make([output(compiler, *each) for each in asked])
    assert masks.bits_RB.shape == (len(asked), mask_bytes(vocab_size))
    found = allowed(masks, vocab_size)
    for index, (regex, text) in enumerate(asked):
        alone = compiler.matcher(StructuredOutputsParams(regex=regex))
        expected = alone.allowed_after(encode(text) if text else np.empty(0, np.int32))
        assert found[index, 0] == np.flatnonzero(expected).tolist()
    assert found[2, 0] == EOS
    assert masks.failed == []


def test_there_is_a_mask_after_each_draft_up_to_one_that_may_not_come() -> None:
    compiler = GrammarCompiler(demo_model_path(), 320, EOS)
    outputs = [
        output(compiler, "[0-9]{5}", "1", "23"),
        output(compiler, "[0-9]{5}", "1", "2x4"),
        output(compiler, "[0-9]{2}", "1"),
        output(compiler, "[0-9]{2}", "12", "9"),
    ]
    found = allowed(MaskMaker(320).make(outputs), 320)
    assert set(found) == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (3, 0)}
    assert found[0, 0] == found[0, 1] == found[0, 2] == found[1, 0] == found[2, 0]
    assert found[3, 0] == EOS
    again = [each._replace(tokens=each.tokens[: len(each.tokens) - each.num_drafts], num_drafts=0) for each in outputs]
    assert allowed(MaskMaker(320).make(again), 320) == {(i, 0): found[i, 0] for i in range(4)}, "drafts are taken back"


def test_free_text_and_ended_outputs_need_nothing_of_the_grammar() -> None:
    compiler = GrammarCompiler(demo_model_path(), 320, EOS)
    ended = Output(compiler.matcher(StructuredOutputsParams(regex="a")), np.array([*encode("a"), EOS[0]], np.int32), 0)
    found = allowed(MaskMaker(320).make([output(compiler, "[0-9]", "some", after="="), ended]), 320)
    assert len(found[0, 0]) > 200
    assert found[1, 0] == EOS


def test_an_output_that_breaks_its_grammar_fails_alone_and_at_its_place() -> None:
    compiler = GrammarCompiler(demo_model_path(), 320, EOS)
    outputs = [output(compiler, "[0-9]{3}", text) for text in ("1", "no", "12")]
    masks = MaskMaker(320).make(outputs)
    assert masks.rows == [(0, 0), (2, 0)]
    assert len(masks.bits_RB) == 2
    ((index, num_before, why),) = masks.failed
    assert (index, num_before) == (1, 0)
    assert "structured_outputs can't be enforced at token" in why


def test_there_may_be_nothing_to_make() -> None:
    masks = MaskMaker(320).make([])
    assert (masks.rows, masks.failed, masks.bits_RB.shape) == ([], [], (0, mask_bytes(320)))
