"""Tokenizers in GGUF files encode and decode as transformers' own of the same model."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers_for_tests import byte_level as small_byte_level

from raycore.errors import InvalidCheckpoint
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer import Tokenizer
from raycore.text.tokenizer_files import read_eos_token_id, read_tokenizer_text

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
gguf_files = pytest.importorskip("gguf_files")
transformers = pytest.importorskip("transformers")

TEXTS = [
    "Hello, world! You're here, it's 1234567 and I'LL be 3.14 o'clock.",
    "  two spaces\n\n\tand a tab   \r\n\r\n  x = y+1;//path/to\n",
    "naïve café 你好 世界 schön Ünïcode 😀 کتاب ひらがなカタカナ",
    "e\u0301 combined, CamelCaseWords HTTPServer snake_case",
    "<s>user</s> <|im_start|>system\nBe brief.<|im_end|>\n<|im_start|> tool_call",
    "",
    " ",
    "the quick brown fox jumps over the lazy dog. " * 3,
]
CORPUS = [
    *(text for text in TEXTS if "<" not in text),
    "the then there these hello world quick brown 123 456 you're it's",
] * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write(path: Path, **metadata) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        name = key if key.startswith("tokenizer.chat") else f"tokenizer.ggml.{key}"
        gguf_files.add_entry(writer, name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary and its merges."""
    from tokenizers import Tokenizer as Native
    from tokenizers import models, pre_tokenizers, trainers

    native = Native(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    native.train_from_iterator(CORPUS, trainer)
    model = json.loads(native.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def byte_level(path: Path, pre: str, **more) -> Path:
    vocab, merges = trained()
    tokens = [*sorted(vocab, key=vocab.get), *SPECIAL]
    return write(
        path,
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=[1] * len(vocab) + [3] * len(SPECIAL),
        merges=[" ".join(merge) for merge in merges],
        **more,
    )


def same(found: Tokenizer, expected) -> None:
    for text in TEXTS:
        ids = expected.encode(text)
        assert found.encode(text) == ids, text
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def test_qwens(tmp_path):
    vocab, merges = trained()
    expected = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges)
    expected.add_special_tokens({"additional_special_tokens": SPECIAL})
    same(Tokenizer.from_dir(byte_level(tmp_path / "model.gguf", "qwen2")), expected)


def test_gpt_2s(tmp_path):
    vocab, merges = trained()
    expected = transformers.GPT2Tokenizer(vocab=vocab, merges=merges, unk_token=None, bos_token=None, eos_token=None)
    expected.add_special_tokens({"additional_special_tokens": SPECIAL})
    same(Tokenizer.from_dir(byte_level(tmp_path / "model.gguf", "gpt-2")), expected)


def test_a_checkpoints_tokenizer_is_written_to_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 403, "eos_token_id": 1}))
    small_byte_level().save(str(tmp_path / "tokenizer.json"))
    entries = gguf_files.tokenizer_metadata(tmp_path)
    path = write(
        tmp_path / "model.gguf", **{key.removeprefix("tokenizer.ggml."): each for key, each in entries.items()}
    )
    expected, found = Tokenizer.from_dir(tmp_path), Tokenizer.from_dir(path)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    assert len(entries["tokenizer.ggml.tokens"]) == 403


@pytest.mark.parametrize("pre", ["llama-bpe", "dbrx", "gpt-4o", "tekken", "smollm", "seed-coder", "deepseek-v3"])
def test_every_text_comes_back(pre, tmp_path):
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path / "model.gguf", pre, add_bos_token=False))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_words_are_cut_as_the_models_tokenizers_do(tmp_path):
    """By the expressions' meaning: how many digits and letters are together."""

    def cut(pre: str, text: str) -> list[str]:
        from raycore.text.tokenizer_files import read_tokenizer_files

        native = read_tokenizer_files(byte_level(tmp_path / f"{pre}.gguf", pre)).native
        return [piece for piece, _ in native.pre_tokenizer.pre_tokenize_str(text)]

    assert cut("llama-bpe", "1234 don't") == ["123", "4", "Ġdon", "'t"]
    assert cut("qwen2", "1234 DON'T") == ["1", "2", "3", "4", "ĠDON", "'T"]
    assert cut("smollm", "1234 DON'T") == ["1", "2", "3", "4", "ĠDON", "'", "T"]
    assert cut("gpt-2", "1234 don't") == ["1234", "Ġdon", "'t"]
    assert cut("gpt-4o", "HTTPServer 1234 don't") == ["HTTPServer", "Ġ", "123", "4", "Ġdon't"]
    assert cut("tekken", "12 helloWorld") == ["1", "2", "Ġhello", "World"]
    assert [len(piece) for piece in cut("deepseek-v3", "1234 世界abc")] == [3, 1, 1, 6, 3]


def test_llama_3_begins_texts(tmp_path):
    bos = len(trained()[0])
    path = byte_level(tmp_path / "model.gguf", "llama-bpe", bos_token_id=bos, eos_token_id=bos + 2)
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer.encode("a")[0] == bos
    assert bos not in tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.bos_token_id == bos
    assert tokenizer.eos_token_id == bos + 2
    assert read_eos_token_id(path) is None  # the description has it


