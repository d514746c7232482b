"""Pairs of texts become the same prompts as with Hugging Face's tokenizers, and texts are cut as theirs are."""

from __future__ import annotations

import itertools
import json

import pytest
from tokenizers import processors
from tokenizers_for_tests import byte_level, byte_level_with_bos
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from raycore.errors import InvalidRequest
from raycore.text.pairs import PairFormat, pair_prompts
from raycore.text.tokenizer import Tokenizer, TokenPair

QUERY, DOCUMENT = "the quick fox", "Hello, world! jumps over the lazy dog, 你好 naïve"
TYPED = ["input_ids", "token_type_ids", "attention_mask"]
TEMPLATE = (
    "{{ instruction or 'none' }}|{{ (messages | selectattr('role', 'eq', 'query') | first).content }}|"
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content }}"
)


def with_separators():
    """As BERT: a token before, after and between the texts. The second text is another type of token."""
    native = byte_level()
    ends = [(token, native.token_to_id(token)) for token in ("<s>", "</s>")]
    native.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ends
    )
    return native


@pytest.fixture
def tokenizer(tmp_path):
    return saved(with_separators(), tmp_path, model_input_names=TYPED)


def saved(native, path, **config) -> Tokenizer:
    PreTrainedTokenizerFast(tokenizer_object=native, bos_token="<s>", eos_token="</s>", **config).save_pretrained(path)
    return Tokenizer.from_dir(path)


@pytest.mark.parametrize("make", [byte_level_with_bos, with_separators])
@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_cut_as_hugging_face_cuts_them(tmp_path, make, side):
    tokenizer = saved(make(), tmp_path, truncation_side=side)
    peer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert peer.truncation_side == tokenizer.truncation_side == side
    whole = tokenizer.encode_batch([QUERY, DOCUMENT])
    for most in (2, 3, 7, len(whole[0]), len(whole[1]) - 1, 100):
        expected = [peer(text, truncation=True, max_length=most)["input_ids"] for text in (QUERY, DOCUMENT)]
        assert tokenizer.encode_within([QUERY, DOCUMENT], most) == expected
        assert tokenizer.encode_within([DOCUMENT], most, False, "left") == [tokenizer.encode(DOCUMENT, False)[-most:]]


@pytest.mark.parametrize("make", [byte_level, byte_level_with_bos, with_separators])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs_are_those_of_hugging_face(tmp_path, make, side):
    tokenizer = saved(make(), tmp_path, truncation_side=side, model_input_names=TYPED)
    peer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    pairs = list(itertools.product([QUERY, DOCUMENT, "a", ""], repeat=2))
    for most in (None, 3, 4, 9, 20, 21, 22, 100):
        # as a batch, because a lone pair with an empty second text isn't a pair for Hugging Face
        firsts, seconds = map(list, zip(*pairs, strict=True))
        expected = peer(firsts, seconds, truncation=most is not None, max_length=most, return_token_type_ids=True)
        assert list(tokenizer.encode_pairs(pairs, most)) == list(
            zip(expected["input_ids"], expected["token_type_ids"], strict=True)
        )


def with_config(path, **config) -> TokenPair:
    """A pair as the tokenizer with these settings encodes it."""
    saved(with_separators(), path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    (pair,) = Tokenizer.from_dir(path).encode_pairs([(QUERY, DOCUMENT)])
    return pair


@pytest.mark.parametrize("names", [TYPED, ["input_ids", "attention_mask"]])
def test_pairs_have_types_of_tokens_where_hugging_face_gives_models_some(tmp_path, names):
    pair = with_config(tmp_path, model_input_names=names)
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)(QUERY, DOCUMENT)
    assert pair.token_ids == expected["input_ids"]
    assert any(pair.type_ids) == ("token_type_ids" in expected)


@pytest.mark.parametrize(
    "name",
    [
        *("Albert", "Bert", "ConvBert", "DPRContextEncoder", "DPRQuestionEncoder", "Deberta", "DebertaV2"),
        *("DistilBert", "Electra", "FNet", "LayoutLM", "LayoutLMv2", "LayoutLMv3", "Llama", "Lxmert", "MPNet"),
        *("MarkupLM", "MobileBert", "Qwen2", "RemBert", "Roberta", "SqueezeBert", "XLMRoberta"),
    ],
)
@pytest.mark.parametrize("end", ["Tokenizer", "TokenizerFast"])
def test_classes_of_tokenizers_give_types_as_in_hugging_face(tmp_path, name, end):
    peer = tokenizer_class_from_name(name + end)
    assert peer is not None
    types = with_config(tmp_path, tokenizer_class=name + end).type_ids
    assert any(types) == ("token_type_ids" in peer.model_input_names)


def test_a_tokenizers_own_names_of_inputs_count_before_its_class(tmp_path):
    assert not any(with_config(tmp_path).type_ids)
    names = ["input_ids", "attention_mask"]
    assert not any(with_config(tmp_path, tokenizer_class="BertTokenizer", model_input_names=names).type_ids)


def test_a_pair_has_token_types_only_if_the_tokenizer_tells_them(tokenizer, tmp_path):
    (prompt,) = pair_prompts(tokenizer, [(QUERY, DOCUMENT)], PairFormat())
    types = prompt["token_type_ids"]
    assert types == sorted(types)
    assert len(types) == len(prompt["prompt_token_ids"])
    (plain,) = pair_prompts(saved(byte_level_with_bos(), tmp_path), [(QUERY, DOCUMENT)], PairFormat())
    assert plain.keys() == {"prompt_token_ids"}


