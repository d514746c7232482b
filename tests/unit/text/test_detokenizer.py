import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycore.sampling_params import SamplingParams
from raycore.text.detokenizer import IncrementalDetokenizer, SequenceText


def feed(detokenizer, ids, chunk=1):
    """The text after each chunk, and at the end."""
    texts = []
    for start in range(0, len(ids), chunk):
        detokenizer.append(ids[start : start + chunk])
        texts.append(detokenizer.text)
    detokenizer.finish()
    return [*texts, detokenizer.text]


TEXT = "the  quick <b>naïve</b> fox 你好, 世界 🎉🎉🎉 said:\n\n Hello, world! " * 3


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_incremental_text_grows_to_the_text_decoded_at_once(any_tokenizer, chunk):
    ids = any_tokenizer.encode(TEXT)
    texts = feed(IncrementalDetokenizer(any_tokenizer), ids, chunk)
    assert texts[-1] == any_tokenizer.decode(ids) == TEXT
    for earlier, later in pairwise(texts):
        assert later.startswith(earlier)
    assert not any("\ufffd" in text for text in texts)


def test_incremental_text_includes_each_character_as_soon_as_it_is_complete(tokenizer):
    ids = tokenizer.encode("Hello あり")
    texts = feed(IncrementalDetokenizer(tokenizer), ids)
    assert "Hello あ" in texts
    assert texts[-2] == "Hello あり"


def test_special_tokens_are_skipped_or_shown(any_tokenizer):
    ids = [*any_tokenizer.encode("the fox"), any_tokenizer.eos_token_id, *any_tokenizer.encode(" jumps")] * 8
    for skip in (True, False):
        assert feed(IncrementalDetokenizer(any_tokenizer, skip), ids)[-1] == any_tokenizer.decode(ids, skip)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 399), max_size=80), st.integers(1, 5))
def test_incremental_text_of_any_tokens_grows_to_the_text_decoded_at_once(tokenizer, ids, chunk):
    texts = feed(IncrementalDetokenizer(tokenizer), ids, chunk)
    assert texts[-1] == tokenizer.decode(ids)
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def what_decoding_adds(tokenizer, prompt, ids, skip_special_tokens=True):
    """What decoding prompt and output together adds to the prompt's text. Completes a character of the prompt."""
    before = feed(IncrementalDetokenizer(tokenizer, skip_special_tokens), prompt)[-1]
    after = tokenizer.decode([*prompt, *ids], skip_special_tokens)
    while not after.startswith(before):
        before = before[:-1]
    return after[len(before) :]


@pytest.mark.parametrize("chunk", [1, 3, 50])
@pytest.mark.parametrize("text", [TEXT, "the " + "あ🎉я" * 8])
def test_an_outputs_text_is_the_text_that_it_adds_to_its_prompt(any_tokenizer, text, chunk):
    ids = any_tokenizer.encode(text)
    for num_prompt in range(len(ids)):
        prompt, output = ids[:num_prompt], ids[num_prompt:]
        texts = feed(IncrementalDetokenizer(any_tokenizer, prompt_token_ids=prompt), output, chunk)
        assert texts[-1] == what_decoding_adds(any_tokenizer, prompt, output)
        assert feed(IncrementalDetokenizer(any_tokenizer), prompt)[-1].rstrip("\ufffd") + texts[-1] == text


def test_the_first_word_of_an_output_keeps_its_space(llama2_tokenizer):
    prompt, word = llama2_tokenizer.encode("say the"), llama2_tokenizer.encode("the", add_special_tokens=False)
    assert llama2_tokenizer.decode(word) == "the"
    for before, expected in ((prompt, " the"), ([*prompt, llama2_tokenizer.eos_token_id], " the"), (prompt[:1], "the")):
        assert feed(IncrementalDetokenizer(llama2_tokenizer, prompt_token_ids=before), word)[-1] == expected


def test_a_character_that_the_prompt_begins_belongs_to_the_output_that_completes_it(any_tokenizer):
    ids = any_tokenizer.encode("the あ!")
    begun, letter = ids[:-2], any_tokenizer.encode("the", add_special_tokens=False)
    assert any_tokenizer.decode(begun).endswith("\ufffd")
    assert feed(IncrementalDetokenizer(any_tokenizer, prompt_token_ids=begun), ids[-2:])[-2:] == ["あ!", "あ!"]
    broken = feed(IncrementalDetokenizer(any_tokenizer, prompt_token_ids=begun), letter)[-1]
    assert broken == what_decoding_adds(any_tokenizer, begun, letter)
    assert "\ufffd" not in broken, "the prompt's text has it already"


@settings(max_examples=100)
@given(st.lists(st.integers(0, 399), max_size=40), st.lists(st.integers(0, 399), max_size=40), st.booleans())
def test_any_output_after_any_prompt_adds_the_text_that_decoding_adds(tokenizer, prompt, ids, skip):
    text = feed(IncrementalDetokenizer(tokenizer, skip, prompt), ids)[-1]
    assert text == what_decoding_adds(tokenizer, prompt, ids, skip)


