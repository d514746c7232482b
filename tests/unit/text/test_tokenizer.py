import random
import re
from itertools import pairwise

import pytest
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers_for_tests import byte_level, byte_level_with_bos, sentencepiece_like, unigram, word_piece, write

from raycore.errors import InvalidCheckpoint, InvalidRequest
from raycore.text.tokenizer import Tokenizer
from raycore.text.tokenizer_files import read_eos_token_id, read_tokenizer_text

TEXTS = ["Hello, world!", "the  quick\n\nfox ", "你好 wörld 🎉", "x"]


def test_encoded_text_is_decoded_to_the_same_text(any_tokenizer):
    for text in TEXTS:
        ids = any_tokenizer.encode(text, add_special_tokens=False)
        assert any_tokenizer.decode(ids) == text


def test_batches_are_encoded_and_decoded_as_their_single_texts(any_tokenizer):
    assert any_tokenizer.encode_batch(TEXTS) == [any_tokenizer.encode(text) for text in TEXTS]
    plain = any_tokenizer.encode_batch(TEXTS, add_special_tokens=False)
    assert plain == [any_tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    assert plain == [any_tokenizer._native.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert any_tokenizer.encode_batch([]) == []
    assert any_tokenizer.decode_batch(plain) == [any_tokenizer.decode(ids) for ids in plain]


def test_special_tokens_go_around_a_text_as_tokenizer_json_says(tokenizer, llama3_tokenizer, llama2_tokenizer):
    for with_bos in (llama3_tokenizer, llama2_tokenizer):
        ids = with_bos.encode("the fox", add_special_tokens=False)
        assert with_bos.encode("the fox") == [with_bos.bos_token_id, *ids]
    assert tokenizer.encode("the fox") == tokenizer.encode("the fox", add_special_tokens=False)


def test_special_tokens_are_read_and_skipped(tokenizer):
    ids = tokenizer.encode("<|im_start|>the fox</s>")
    assert ids[0] in tokenizer.special_ids
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "the fox"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the fox</s>"


def test_special_tokens_come_from_whichever_file_names_them(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "eos_token": None, "additional_special_tokens": ["<extra>"]}
    path = write(tmp_path, byte_level(), config, special_tokens_map_json={"eos_token": {"content": "<|im_end|>"}})
    config_first = Tokenizer.from_dir(path)
    assert config_first.bos_token_id == config_first.encode("<s>")[0]
    assert config_first.encode("<extra>")[0] in config_first.special_ids
    assert config_first.eos_token_id is read_eos_token_id(path) is None
    (path / "tokenizer_config.json").unlink()
    map_only = Tokenizer.from_dir(path)
    assert map_only.bos_token_id is None
    assert map_only.eos_token_id == map_only.encode("<|im_end|>")[0] == read_eos_token_id(path)


def test_the_end_of_sequence_may_be_an_ordinary_token_or_a_new_one(tmp_path):
    for name in ("the", "<new>"):
        path = write(tmp_path, byte_level(), {"eos_token": name})
        assert read_eos_token_id(path) == Tokenizer.from_dir(path).eos_token_id
    assert read_eos_token_id(tmp_path / "nowhere") is None


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_the_tokenizer_text_for_other_libraries_has_the_same_vocabulary(make, tmp_path):
    native = make()
    path = write(tmp_path, native)
    text, num_ids = read_tokenizer_text(path)
    assert text == (path / "tokenizer.json").read_text(), "nothing has to be added"
    assert num_ids == native.get_vocab_size() == len(native.get_vocab())
    native.enable_truncation(2)
    write(tmp_path, native, {"pad_token": "<pad>"})
    text, num_ids = read_tokenizer_text(path)
    made = NativeTokenizer.from_str(text)
    assert num_ids == native.get_vocab_size() + 1
    assert made.get_added_tokens_decoder()[num_ids - 1].content == "<pad>"
    assert len(made.encode("the the the the").ids) > 2
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.json isn't a tokenizer"):
        read_tokenizer_text(path)


def test_token_text_keeps_the_space_of_a_word(tokenizer, llama2_tokenizer):
    for one in (tokenizer, llama2_tokenizer):
        ids = one.encode("x the the", add_special_tokens=False)
        assert one.token_text(ids[-1]) == " the"
        assert "".join(map(one.token_text, ids)).strip() == "x the the"
    assert tokenizer.token_text(tokenizer.eos_token_id) == "</s>"
    assert tokenizer.token_text(10**6) == ""


@pytest.fixture(scope="module", params=[byte_level, byte_level_with_bos, sentencepiece_like, unigram, word_piece])
def every_tokenizer(request, tmp_path_factory):
    return Tokenizer.from_dir(write(tmp_path_factory.mktemp("tokenizer"), request.param()))


@pytest.mark.parametrize("text", ["the fox", "  the  quick (the fox)", "the\n\n你🎉 fox", "the</s> fox"])
def test_token_starts_are_the_offsets_of_tokens_in_the_text(every_tokenizer, text):
    starts, ids = every_tokenizer.token_starts(text), every_tokenizer.encode(text)
    pieces = [text[start:end] for start, end in pairwise([*starts, len(text)])]
    assert (len(starts), "".join(pieces)) == (len(ids), text)
    assert text.rindex(" ") in starts, "a word begins with the space before it"


def long_text(seed: int) -> str:
    """Words, long words, spaces and characters of several tokens, so that any place may be where the text is cut."""
    draw = random.Random(seed)
    pieces = ["the", "fox", "(the)", "\n\n", "你🎉", " ", "</s>", "naïve", "x" * 150, " " * 40, "12345678", "abc" * 60]
    return "".join(draw.choice(pieces) + draw.choice(["", " "]) for _ in range(3000))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_part_of_a_long_text_has_the_same_tokens_as_the_whole(every_tokenizer, side):
    for seed in range(5):
        text = long_text(seed)
        plain = every_tokenizer.encode(text, add_special_tokens=False)
        for most in (0, 1, 30, 500):
            kept = plain[len(plain) - most :] if side == "left" else plain[:most]
            assert every_tokenizer.encode_within([text], most, False, side) == [kept]


def spells(ids, spelling):
    return any(ids[start : start + len(spelling)] == spelling for start in range(len(ids)))


@pytest.mark.parametrize("word", ["the", "fox", "brown fox", "jumps", "paris"])
def test_the_spellings_of_a_bad_word_cover_it_anywhere_in_a_text(every_tokenizer, word):
    for given in (word, f" {word}"):
        spellings = every_tokenizer.bad_words_token_ids([given])
        for before in ("", " ", "the ", "the the ", "\n", "\n ", "(", "(the)\n"):
            ids = every_tokenizer.encode(before + word)
            assert any(spells(ids, spelling) for spelling in spellings), before
        for other in ("a lazy dog", "over", "café" if every_tokenizer.has_byte_fallback else "a"):
            assert not any(spells(every_tokenizer.encode(other), spelling) for spelling in spellings)
        assert not any(spells(one, other) for one in spellings for other in spellings if one is not other)


def test_bad_words_are_spelled_with_and_without_a_space(tokenizer, llama2_tokenizer):
    assert tokenizer.encode("the") != tokenizer.encode(" the")
    assert tokenizer.bad_words_token_ids(["the"]) == [tokenizer.encode("the"), tokenizer.encode(" the")]
    assert tokenizer.bad_words_token_ids([" the"]) == tokenizer.bad_words_token_ids(["the"])
    # where the space is a token of its own, the word is found behind it
    assert tokenizer.encode(" ~")[-1:] == tokenizer.encode("~")
    assert tokenizer.bad_words_token_ids(["~"]) == [tokenizer.encode("~")]
    # the two forms may have different numbers of tokens
    assert sorted(map(len, tokenizer.bad_words_token_ids(["fox"]))) == [1, 2]
    assert sorted(map(len, llama2_tokenizer.bad_words_token_ids(["the"]))) == [1, 2]
    assert tokenizer.bad_words_token_ids(["\n"]) == [tokenizer.encode("\n")]
    assert tokenizer.bad_words_token_ids([]) == []


@pytest.mark.parametrize("word", ["你好", "the 你", "\n"])
def test_a_bad_word_that_the_tokenizer_cannot_encode_is_refused(tmp_path, word):
    tokenizer = Tokenizer.from_dir(write(tmp_path, word_piece()))
    with pytest.raises(InvalidRequest, match=f"bad_words contains {re.escape(repr(word))}, for"):
        tokenizer.bad_words_token_ids(["the", word])


def test_damaged_tokenizer_files_are_named(tmp_path):
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.json doesn't exist.*AutoTokenizer"):
        Tokenizer.from_dir(tmp_path)
    path = write(tmp_path, byte_level())
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer_config\.json isn't valid JSON"):
        Tokenizer.from_dir(path)
    (path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InvalidCheckpoint, match="holds a list"):
        Tokenizer.from_dir(path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.json isn't a tokenizer"):
        Tokenizer.from_dir(path)


CHAT = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Hello"}]
TEMPLATE = """{{ bos_token }}
    {%- for m in messages %}
        {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
        {%- elif loop.index > 2 %}{% break %}
        {%- else %}[{{ m.content }}]{% endif %}
    {%- endfor %}{% if add_generation_prompt %}>{% endif %}"""


def chat(tokenizer, messages=CHAT, template=TEMPLATE, **kwargs):
    return tokenizer.apply_chat_template(messages, chat_template=template, **kwargs)


def test_a_chat_template_renders_a_conversation_to_text(tokenizer):
    assert chat(tokenizer) == "<s>[Hi <b>]Hello</s>>"
    assert chat(tokenizer, add_generation_prompt=False) == "<s>[Hi <b>]Hello</s>"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(tokenizer, [{"role": "user", "content": parts}]) == "<s>[one\ntwo]>"


def test_a_chat_template_can_continue_the_last_message(tokenizer):
    kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(tokenizer, **kwargs) == "<s>[Hi <b>]Hello"
    spaced = [*CHAT[:1], {"role": "assistant", "content": " so far "}]
    assert chat(tokenizer, spaced, **kwargs) == "<s>[Hi <b>] so far "
    assert chat(tokenizer, spaced, "{{ messages[-1].content | trim }}!", **kwargs) == "so far"
    assert spaced[1]["content"] == " so far "
    with pytest.raises(InvalidRequest, match="leaves it out"):
        chat(tokenizer, CHAT, "nothing", **kwargs)
    with pytest.raises(InvalidRequest, match="only one of them"):
        chat(tokenizer, continue_final_message=True)


def test_chat_templates_have_the_functions_and_variables_of_hugging_face(tokenizer):
    assert chat(tokenizer, template="{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <b>"}'
    assert (
        chat(tokenizer, [{"role": "u", "content": "é"}], "{{ messages | tojson }}") == '[{"role": "u", "content": "é"}]'
    )
    assert chat(tokenizer, template="{{ strftime_now('%Y') }}").isdigit()
    assert chat(tokenizer, template="{{ tools[0].name }}{{ flag }}", tools=[{"name": "f"}], flag=3) == "f3"
    assert chat(tokenizer, template="{{ tools is none }}") == "True"


def test_chat_templates_are_found_in_every_file_that_may_hold_them(tmp_path):
    def text_of(tokenizer, **kwargs):
        return tokenizer.apply_chat_template(CHAT, **kwargs)

    path = write(tmp_path, byte_level())
    with pytest.raises(InvalidRequest, match=r"no default chat template \(found: none\)"):
        text_of(Tokenizer.from_dir(path))
    write(path, byte_level(), {"chat_template": "from config"})
    assert text_of(Tokenizer.from_dir(path)) == "from config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(path, byte_level(), {"chat_template": named})
    tokenizer = Tokenizer.from_dir(path)
    assert [text_of(tokenizer), text_of(tokenizer, tools=[])] == ["plain", "tools"]
    assert text_of(tokenizer, chat_template="tool_use") == "tools"
    write(path, byte_level(), {"chat_template": named}, chat_template_jinja="from file")
    assert text_of(Tokenizer.from_dir(path)) == "from file"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("Hi", "messages is a str"),
        ({"role": "user"}, "messages is a dict"),
        ([], "messages is empty"),
        (["Hi"], r"messages\[0\] is 'Hi'"),
        ([CHAT[0], {"content": "Hi"}], r"messages\[1\] has role None"),
        ([CHAT[0], {"role": "user"}], r"messages\[1\] .*has no 'content'"),
        ([{"role": "user", "content": 3}], r"messages\[0\] has content 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\] has a content part"),
    ],
)
def test_messages_of_the_wrong_shape_are_named(tokenizer, messages, says):
    with pytest.raises(InvalidRequest, match=says):
        chat(tokenizer, messages)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template refuses these messages: roles must alternate"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{% if %}", "chat template fails on these messages: TemplateSyntaxError"),
        ("{{ messages[0].content + 3 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_chat_templates_that_fail_are_refused_with_the_reason(tokenizer, template, says):
    with pytest.raises(InvalidRequest, match=says):
        chat(tokenizer, template=template)


def test_the_bytes_of_tokens_spell_the_text(any_tokenizer):
    text = "naïve 你好 🙂 schön"
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    spelled = [any_tokenizer.token_bytes(token_id) for token_id in ids]
    assert b"".join(spelled).decode().lstrip() == text
    assert any("\ufffd" in any_tokenizer.token_text(token_id) for token_id in ids)
    special = any_tokenizer.encode("", add_special_tokens=True)
    assert all(any_tokenizer.token_bytes(i) == any_tokenizer.token_text(i).encode() for i in special)


def test_a_token_for_the_replacement_character_has_its_bytes(tmp_path):
    native = sentencepiece_like()
    native.add_tokens(["▁\ufffd"])
    tokenizer = Tokenizer.from_dir(write(tmp_path, native))
    token_id = native.token_to_id("▁\ufffd")
    assert tokenizer.token_bytes(token_id) == " \ufffd".encode()