def test_each_text_of_a_pair_can_be_cut(tokenizer):
    query, document = (tokenizer.encode(text, False) for text in (QUERY, DOCUMENT))
    cut = PairFormat(max_tokens_per_query=2, max_tokens_per_doc=3)
    (prompt,) = pair_prompts(tokenizer, [(QUERY, DOCUMENT)], cut)
    start, end, _ = next(tokenizer.encode_pairs([("", "")])).token_ids
    assert prompt["prompt_token_ids"] == [start, *query[:2], end, *document[:3], end]


def test_few_tokens_are_kept_of_very_long_texts(tokenizer):
    text, beginning = "the " * 100_000, "the " * 5
    assert tokenizer.encode_within([text], 5) == tokenizer.encode_within([beginning], 5)
    assert [*tokenizer.encode_pairs([(text, text)], 7)] == [*tokenizer.encode_pairs([(beginning, beginning)], 7)]


class CountingTokenizer:
    """A native tokenizer that keeps what it is asked to encode."""

    def __init__(self, native) -> None:
        self._native = native
        self.texts: list[str] = []

    def __getattr__(self, name: str):
        return getattr(self._native, name)

    def encode_batch(self, texts, **kwargs):
        return self._encode("encode_batch", texts, kwargs)

    def encode_batch_fast(self, texts, **kwargs):
        return self._encode("encode_batch_fast", texts, kwargs)

    def _encode(self, name: str, texts, kwargs):
        for text in texts:
            self.texts += [text] if isinstance(text, str) else text
        return getattr(self._native, name)(texts, **kwargs)


@pytest.mark.parametrize(
    "cut", [PairFormat(), PairFormat(truncate_prompt_tokens=9), PairFormat(max_tokens_per_query=2)]
)
def test_the_text_of_many_pairs_is_encoded_once(tokenizer, cut):
    documents = [f"{number} foxes" for number in range(20)]
    counting = tokenizer._native = CountingTokenizer(tokenizer._native)
    assert len(list(pair_prompts(tokenizer, [(QUERY, document) for document in documents], cut))) == 20
    assert sum(QUERY in text for text in counting.texts) == 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_long_text_of_many_pairs_is_encoded_only_as_far_as_its_tokens_are_kept(tokenizer, side, template):
    query, documents = "the " * 100_000, [f"{number} foxes" for number in range(20)]
    asked = PairFormat(False, template, truncate_prompt_tokens=9, truncation_side=side)
    expected = [*pair_prompts(tokenizer, [("the " * 50, document) for document in documents], asked)]
    counting = tokenizer._native = CountingTokenizer(tokenizer._native)
    assert [*pair_prompts(tokenizer, [(query, document) for document in documents], asked)] == expected
    assert sum(map(len, counting.texts)) < len(query)
    assert side == "left" or len(set(counting.texts)) == 1


def test_the_text_of_many_pairs_is_cut_once_before_others_follow_it(tokenizer):
    documents = [f"{number} foxes" for number in range(20)]
    cut = PairFormat(use_sep_token=False, max_tokens_per_query=2)
    counting = tokenizer._native = CountingTokenizer(tokenizer._native)
    assert len(list(pair_prompts(tokenizer, [(QUERY, document) for document in documents], cut))) == 20
    assert counting.texts.count(QUERY) == 1


@pytest.mark.parametrize("use_sep_token", [True, False])
def test_pairs_of_a_long_text_are_made_when_they_are_asked_for(tokenizer, use_sep_token):
    query, documents = "the " * 300_000, [f"{number} foxes" for number in range(20)]
    counting = tokenizer._native = CountingTokenizer(tokenizer._native)
    prompts = pair_prompts(tokenizer, [(query, document) for document in documents], PairFormat(use_sep_token))
    assert len(next(prompts)["prompt_token_ids"]) > 300_000
    assert sum(query in text for text in counting.texts) == 1


def test_without_a_separator_the_second_text_follows_the_first(tokenizer):
    (prompt,) = pair_prompts(tokenizer, [(QUERY, DOCUMENT)], PairFormat(use_sep_token=False))
    assert prompt == {"prompt_token_ids": tokenizer.encode(QUERY + DOCUMENT)}
    cut = PairFormat(use_sep_token=False, max_tokens_per_doc=1, truncate_prompt_tokens=5)
    (prompt,) = pair_prompts(tokenizer, [(QUERY, DOCUMENT)], cut)
    assert prompt == {"prompt_token_ids": tokenizer.encode_within([QUERY + tokenizer.cut(DOCUMENT, 1)], 5)[0]}


def test_a_template_gets_both_texts_and_its_variables(tokenizer):
    asked = PairFormat(chat_template=TEMPLATE, chat_template_kwargs={"instruction": "find it"}, max_tokens_per_query=2)
    (prompt,) = pair_prompts(tokenizer, [(QUERY, DOCUMENT)], asked)
    assert prompt == {"prompt_token_ids": tokenizer.encode(f"find it|{tokenizer.cut(QUERY, 2)}|{DOCUMENT}")}
    taken = PairFormat(chat_template=TEMPLATE, chat_template_kwargs={"messages": []})
    with pytest.raises(InvalidRequest, match="chat_template_kwargs has 'messages'"):
        list(pair_prompts(tokenizer, [(QUERY, DOCUMENT)], taken))


@pytest.mark.parametrize("text", [QUERY, DOCUMENT, "你好" * 9, "", " " * 7])
def test_a_text_is_cut_between_two_characters(tokenizer, text):
    starts = [*tokenizer.token_starts(text, add_special_tokens=False), len(text)]
    for most in range(9):
        cut = tokenizer.cut(text, most)
        assert len(cut) <= starts[min(most, len(starts) - 1)]
        assert text.startswith(cut)
        assert len(tokenizer.encode(cut, False)) <= most
        assert most < 4 or len(tokenizer.encode(text, False)) <= most or cut