@settings(max_examples=150)
@given(st.data())
def test_incremental_text_does_not_depend_on_how_the_tokens_are_split(any_tokenizer, data):
    """Also with bytes that are no text: there, decoding at once would take back characters that a stream has sent."""
    any_ids = st.integers(0, any_tokenizer.vocab_size)
    some_ids = st.sampled_from(any_tokenizer.encode("the あ🎉 fox"))
    prompt, ids = (data.draw(st.lists(st.one_of(any_ids, some_ids), max_size=30)) for _ in range(2))
    texts = feed(IncrementalDetokenizer(any_tokenizer, prompt_token_ids=prompt), ids)
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    for chunk in (2, 5, 30):
        assert feed(IncrementalDetokenizer(any_tokenizer, prompt_token_ids=prompt), ids, chunk)[-1] == texts[-1]
    expected = what_decoding_adds(any_tokenizer, prompt, ids)
    assert texts[-1] == expected or "\ufffd" in any_tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize("num_broken", range(10, 20))
def test_text_after_many_broken_bytes_does_not_depend_on_how_the_tokens_are_split(llama2_tokenizer, num_broken):
    ids = [3 + byte for byte in b"\x80" * num_broken + "a🎉a".encode()]
    texts = {feed(IncrementalDetokenizer(llama2_tokenizer), ids, chunk)[-1] for chunk in (1, 2, 5, 30)}
    assert len(texts) == 1


def test_the_cost_of_a_token_does_not_grow_with_a_run_of_broken_bytes(tokenizer):
    broken = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.token_text(token_id) == "\ufffd"]
    assert len(broken) > 100
    ids = random.Random(0).choices(broken, k=1000)
    detokenizer = IncrementalDetokenizer(tokenizer)
    texts = feed(detokenizer, ids)
    assert texts[-1] == tokenizer.decode(ids)
    assert len(texts[500]) > 200
    assert len(detokenizer._window) < 40


# ---- stop strings


def text_with_stops(tokenizer, ids, stop, **kwargs):
    text = SequenceText(tokenizer, SamplingParams(stop=stop, **kwargs))
    return text, text.append(ids)


def test_a_stop_string_ends_the_text_in_the_token_that_completes_it(tokenizer):
    ids = tokenizer.encode("the quick brown fox jumps")
    text, num_taken = text_with_stops(tokenizer, ids, ["ick br", "fox"])
    assert text.stop == "ick br"
    assert text.text == "the qu"
    assert tokenizer.decode(ids[:num_taken]).startswith("the quick br")
    assert "ick br" not in tokenizer.decode(ids[: num_taken - 1])
    text, _ = text_with_stops(tokenizer, ids, "ick br", include_stop_str_in_output=True)
    assert text.text == "the quick br"


def test_text_without_a_stop_string_is_complete_after_finish(tokenizer):
    ids = tokenizer.encode("the quick brown fox")
    text, num_taken = text_with_stops(tokenizer, ids, ["fox jumps"])
    assert num_taken == len(ids)
    assert text.text == "the quick brown "
    text.finish()
    assert text.text == "the quick brown fox"
    assert text.stop is None


def test_stop_strings_are_ignored_before_min_tokens(tokenizer):
    ids = tokenizer.encode("STOP the fox STOP")
    first = next(n for n in range(len(ids)) if "STOP" in tokenizer.decode(ids[:n]))
    assert text_with_stops(tokenizer, ids, "STOP")[0].text == ""
    text, _ = text_with_stops(tokenizer, ids, "STOP", min_tokens=first)
    assert text.text == "STOP the fox "
    text, _ = text_with_stops(tokenizer, ids, "STOP", min_tokens=first - 1)
    assert text.text == ""


def test_stop_strings_are_searched_for_after_a_tag(any_tokenizer):
    text = "so, STOP.<end>\n STOP, the fox"
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    for stop, expected in (
        ("STOP", "so, STOP.<end>\n "),
        (["\n", ">", "fox"], "so, STOP.<end>\n STOP, the "),
        ("nd", text),
    ):
        after = {"stop_after": "<end>", "stop_or_from": "<other>"}
        found, num_taken = text_with_stops(any_tokenizer, ids, stop, **after)
        found.finish()
        assert (found.text, found.stop is None) == (expected, num_taken == len(ids) and expected == text)
    found, _ = text_with_stops(any_tokenizer, ids, ["STOP", "<end"], stop_after="fox", stop_or_from="<end>")
    assert found.text == "so, STOP."
    found, _ = text_with_stops(any_tokenizer, ids, ["so"], stop_after="fox")
    assert found.text == text, "nothing is held back before the tag"


def test_a_long_run_of_special_tokens_does_not_hold_the_window(tokenizer):
    special = min(tokenizer.special_ids)
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.append(tokenizer.encode("the fox"))
    for _ in range(1000):
        detokenizer.append([special])
    detokenizer.append(tokenizer.encode(" jumps"))
    assert detokenizer.text == "the fox jumps"
    assert len(detokenizer._window) < 20
