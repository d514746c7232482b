"""Picks tokens, and says how likely they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidRequest
from raycore.messages import Pooled, TokenLogprobs
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from simulation.worker.model import Ints, scores
from simulation.worker.numbers64 import Words, as_words, mix, odd_words

_NUM_POOLED = 4


def pick(hidden_R: Words, seeds_R: Words, positions_R: Ints, is_greedy_R: NDArray[np.bool_], vocab_size: int) -> Words:
    """[R, V]: the token with the highest number is picked.

    Args:
        seeds_R: of the rows' requests.
        positions_R: which the new tokens get.
    """
    drawn_R = mix(hidden_R, seeds_R, as_words(positions_R))
    return scores(np.where(is_greedy_R, hidden_R, drawn_R), vocab_size)


class Rules:
    """Which tokens a request may get next."""

    def __init__(
        self, params: SamplingParams, eos_token_ids: Sequence[int], bad_words: Sequence[Sequence[int]], vocab_size: int
    ) -> None:
        self._params = params
        self._bad_words = bad_words
        self._vocab_size = vocab_size
        self._ends = list(eos_token_ids)
        self._texts: list[list[int]] | None = None
        if params.structured_outputs is not None:
            self._texts = texts_of(params.structured_outputs.choice or [])
        self.has_any = bool(
            self._texts is not None
            or bad_words
            or params.min_tokens
            or params.allowed_token_ids
            or params.trace_decode_token_ids
        )
        """Whether there is a rule at all."""

    def allowed(self, output: Sequence[int]) -> NDArray[np.bool_]:
        """[V]. `output`: all tokens so far.

        Raises:
            InvalidRequest: no token is allowed.
        """
        params, allowed_V = self._params, np.ones(self._vocab_size, np.bool_)
        trace = params.trace_decode_token_ids
        if trace:
            return _only(trace[len(output) : len(output) + 1] or self._ends, self._vocab_size)
        if params.allowed_token_ids:
            allowed_V = _only(params.allowed_token_ids, self._vocab_size)
        if self._texts is not None:
            ends = self._ends if ends_text(self._texts, list(output)) else []
            allowed_V &= _only([*next_of_texts(self._texts, list(output)), *ends], self._vocab_size)
        elif len(output) < params.min_tokens:
            allowed_V[[*self._ends, *(params.stop_token_ids or ())]] = False
        for word in self._bad_words:
            if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]):
                allowed_V[word[-1]] = False
        if not allowed_V.any():
            raise InvalidRequest(f"no token may follow {list(output)}")
        return allowed_V


def next_of_texts(texts: list[list[int]], output: list[int]) -> list[int]:
    """Which tokens go on with one of a constraint's texts."""
    return [text[len(output)] for text in texts if len(output) < len(text) and text[: len(output)] == output]


def ends_text(texts: list[list[int]], output: list[int]) -> bool:
    """Whether an output may end, because it begins with one of a constraint's texts."""
    return any(output[: len(text)] == text for text in texts)


def texts_of(choice: Sequence[str]) -> list[list[int]]:
    """A constraint's texts, which are numbers of tokens: this model has no tokenizer."""
    return [[int(token) for token in text.split()] for text in choice]


def _only(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
    allowed_V = np.zeros(vocab_size, np.bool_)
    allowed_V[list(token_ids)] = True
    return allowed_V


def logprobs(hidden_R: Words, chosen_R: Ints, num_best: int, vocab_size: int) -> list[TokenLogprobs]:
    """[R]: what is said of each chosen token, and of the `num_best` most likely ones. -1: of all."""
    if not len(hidden_R):
        return []
    each_RV = scores(hidden_R, vocab_size)
    logits_RV = (each_RV >> np.uint64(40)).astype(np.float64) / (1 << 20)
    logits_RV -= np.log(np.exp(logits_RV).sum(axis=1, keepdims=True))
    best_RV = np.argsort(~each_RV, axis=1, kind="stable")[:, : vocab_size if num_best < 0 else num_best]
    made: list[TokenLogprobs] = []
    for row, chosen in enumerate(chosen_R.tolist()):
        ids = [chosen, *best_RV[row].tolist()]
        rank = int((each_RV[row] > each_RV[row, chosen]).sum()) + 1
        made.append(TokenLogprobs(ids, logits_RV[row, ids].tolist(), rank))
    return made


def pooled(hidden_1: Words, params: PoolingParams | None = None) -> Pooled:
    """The result of a request that pools, from the last hidden state: a number for each class that it asks for."""
    asked = None if params is None else params.returned_token_ids
    words = odd_words("pooled", _NUM_POOLED) if asked is None else as_words(np.array(asked))
    numbers = mix(np.repeat(hidden_1, len(words)), words) >> np.uint64(40)
    return Pooled(numbers.astype(np.float32).tobytes(), [len(numbers)])


def hidden_bytes(hidden: Any) -> bytes:
    """A hidden state as requests get it."""
    return pooled(np.array([hidden], np.uint64)).data
