"""What needs a tokenizer is refused where there is none."""

import pytest

from raycore.errors import InvalidRequest
from raycore.text.hf_tokenizer import HfTokenizer
from raycore.text.no_tokenizer import NoTokenizer

CALLS = {
    "encode": ("text",),
    "decode": ([1],),
    "token_text": (1,),
    "token_starts": ("text",),
    "bad_words_token_ids": (["word"],),
    "apply_chat_template": ([{"role": "user", "content": "text"}],),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_name_the_option(name: str) -> None:
    with pytest.raises(InvalidRequest, match="skip_tokenizer_init=True"):
        getattr(NoTokenizer(10), name)(*CALLS[name])


def test_what_needs_no_text_is_there() -> None:
    tokenizer = NoTokenizer(10)
    assert tokenizer.vocab_size == 10
    assert tokenizer.bad_words_token_ids(()) == []
    with pytest.raises(AttributeError, match="future"):
        tokenizer.future  # noqa: B018


def test_users_get_no_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match=r"get_tokenizer\(\) needs a tokenizer"):
        HfTokenizer.of(NoTokenizer(10))
