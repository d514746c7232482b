"""The prompts of a benchmark: random ones, or those of a file."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from raycore.cli.bench.choices import BACKENDS
from raycore.errors import InvalidConfig, InvalidRequest
from raycore.json_fields import shortened
from raycore.options.declared import json_object
from raycore.text.tokenizer import Tokenizer

_TRIES = 10
"""How often a text is cut and filled up until it has the length that is asked for."""
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048
"""Lengths of conversations that are used, in tokens: of both parts, of the prompt, and together."""
_LONGEST_REQUEST = 1 << 20

_DEFAULT_LENGTHS = 1024, 128

T = TypeVar("T")


class _Turn(msgspec.Struct):
    """What one side of a conversation says."""

    value: str


class _Conversation(msgspec.Struct):
    """An element of a ShareGPT file."""

    conversations: list[_Turn] = []

    @property
    def has_answer(self) -> bool:
        return len(self.conversations) >= 2


class _Line(msgspec.Struct):
    """A line of a file of prompts."""

    prompt: str
    output_tokens: int | None = None


class _Ratios(msgspec.Struct):
    """How far lengths may be from the chosen ones, relative to these."""

    input: Annotated[float, Meta(ge=0, lt=1)]
    output: Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class Sample:
    """A prompt, its number of tokens, and how many tokens are to be generated."""

    prompt: str
    prompt_len: int
    output_len: int


def samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
    """The prompts that the flags ask for.

    Raises:
        InvalidConfig: a flag is invalid, or the file can't be used.
    """
    if args.dataset_name not in DATASETS:
        raise InvalidConfig(f"--dataset-name {args.dataset_name} is not supported: use {', '.join(DATASETS)}")
    if args.num_prompts < 1:
        raise InvalidConfig(f"--num-prompts {args.num_prompts} isn't at least 1")
    found = DATASETS[args.dataset_name](args, tokenizer, np.random.default_rng(args.seed))
    for each in found:
        if each.prompt_len < 1 or each.output_len < 1 or each.prompt_len + each.output_len > _LONGEST_REQUEST:
            raise InvalidConfig(f"a prompt of {each.prompt_len} tokens, with {each.output_len} to generate, is no use")
    return found


def _length(args: argparse.Namespace, flag: str, default: int, general: str | None = None, least: int = 1) -> int:
    given = getattr(args, flag)
    if given is None and general is not None:
        given, flag = getattr(args, general), general
    if given is not None and given < least:
        raise InvalidConfig(f"--{flag.replace('_', '-')} {given} isn't at least {least}")
    return default if given is None else given


def text_of_length(tokenizer: Tokenizer, token_ids: Sequence[int], rng: np.random.Generator) -> tuple[str, int]:
    """A text of as many tokens as there are ids, and how many it has. Mostly those, as far as they have a text."""
    wanted, ids = len(token_ids), list(token_ids)
    text = ""
    for _ in range(_TRIES):
        text = tokenizer.decode_batch([ids], skip_special_tokens=True)[0]
        ids = tokenizer.encode(text, False)
        if len(ids) == wanted:
            break
        ids = ids[:wanted] + random_ids(tokenizer, max(0, wanted - len(ids)), rng)
    return text, len(tokenizer.encode(text, False))


def random_ids(tokenizer: Tokenizer, count: int, rng: np.random.Generator) -> list[int]:
    """Random token ids, of those that have a text of their own."""
    return rng.choice(_ids_with_texts(tokenizer), count).tolist()


@lru_cache(maxsize=1)
def _ids_with_texts(tokenizer: Tokenizer) -> list[int]:
    """The ids whose texts have just that token. Not, for example, those of special tokens and parts of characters."""
    texts = tokenizer.decode_batch([[token_id] for token_id in range(tokenizer.vocab_size)], skip_special_tokens=True)
    return [token_id for token_id, ids in enumerate(tokenizer.encode_batch(texts, False)) if ids == [token_id]]


def _random(args: argparse.Namespace, tokenizer: Tokenizer, rng: np.random.Generator) -> list[Sample]:
    input_len = _length(args, "random_input_len", _DEFAULT_LENGTHS[0], "input_len")
    output_len = _length(args, "random_output_len", _DEFAULT_LENGTHS[1], "output_len")
    ratios = _ratios(args.random_range_ratio)
    prefix = random_ids(tokenizer, _length(args, "random_prefix_len", 0, least=0), rng)
    found: list[Sample] = []
    for _ in range(args.num_prompts):
        lengths = [
            max(1, int(rng.integers(int(length * (1 - ratio)), int(np.ceil(length * (1 + ratio))) + 1)))
            for length, ratio in zip((input_len, output_len), ratios, strict=True)
        ]
        text, count = text_of_length(tokenizer, prefix + random_ids(tokenizer, lengths[0], rng), rng)
        found.append(Sample(text, count, lengths[1]))
    return found


def _ratios(text: str) -> tuple[float, float]:
    both = text if text.lstrip().startswith("{") else f'{{"input": {text}, "output": {text}}}'
    try:
        found = msgspec.json.decode(both, type=_Ratios)
    except msgspec.DecodeError:
        told = f"--random-range-ratio {text} isn't a number from 0 to below 1, or two of them in JSON"
        raise InvalidConfig(told) from None
    return found.input, found.output


def _prefix_repetition(args: argparse.Namespace, tokenizer: Tokenizer, rng: np.random.Generator) -> list[Sample]:
    prefix_len = _length(args, "prefix_repetition_prefix_len", 256)
    suffix_len = _length(args, "prefix_repetition_suffix_len", 256)
    output_len = _length(args, "prefix_repetition_output_len", 128, "output_len")
    num_prefixes = _length(args, "prefix_repetition_num_prefixes", 10)
    if not 1 <= num_prefixes <= args.num_prompts:
        raise InvalidConfig(f"--prefix-repetition-num-prefixes {num_prefixes} isn't from 1 to --num-prompts")
    found: list[Sample] = []
    for index in range(num_prefixes):
        prefix, _ = text_of_length(tokenizer, random_ids(tokenizer, prefix_len, rng), rng)
        for _ in range(len(range(index, args.num_prompts, num_prefixes))):
            suffix, _ = text_of_length(tokenizer, random_ids(tokenizer, suffix_len, rng), rng)
            text = prefix + suffix
            found.append(Sample(text, len(tokenizer.encode(text, False)), output_len))
    random.Random(args.seed).shuffle(found)
    return found


def _sharegpt(args: argparse.Namespace, tokenizer: Tokenizer, rng: np.random.Generator) -> list[Sample]:
    fixed = args.sharegpt_output_len if args.sharegpt_output_len is not None else args.output_len

    def used() -> Iterator[Sample]:
        conversations = _decoded(args, _file(args), list[_Conversation])
        for asked, answered in _in_order(args, [each.conversations[:2] for each in conversations if each.has_answer]):
            prompt_len = len(tokenizer.encode(asked.value, False))
            output_len = fixed if fixed is not None else len(tokenizer.encode(answered.value, False))
            is_long_enough = prompt_len >= _SHORTEST and (fixed is not None or output_len >= _SHORTEST)
            if is_long_enough and prompt_len <= _LONGEST_PROMPT and prompt_len + output_len <= _LONGEST:
                yield Sample(asked.value, prompt_len, output_len)

    return _as_many(args, used())


def _custom(args: argparse.Namespace, tokenizer: Tokenizer, rng: np.random.Generator) -> list[Sample]:
    output_len = args.custom_output_len if args.custom_output_len is not None else args.output_len
    output_len = 256 if output_len is None else output_len
    kwargs = json_object("--chat-template-kwargs", args.chat_template_kwargs)
    is_templated = not args.skip_chat_template and BACKENDS[args.backend][0] == "completions"

    def used() -> Iterator[Sample]:
        lines = [_decoded(args, line, _Line) for line in _file(args).splitlines() if line.strip()]
        for line in _in_order(args, lines):
            num_tokens = line.output_tokens if output_len == -1 else output_len
            if num_tokens is None:
                raise InvalidConfig(f"--dataset-path {args.dataset_path}: a line has no output_tokens")
            text = _templated(line.prompt, tokenizer, kwargs) if is_templated else line.prompt
            yield Sample(text, len(tokenizer.encode(text, False)), num_tokens)

    return _as_many(args, used())


def _templated(text: str, tokenizer: Tokenizer, kwargs: dict[str, Any]) -> str:
    try:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, **kwargs)
    except InvalidRequest as error:
        raise InvalidConfig(f"{error}; --skip-chat-template sends prompts as they are") from error


def _sonnet(args: argparse.Namespace, tokenizer: Tokenizer, rng: np.random.Generator) -> list[Sample]:
    input_len = _length(args, "sonnet_input_len", 550, "input_len")
    output_len = _length(args, "sonnet_output_len", 150, "output_len")
    prefix_len = _length(args, "sonnet_prefix_len", 200, least=0)
    lines = [line + "\n" for line in _file(args).splitlines() if line.strip()]
    if not lines:
        raise InvalidConfig(f"--dataset-path {args.dataset_path} has no lines")
    if prefix_len > input_len:
        raise InvalidConfig(f"--sonnet-prefix-len {prefix_len} is more than --sonnet-input-len {input_len}")
    mean = sum(len(tokenizer.encode(line, False)) for line in lines) / len(lines)
    start = "Pick as many lines as you can from these poem lines:\n"
    num_lines = max(1, round((input_len - len(tokenizer.encode(start, False))) / mean))
    num_shared = min(num_lines, round(prefix_len / mean))
    rnd = random.Random(args.seed)
    found: list[Sample] = []
    for _ in range(args.num_prompts):
        text = start + "".join([*lines[:num_shared], *rnd.choices(lines, k=num_lines - num_shared)])
        found.append(Sample(text, len(tokenizer.encode(text, False)), output_len))
    return found


def _file(args: argparse.Namespace) -> str:
    if args.dataset_path is None:
        raise InvalidConfig(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    try:
        return Path(args.dataset_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"--dataset-path {args.dataset_path}: {error}") from error


def _decoded(args: argparse.Namespace, text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidConfig(f"--dataset-path {args.dataset_path}: {error}: {shortened(text)}") from error


def _in_order(args: argparse.Namespace, rows: list[T]) -> list[T]:
    if not args.disable_shuffle:
        random.Random(args.seed).shuffle(rows)
    return rows


def _as_many(args: argparse.Namespace, usable: Iterator[Sample]) -> list[Sample]:
    """As many of them as are asked for. If there are too few, some come again."""
    found = [sample for _, sample in zip(range(args.num_prompts), usable, strict=False)]
    if not found:
        raise InvalidConfig(f"--dataset-path {args.dataset_path} has no usable prompt")
    if len(found) < args.num_prompts and not args.no_oversample:
        found += random.Random(args.seed).choices(found, k=args.num_prompts - len(found))
    return found


DATASETS: dict[str, Callable[[argparse.Namespace, Tokenizer, np.random.Generator], list[Sample]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "custom": _custom,
    "sonnet": _sonnet,
    "prefix_repetition": _prefix_repetition,
}
"""How each dataset is made, by name."""
