"""The tokenizer in the metadata of a GGUF file, as tokenizer.json and tokenizer_config.json would have it.

GGUF has the vocabulary, and only names the rest: how texts are cut into words, which has a table here. Sources: the
tokenizer.json files of the models that the names stand for.
"""

from __future__ import annotations

__all__ = ["tokenizer_config", "tokenizer_json"]

from typing import Any

from raycore.checkpoint.gguf.header import GgufFile
from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields, shortened

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
"""Types of tokens. All others are ordinary ones."""
_SPACE = "▁"
_MODEL, _CUTS = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_THREE_DIGITS, _ONE_DIGIT = r"\p{N}{1,3}", r"\p{N}"
_LLAMA3, _QWEN2 = [_WORDS % _THREE_DIGITS], [_WORDS % _ONE_DIGIT]
_GPT4O = [_CASED % (_ENDINGS + "?", _ENDINGS + "?", _THREE_DIGITS)]
_TEKKEN = [_CASED % ("", "", _ONE_DIGIT)]
_SEED = [_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES]
_DEEPSEEK3 = [
    _THREE_DIGITS,
    "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001  # Han, Hiragana and Katakana
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
]
_GPT2: list[str] = []
"""The regular expression that the library's ByteLevel has itself."""
_DIGITS = ["digits"]
"""Each digit by itself, and then as GPT-2."""
_EXPRESSIONS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "tekken": _TEKKEN,
    "seed-coder": _SEED,
}
"""By GGUF's name: the expressions that cut a text, one after the other."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""Where a word that is a token is not put together by merges."""
_BEGIN = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""Where a text begins with a token unless the file says otherwise."""
_COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Where characters that can be composed are, by Unicode's normalization form C."""
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's special tokens that don't take up the white space after them."""


def tokenizer_json(file: GgufFile) -> dict[str, Any]:
    """Return what tokenizer.json would say.

    Raises:
        InvalidCheckpoint: the file has no tokenizer, or one of a kind that isn't read. The message names it.
    """
    return _Tokenizer(file).whole()


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return what tokenizer_config.json would say: the texts of special tokens, and chat templates."""
    fields, tokens = JsonFields(str(file.path), file.metadata), file.array("tokenizer.ggml.tokens") or []
    config: dict[str, Any] = {}
    for name, key in _NAMED.items():
        token_id = _token_id(fields, key, tokens)
        if token_id is not None:
            config[name] = tokens[token_id]
    prefix = "tokenizer.chat_template"
    texts = {
        key.removeprefix(prefix).lstrip("."): text for key, text in file.metadata.items() if key.startswith(prefix)
    }
    templates = [{"name": name or "default", "template": text} for name, text in texts.items() if isinstance(text, str)]
    return config | ({"chat_template": templates} if templates else {})


