"""The tokenizer with Hugging Face's calls, beside Hugging Face's own."""

from __future__ import annotations

import pytest

from raycore.demo import demo_model_path
from raycore.errors import InvalidRequest
from raycore.text.hf_tokenizer import HfTokenizer
from raycore.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "27 + 58?"}]
TEXTS = ["27 + 58 =", "1"]


@pytest.fixture(scope="module")
def own() -> HfTokenizer:
    return HfTokenizer.of(Tokenizer.from_dir(demo_model_path()))


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(demo_model_path())


def test_results_are_those_of_hugging_faces_tokenizer(own, theirs):
    for name in ("bos_token", "eos_token", "pad_token", "eos_token_id", "bos_token_id", "pad_token_id", "unk_token"):
        assert getattr(own, name) == getattr(theirs, name), name
    assert (len(own), own.get_vocab()) == (len(theirs), theirs.get_vocab())
    assert set(own.all_special_ids) >= set(theirs.all_special_ids)
    ids = theirs.encode(TEXTS[0])
    assert own.encode(TEXTS[0]) == ids
    assert dict(own(TEXTS[0])) == {key: theirs(TEXTS[0])[key] for key in ("input_ids", "attention_mask")}
    assert own(TEXTS).input_ids == theirs(TEXTS).input_ids
    cut = {"truncation": True, "max_length": 2}
    assert own(TEXTS, **cut).input_ids == theirs(TEXTS, **cut).input_ids
    assert own.convert_ids_to_tokens(ids) == own.tokenize(TEXTS[0]) == theirs.convert_ids_to_tokens(ids)
    assert own.convert_tokens_to_ids(own.convert_ids_to_tokens(ids)) == ids
    ended = [*ids, own.eos_token_id]
    for skips in (False, True):
        assert own.decode(ended, skip_special_tokens=skips) == theirs.decode(ended, skip_special_tokens=skips)
    assert own.decode(ended) == theirs.decode(ended)
    assert own.batch_decode([ended, ids]) == theirs.batch_decode([ended, ids])
    assert own.chat_template == theirs.chat_template


def test_chats_become_what_hugging_faces_tokenizer_makes_of_them(own, theirs):
    for options in ({}, {"add_generation_prompt": True}, {"return_dict": False}, {"tokenize": False}):
        assert own.apply_chat_template(CHAT, **options) == theirs.apply_chat_template(CHAT, **options)
    texts = own.apply_chat_template([CHAT, CHAT], tokenize=False)
    assert texts == [own.apply_chat_template(CHAT, tokenize=False)] * 2


def test_it_is_raycores_tokenizer_too(own):
    plain = Tokenizer.from_dir(demo_model_path())
    assert own.encode(TEXTS[0], False) == plain.encode(TEXTS[0], False)
    assert own.token_text(5) == plain.token_text(5)
    assert own.name_or_path == str(demo_model_path())


def test_texts_can_be_padded(own):
    if own.pad_token_id is None:
        with pytest.raises(InvalidRequest, match="padding=True isn't supported: the tokenizer has no pad_token"):
            own(TEXTS, padding=True)
        return
    encoding = own(TEXTS, padding=True)
    assert len(encoding.input_ids[0]) == len(encoding.input_ids[1])
    assert encoding.attention_mask[1] == [1] + [0] * (len(encoding.input_ids[0]) - 1)
    assert encoding.input_ids[1][1:] == [own.pad_token_id] * (len(encoding.input_ids[0]) - 1)


def test_what_is_not_supported_is_refused_by_name(own):
    with pytest.raises(InvalidRequest, match="return_tensors='pt' isn't supported"):
        own("1", return_tensors="pt")
    with pytest.raises(InvalidRequest, match="padding='max_length' isn't supported"):
        own("1", padding="max_length")
    with pytest.raises(AttributeError):
        _ = own("1").token_type_ids
