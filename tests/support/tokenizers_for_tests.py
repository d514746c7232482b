"""Small tokenizers of the kinds that Llama 3, Qwen and Llama 2 checkpoints have, made on the spot."""

import json

from tokenizers import Tokenizer as NativeTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from raycore.demo import DEMO_MODEL_DIR

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Hello, world! You are a helpful assistant. STOP here and there.",
    "naïve café, 你好 世界, schön",
] * 5
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level():
    """Bytes as characters, as Qwen and Llama 3 have it. Every byte is a token, so any text can be spelled."""
    native = NativeTokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    native.train_from_iterator(CORPUS, trainer)
    return native


def byte_level_with_bos():
    """As Llama 3: the post-processor puts `<s>` before every text."""
    native = byte_level()
    bos = ("<s>", native.token_to_id("<s>"))
    native.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[bos]),
        ]
    )
    return native


def sentencepiece_like():
    """As Llama 2: spaces as `▁`, one put before the text, and bytes for characters that have no token."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted(set("".join(CORPUS[:2])) - {" "})
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, "▁", *letters])}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("l", "l"), ("▁", "w"), ("o", "r")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    native = NativeTokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    native.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    native.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    native.add_special_tokens(["<unk>", "<s>", "</s>"])
    native.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return native


def unigram():
    """As newer conversions of SentencePiece's unigrams: the decoder treats the whole first token differently."""
    bytes_ = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    letters = [(letter, -6.0) for letter in sorted(set("".join(CORPUS[:2])) - {" "})]
    special = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    words = [("▁", -5.0), ("▁the", -2.0), ("▁qu", -3.0), ("ll", -4.0)]
    native = NativeTokenizer(models.Unigram([*special, *bytes_, *letters, *words], 0, byte_fallback=True))
    native.pre_tokenizer = pre_tokenizers.Metaspace()
    native.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    native.add_special_tokens(["<unk>", "<s>", "</s>"])
    return native


def word_piece():
    """As BERT: words of lower-case letters, and their parts after `##`. Other characters are unknown."""
    letters = sorted(set("".join(CORPUS[:2]).lower()) - {" "})
    texts = ["[UNK]", *SPECIAL, *letters, *(f"##{letter}" for letter in letters), "the", "fox", "par", "##is", "("]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(texts))}
    native = NativeTokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    native.normalizer = normalizers.Lowercase()
    native.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    native.decoder = decoders.WordPiece()
    native.add_special_tokens(SPECIAL)
    return native


def write(path, native, config=None, **files):
    """A checkpoint's tokenizer files. Further ones by name, `_` for the dot: text, or a JSON value."""
    path.mkdir(parents=True, exist_ok=True)
    native.save(str(path / "tokenizer.json"))
    files["tokenizer_config_json"] = {"bos_token": "<s>", "eos_token": "</s>", **(config or {})}
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        (path / f"{stem}.{suffix}").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def demo_with_special_tokens(path, texts):
    """The demo model's tokenizer files, in which these texts are special tokens, too."""
    config = json.loads((DEMO_MODEL_DIR / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] += texts
    return write(path, NativeTokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json")), config)
