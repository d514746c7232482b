"""What callers ask of tokenization: where prompts are cut, and whether special tokens are added."""

from __future__ import annotations

import pytest
from tokenizers_for_tests import byte_level_with_bos, word_piece, write

from raycore.client.inputs import parse_prompts
from raycore.client.tokenization import Tokenization
from raycore.errors import InvalidRequest
from raycore.text.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tmp_path) -> Tokenizer:
    write(tmp_path, byte_level_with_bos(), {"bos_token": "<s>"})
    return Tokenizer.from_dir(tmp_path)


def test_prompts_are_cut_where_the_caller_says(tokenizer):
    whole = tokenizer.encode("the quick brown fox jumps")
    bos = whole[0]
    prompts = ["the quick brown fox jumps", [1, 2, 3, 4, 5], "the", [7]]

    def parsed(**asked) -> list[list[int]]:
        how = Tokenization.of(None, asked or None, 100)
        return [each.token_ids for each in parse_prompts(prompts, tokenizer, how)]

    short = tokenizer.encode("the")
    assert len(short) < 4 < len(whole)
    assert parsed() == [whole, [1, 2, 3, 4, 5], short, [7]]
    assert parsed(truncate_prompt_tokens=4) == [whole[:4], [1, 2, 3, 4], short, [7]]
    assert parsed(truncate_prompt_tokens=4, truncation_side="left") == [[bos, *whole[-3:]], [2, 3, 4, 5], short, [7]]
    assert parsed(add_special_tokens=False)[0] == whole[1:]
    assert parsed(add_special_tokens=False, truncate_prompt_tokens=2)[0] == whole[1:3]


def test_tokens_are_counted_and_not_characters(tmp_path):
    tokenizer = Tokenizer.from_dir(write(tmp_path, word_piece()))
    spread = "the" + " " * 5000 + "fox" + " " * 5000 + "("
    whole = tokenizer.encode("the fox (")
    for most in (None, 3, 2):
        (parsed,) = parse_prompts([spread], tokenizer, Tokenization.of(most, None, 3))
        assert parsed.token_ids == whole[:most]


def test_a_number_may_stand_for_the_longest_prompt():
    assert Tokenization.of(-1, None, 100).max_tokens == 100
    assert Tokenization.of(-1, {"truncate_prompt_tokens": 5}, 100).max_tokens == 5
    assert Tokenization.of(None, {}, 100) == Tokenization()


@pytest.mark.parametrize(
    ("number", "given", "message"),
    [
        (0, None, "truncate_prompt_tokens=0"),
        (101, None, "truncate_prompt_tokens=101 isn't from 1 to max_model_len=100"),
        (True, None, "truncate_prompt_tokens=True"),
        (None, [1], "tokenization_kwargs=\\[1\\] isn't a mapping"),
        (None, {"padding": True}, "tokenization_kwargs has 'padding'"),
        (None, {"truncation_side": "middle"}, "truncation_side='middle'"),
        (None, {"add_special_tokens": 1}, "add_special_tokens=1"),
    ],
)
def test_other_values_are_refused_by_name(number, given, message):
    with pytest.raises(InvalidRequest, match=message):
        Tokenization.of(number, given, 100)
