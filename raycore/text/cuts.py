"""Which tokens are kept of texts that have too many. Those that the tokenizer adds around a text always are.

How many characters have enough tokens is found by trying, because the number of characters doesn't bound the number of
tokens: normalizers drop characters, and an unknown token may stand for many. `Encoding.truncate` isn't used: it keeps
each part that it cuts off as an encoding of its own, and post-processors combine all such parts of a pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from tokenizers import Encoding, Tokenizer

Side = Literal["left", "right"]
"""Where tokens are left out of a text that has too many: at its beginning (`left`) or at its end."""

_AROUND = 256
"""Tokens between those that are kept and the place where a text is cut before it is encoded. Which tokens a text has
depends on the characters around them, a word or some spaces. A cut word may have some 100 tokens instead of one."""
_CHARACTERS_PER_TOKEN = 8
"""At most as many as most texts have."""
_GROWTH = 4


def encode_ends(
    native: Tokenizer, texts: Sequence[str], num_tokens: int, side: Side, *, add_special_tokens: bool
) -> list[Encoding]:
    """Encode of each text at least the part that has its last `num_tokens` tokens if `side` is left, or else its first.

    The rest of a long text isn't encoded. A part that is the same in several texts is encoded once. If an encoding is
    of a part only, it has more than `num_tokens` tokens of it.
    """
    found: dict[int, Encoding] = {}
    missing = list(range(len(texts)))
    length = _CHARACTERS_PER_TOKEN * (num_tokens + _AROUND)
    while missing:
        parts = [texts[index] for index in missing]
        # half as much again costs less than another turn would
        parts = [part if 2 * len(part) <= 3 * length else _end(part, length, side) for part in parts]
        distinct = list(dict.fromkeys(parts))
        encoded = native.encode_batch_fast(distinct, add_special_tokens=add_special_tokens)
        encodings = dict(zip(distinct, encoded, strict=True))
        for index, part in zip(missing, parts, strict=True):
            encoding = encodings[part]
            if len(part) == len(texts[index]) or encoding.sequence_ids.count(0) >= num_tokens + _AROUND:
                found[index] = encoding
        missing = [index for index in missing if index not in found]
        length *= _GROWTH
    return [found[index] for index in range(len(texts))]


def _end(text: str, length: int, side: Side) -> str:
    return text[-length:] if side == "left" else text[:length]


def span(count: int, length: int, side: Side) -> range:
    """Which of a text's `count` tokens are kept if at most `length` are."""
    length = min(count, length)
    return range(count - length, count) if side == "left" else range(length)


def kept_tokens(encoding: Encoding, kept: range) -> list[int]:
    """The indexes of the tokens that are kept of one text. `kept`: which of the text's own tokens are."""
    origins = encoding.sequence_ids
    begin = origins.index(0) if 0 in origins else len(origins)
    end = begin + origins.count(0)
    return [*range(begin), *(begin + index for index in kept), *range(end, len(origins))]


def spans_of_pair(
    counts: tuple[int, int], room: int | None, side: Side, room_each: tuple[int | None, int | None]
) -> tuple[range, range]:
    """Which tokens are kept of each text of a pair.

    Args:
        counts: how many tokens the first and the second text have.
        room: how many tokens both texts may have together. Of the longer one, more is left out. None: all.
        side: where they are cut because of `room`.
        room_each: how many tokens the first and the second text may have. They are cut at their ends.
    """
    first, second = (count if most is None else min(count, most) for count, most in zip(counts, room_each, strict=True))
    if room is None or first + second <= room:
        return range(first), range(second)
    shorter = min(first, second, room // 2)
    lengths = (shorter, room - shorter) if first <= second else (room - shorter, shorter)
    return span(first, lengths[0], side), span(second, lengths[1], side)


def token_starts(encoding: Encoding) -> Iterator[int]:
    """For each token, the position in the text at which it begins, in characters.

    White space that the tokenizer drops belongs to the token after it. The tokens of one character begin at the same
    position. Tokens that the tokenizer adds begin where the previous token ends.
    """
    previous_end = 0
    for index in range(len(encoding)):
        start, end = encoding.token_to_chars(index) or (previous_end, previous_end)
        yield min(start, previous_end)
        previous_end = max(previous_end, end)
