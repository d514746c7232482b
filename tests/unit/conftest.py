import pytest
from tokenizers_for_tests import byte_level, byte_level_with_bos, sentencepiece_like, unigram, write

from raycore.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece_like", "unigram"])
def any_tokenizer(request, tmp_path_factory):
    make = {"byte_level": byte_level, "sentencepiece_like": sentencepiece_like, "unigram": unigram}[request.param]
    return Tokenizer.from_dir(write(tmp_path_factory.mktemp(request.param), make()))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(write(tmp_path_factory.mktemp("plain"), byte_level()))


@pytest.fixture(scope="session")
def llama3_tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(write(tmp_path_factory.mktemp("llama3"), byte_level_with_bos()))


@pytest.fixture(scope="session")
def llama2_tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(write(tmp_path_factory.mktemp("llama2"), sentencepiece_like()))