def _token_id(fields: JsonFields, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    found = fields.optional_int(key, low=0)
    if found is not None and found >= len(tokens):
        raise fields.error(key, f"the id of one of the {len(tokens)} tokens")
    return found


class _Tokenizer:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._fields = JsonFields(str(file.path), file.metadata)
        self._kind = file.metadata.get(_MODEL)
        if self._kind not in ("gpt2", "llama"):
            expected = "gpt2 or llama. Give another tokenizer by the option tokenizer"
            raise self._fields.error(_MODEL, expected)
        self._tokens: list[str] = file.array("tokenizer.ggml.tokens") or []
        if not self._tokens or str(self._tokens[0]) != self._tokens[0]:
            raise InvalidCheckpoint(f"{file.path}: tokenizer.ggml.tokens isn't a list of texts")
        self._kinds = self._numbers("token_type") or [1] * len(self._tokens)
        self._ids: dict[str, int] = {}
        for token_id, token in enumerate(self._tokens):
            self._ids.setdefault(token, token_id)

    def whole(self) -> dict[str, Any]:
        parts = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            "post_processor": self._post_processor(),
            **parts,
        }

    def _byte_level(self) -> dict[str, Any]:
        cuts = self._file.metadata.get(_CUTS)
        if not isinstance(cuts, str) or cuts not in _EXPRESSIONS:
            known = ", ".join(_EXPRESSIONS)
            raise self._fields.error(_CUTS, f"one of {known}. Give another tokenizer by the option tokenizer")
        expressions = _EXPRESSIONS[cuts]
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
            for each in expressions
            if expressions is not _DIGITS
        ]
        if expressions is _DIGITS:
            steps.append({"type": "Digits", "individual_digits": True})
        has_own = expressions in (_GPT2, _DIGITS)
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        return {
            "normalizer": {"type": "NFC"} if cuts in _COMPOSED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, {**level, "use_regex": has_own}]},
            "decoder": {**level, "use_regex": True},
            "model": self._bpe(self._given_merges(), ignore_merges=cuts in _WHOLE_WORDS),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        has_prefix = self._fields.bool_("tokenizer.ggml.add_space_prefix", default=True)
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        normalizers = [{"type": "Prepend", "prepend": _SPACE}, replaced] if has_prefix else [replaced]
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if has_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = _token_id(self._fields, "unknown", self._tokens)
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._bpe(
                self._scored_merges(),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback="<0x0A>" in self._ids,
            ),
        }

    def _bpe(self, merges: list[list[str]], **settings: Any) -> dict[str, Any]:
        plain = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "unk_token": None}
        return {"type": "BPE", **plain, **settings, "vocab": self._ids, "merges": merges}

    def _given_merges(self) -> list[list[str]]:
        found = self._file.array("tokenizer.ggml.merges")
        if not found:
            raise self._fields.error("tokenizer.ggml.merges", "a list of pairs of tokens")
        merges: list[list[str]] = []
        for merge in found:
            pair = str(merge).split(" ")
            if len(pair) != 2 or not {*pair, "".join(pair)} <= self._ids.keys():
                raise InvalidCheckpoint(
                    f"{self._file.path}: tokenizer.ggml.merges has {shortened(merge)}: expected two tokens with a "
                    "space between them, which together are another token"
                )
            merges.append(pair)
        return merges

    def _scored_merges(self) -> list[list[str]]:
        """Return all pairs of tokens that are a token together, by the scores of that token.

        As transformers does where it converts a SentencePiece model.
        """
        scores, ids = self._numbers("scores"), self._ids
        if scores is None:
            raise self._fields.error("tokenizer.ggml.scores", "a list of numbers")
        found: list[tuple[float, int, int, str, str]] = []
        for token_id, token in enumerate(self._tokens):
            if self._kinds[token_id] in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE):
                continue
            pairs = [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in ids and token[at:] in ids]
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
            found += [(-scores[token_id], -len(left), -len(right), left, right) for left, right in pairs]
        found.sort(key=lambda each: each[:3])
        return [[left, right] for *_, left, right in found]

    def _numbers(self, name: str) -> list[Any] | None:
        key = f"tokenizer.ggml.{name}"
        found = self._file.array(key)
        if found is not None and (len(found) != len(self._tokens) or isinstance(found[0], str)):
            expected = f"{len(self._tokens)} numbers, one for each token"
            raise InvalidCheckpoint(f"{self._file.path}: {key} has {len(found)} elements: expected {expected}")
        return found

    def _added_tokens(self) -> list[dict[str, Any]]:
        is_phi3 = self._kind == "llama" and self._file.metadata.get("general.architecture") == "phi3"
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": is_phi3 and token not in _PHI3_PLAIN,
                "normalized": False,
                "special": self._kinds[token_id] != _USER_DEFINED,
            }
            for token_id, token in enumerate(self._tokens)
            if self._kinds[token_id] in (_UNKNOWN, _CONTROL, _USER_DEFINED) and self._ids[token] == token_id and token
        ]

    def _post_processor(self) -> dict[str, Any] | None:
        """Return what puts tokens around a text."""
        begins = self._kind == "llama" or self._file.metadata.get(_CUTS) in _BEGIN
        around = {
            name: self._fields.bool_(f"tokenizer.ggml.add_{name}_token", default=default)
            for name, default in (("bos", begins), ("eos", False))
        }
        used = {name: _token_id(self._fields, name, self._tokens) for name, is_added in around.items() if is_added}
        given = {name: self._tokens[token_id] for name, token_id in used.items() if token_id is not None}
        if not given:
            return None

        def one(text: str, type_id: int) -> list[dict[str, Any]]:
            parts: list[dict[str, Any]] = [{"Sequence": {"id": text, "type_id": type_id}}]
            if "bos" in given:
                parts.insert(0, {"SpecialToken": {"id": given["bos"], "type_id": type_id}})
            if "eos" in given:
                parts.append({"SpecialToken": {"id": given["eos"], "type_id": type_id}})
            return parts

        special = {token: {"id": token, "ids": [self._ids[token]], "tokens": [token]} for token in given.values()}
        pair = [*one("A", 0), *one("B", 1)]
        return {"type": "TemplateProcessing", "single": one("A", 0), "pair": pair, "special_tokens": special}
