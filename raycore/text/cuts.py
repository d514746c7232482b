"""Which tokens are kept of texts that have too many. Those that the tokenizer adds around a text always are.

Texts are encoded whole first, because the number of characters doesn't bound the number of tokens: normalizers drop
characters, and an unknown token may stand for many. `Encoding.truncate` isn't used: it keeps each part that it cuts off
as an encoding of its own, and post-processors combine all such parts of a pair.
"""

from __future__ import annotations

from typing import Literal

from tokenizers import Encoding

Side = Literal["left", "right"]
"""Where tokens are left out of a text that has too many: at its beginning (`left`) or at its end."""


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


def start_of(encoding: Encoding, index: int) -> int:
    """The position in the text at which a token begins, in characters. White space that the tokenizer drops belongs to
    the token after it. The tokens of one character begin at the same position."""
    chars, before = encoding.token_to_chars(index), encoding.token_to_chars(index - 1) if index else (0, 0)
    assert chars is not None, "only tokens that the tokenizer adds have no place in the text"
    assert before is not None
    return min(chars[0], before[1])
