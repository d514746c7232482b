"""The model: two layers with attention, and maybe a state, all in 64-bit numbers without rounding.

A token's first layer depends on the token, or on the embedding in its place, and on its position, adapter and salt. Its
second layer depends on the first layer of all tokens that it sees, and the hidden state on the second layer of these.
Both layers are what the KV cache holds. So a token that is computed from one wrong number is another token.

Shape suffixes: n sequences, L places for tokens in a sequence, T tokens, R rows that are sampled, V tokens of the
vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulation.worker.numbers64 import Words, key_of, mix, odd_words

Ints = NDArray[np.int64]

UNITS = ("encoder", "first", "second", "head")
"""The parts of the model. Weights are one number for each."""


class Shape(NamedTuple):
    """What weights don't say of a model."""

    vocab_size: int
    windows: tuple[int | None, ...]
    """By group of layers: how many tokens a token sees, itself included. None: all up to its own."""
    has_states: bool = False


def weights_of(checkpoint: str) -> Words:
    """The weights in a checkpoint: one number for each of `UNITS`."""
    return np.array([key_of("weights", checkpoint, unit) for unit in UNITS], np.uint64)


def adapter_key(path: str) -> np.uint64:
    """What the adapter in a directory does to each token."""
    return key_of("adapter", path)


def salt_key(salt: str | None) -> np.uint64:
    """What a salt does to each token. Workers of a real model know of none: here they see what they mustn't share."""
    return key_of("salt", salt)


def embedding(data: bytes, weights: Words) -> Words:
    """[1]: what the encoder computes from the data of a feature."""
    return mix(np.array([key_of("feature", data)], np.uint64), weights[0])


def feature_content(embedding_1: Words, first: int, count: int) -> Words:
    """[count]: what stands in the place of a feature's tokens from the one with the index `first` on."""
    return mix(np.repeat(embedding_1, count), np.arange(first, first + count, dtype=np.uint64))


def first_layer(content_T: Words, positions_T: Words, own_T: Words, weights: Words) -> Words:
    """`own_T`: what the adapters and salts of the tokens' requests do to them."""
    return mix(content_T, positions_T, own_T, weights[1])


def of_group(layer_T: Words, group: int) -> Words:
    """What a group of layers keeps of a layer."""
    return layer_T ^ odd_words("groups", 16)[group]


def attend(kept_nL: Words, rows_T: Ints, positions_T: Ints, window: int | None) -> Words:
    """[T]: what tokens see of what is kept of their sequences.

    Args:
        kept_nL: by sequence and position.
        rows_T: by token: its sequence.
        positions_T: by token: the last position that it sees.
    """
    num_rows, length = kept_nL.shape
    sums = np.zeros((num_rows, length + 1), np.uint64)
    np.cumsum(kept_nL * odd_words("positions", length), axis=1, out=sums[:, 1:])
    seen = sums[rows_T, positions_T + 1]
    if window is not None:
        seen -= sums[rows_T, np.maximum(positions_T + 1 - window, 0)]
    return seen


def states_after(state: np.uint64, first_T: Words) -> Words:
    """[T]: the state after each of one sequence's next tokens. `state`: before them."""
    made: list[int] = []
    last = int(state)
    for each in first_T.tolist():
        last = (last * 0xD1342543DE82EF95 + each) % (1 << 64)
        made.append(last)
    return np.array(made, np.uint64)


def second_layer(seen_T: Words, first_T: Words, weights: Words) -> Words:
    """`seen_T`: the sum over all groups of what `attend` returns of the first layer, and of the state after it."""
    return mix(seen_T, first_T, weights[2])


def hidden_states(seen_T: Words, second_T: Words, weights: Words) -> Words:
    """`seen_T`: the sum over all groups of what `attend` returns of the second layer."""
    return mix(seen_T, second_T, weights[3])


def whole_sequence(shape: Shape, content_T: Words, own_1: Words, weights: Words) -> Words:
    """[T]: the hidden states of a sequence, computed in one piece from nothing but the sequence."""
    length = len(content_T)
    rows, positions = np.zeros(length, np.int64), np.arange(length)

    def seen(layer_T: Words) -> Words:
        seen_T = np.zeros(length, np.uint64)
        for group, window in enumerate(shape.windows):
            seen_T += attend(of_group(layer_T, group)[None], rows, positions, window)
        return seen_T

    first_T = first_layer(content_T, positions.view(np.uint64), np.repeat(own_1, length), weights)
    seen_T = seen(first_T)
    if shape.has_states:
        seen_T += states_after(np.uint64(0), first_T)
    second_T = second_layer(seen_T, first_T, weights)
    return hidden_states(seen(second_T), second_T, weights)


def scores(hidden_R: Words, vocab_size: int) -> Words:
    """[R, V]: which token is how likely. All differ."""
    each_RV = hidden_R[:, None] * odd_words("tokens", vocab_size)
    each_RV ^= each_RV >> np.uint64(29)
    each_RV *= np.uint64(0xBF58476D1CE4E5B9)
    return each_RV