def test_a_token_that_is_one_is_not_put_together_by_merges(tmp_path):
    """As Llama 3 has it: `ignore_merges`."""
    vocab, merges = trained()
    tokens = [*sorted(vocab, key=vocab.get), "Ġxylophone"]
    parts = {"model": "gpt2", "tokens": tokens, "merges": [" ".join(merge) for merge in merges]}
    found = Tokenizer.from_dir(write(tmp_path / "a.gguf", pre="llama-bpe", add_bos_token=False, **parts))
    assert found.encode(" xylophone") == [len(vocab)]
    assert len(Tokenizer.from_dir(write(tmp_path / "b.gguf", pre="dbrx", **parts)).encode(" xylophone")) > 1


def sentencepiece() -> tuple[list[str], list[float], list[int]]:
    """A vocabulary with scores, as Llama 2's."""
    words = {"▁", "▁the", "▁quick", "▁brown", "▁hello", "▁wor", "▁world", "ll", "he", "th", "▁t", "▁th", "wor", "ld"}
    parts = {word[:end] for word in words for end in range(1, len(word) + 1)}
    letters = sorted({letter for text in TEXTS for letter in text if letter.isascii() and letter.isprintable()} - {" "})
    pieces = [*letters, *sorted(parts - set(letters), key=lambda piece: (len(piece), piece))]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        "<|im_start|>",
        "<|im_end|>",
    ]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0, 0.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [3, 4]
    return tokens, scores, kinds


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepieces(has_prefix, tmp_path):
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Native
    from transformers.convert_slow_tokenizer import generate_merges

    tokens, scores, kinds = sentencepiece()
    path = write(
        tmp_path / "model.gguf",
        model="llama",
        tokens=tokens,
        scores=scores,
        token_type=kinds,
        add_space_prefix=has_prefix,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    native = Native(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if has_prefix else []
    native.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strips = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    native.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strips])
    native.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    native.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_start|>"])
    native.add_tokens([AddedToken("<|im_end|>", normalized=False)])
    found = Tokenizer.from_dir(path)
    for text in TEXTS:
        ids = native.encode(text).ids
        assert found.encode(text) == ids, text
        assert found.decode(ids, skip_special_tokens=False) == native.decode(ids, skip_special_tokens=False)
    assert found.special_ids == {0, 1, 2, len(tokens) - 2}
    assert json.loads(read_tokenizer_text(path).json)["model"]["type"] == "BPE"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_constrained_outputs_of_a_files_tokens_follow_a_schema(kind, tmp_path):
    """Whichever of the allowed tokens comes."""
    path = tmp_path / "model.gguf"
    if kind == "gpt2":
        byte_level(path, "qwen2")
    else:
        tokens, scores, kinds = sentencepiece()
        write(path, model="llama", tokens=tokens, scores=scores, token_type=kinds, bos_token_id=1, eos_token_id=2)
    tokenizer = Tokenizer.from_dir(path)
    schema = {"type": "array", "items": {"enum": ["the quick", "brown wörld", 17]}, "minItems": 1, "maxItems": 4}
    end = tokenizer.vocab_size - 1
    compiler = GrammarCompiler(str(path), tokenizer.vocab_size, [end])
    rng, found = random.Random(0), set()
    for _ in range(20):
        matcher, output = compiler.matcher(StructuredOutputsParams(json=schema)), []
        while end not in output:
            output.append(rng.choice(np.flatnonzero(matcher.allowed_after(np.array(output, np.int32)))))
        found |= set(json.loads(tokenizer.decode(output[:-1], skip_special_tokens=False)))
    assert found == set(schema["items"]["enum"])


def test_chat_templates_by_name(tmp_path):
    texts = {"tokenizer.chat_template": "{{ 'plain' }}", "tokenizer.chat_template.tool_use": "{{ 'tools' }}"}
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path / "model.gguf", "qwen2", **texts))
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{}]) == "tools"


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "tokenizer.ggml.model is missing"),
        ({"model": "bert"}, "tokenizer.ggml.model='bert'"),
        ({"model": "gpt2", "tokens": ["a"], "pre": "unknown-bpe"}, "tokenizer.ggml.pre='unknown-bpe'"),
        ({"model": "gpt2", "tokens": ["a"]}, "tokenizer.ggml.pre is missing"),
        ({"model": "gpt2", "tokens": ["a"], "pre": "qwen2", "merges": ["a b"]}, "'a b': expected two tokens"),
        ({"model": "llama", "tokens": ["a"]}, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "tokens": ["a"], "scores": [0.0, 1.0]}, "scores has 2 elements: expected 1"),
        ({"model": "llama", "tokens": ["a"], "scores": [0.0], "bos_token_id": 1}, "bos_token_id=1"),
    ],
)
def test_what_is_not_read_is_refused_by_name(metadata, words, tmp_path):
    path = write(tmp_path / "model.gguf", **metadata)
    with pytest.raises(InvalidCheckpoint) as caught:
        Tokenizer.from_dir(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
