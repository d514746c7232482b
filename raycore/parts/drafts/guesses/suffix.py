"""Guesses that a request continues as it, or an earlier output, mostly did after its last tokens.

Unlike n-grams, guesses follow the frequencies of continuations, are as long as their match suggests, and also come from
finished outputs. Source: Oliaro et al., SuffixDecoding, 2024 (arXiv:2411.04975).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.guesses.drafts import Drafts, Ints
from raycore.parts.drafts.guesses.occurrences import Match, Occurrences
from raycore.parts.drafts.guesses.sources import ChooseLengths, RunningTokens

_RUN = 2
"""Shortest match. One token alone says little about the next one."""
_MAX_COMPARED = 32
"""Number of earlier occurrences that are compared in a sequence."""
_MAX_CACHED_TOKENS = 1 << 18
"""Finished outputs beyond this many tokens are forgotten: the index takes about 200 bytes for each."""
_MAX_INDEXED = 1024
"""Number of tokens of a request that are indexed before a step. A longer prompt takes several steps, without drafts."""
_BETWEEN = -1
"""Separates outputs. It is never a token."""


class FinishedOutputs:
    """Outputs of finished requests: at least half of the latest `max_requests`, unless they have too many tokens."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._halves = [Occurrences(_RUN)]
        self._num_requests = 0

    def add(self, tokens: Iterable[int]) -> None:
        """Add an output. If there is no room left, forget the older half of the outputs."""
        if not self._max_requests:
            return
        latest = self._halves[0]
        if 2 * self._num_requests >= self._max_requests or 2 * len(latest.tokens) >= _MAX_CACHED_TOKENS:
            latest = Occurrences(_RUN)
            self._halves = [latest, self._halves[0]]
            self._num_requests = 0
        latest.extend([*tokens, _BETWEEN])
        self._num_requests += 1

    def sequences(self) -> list[Occurrences]:
        """The outputs, in one sequence or two."""
        return self._halves


class SuffixGuesses:
    """Implements `GuessSource`."""

    drafting_s = 0.0

    def __init__(self, config: SpeculativeConfig, clock: Callable[[], float]) -> None:
        """`clock`: returns seconds."""
        self._config = config
        self._clock = clock
        self.prompts_s = 0.0
        self._sequences: dict[int, Occurrences] = {}
        """The tokens of the running requests, by slot."""
        self.finished = FinishedOutputs(config.suffix_decoding_max_cached_requests)

    def guess(self, slots: Ints, running: RunningTokens, limits: Ints, choose_lengths: ChooseLengths) -> Drafts:
        self.prompts_s = 0.0
        found: dict[int, list[int]] = {}
        for slot, num_tokens in zip(slots.tolist(), running.received[slots].tolist(), strict=True):
            sequence = self._sequences.get(slot) or self._begin(slot)
            num_known = len(sequence.tokens)
            began_s = self._clock()
            sequence.extend(running.tokens[slot, num_known : min(num_tokens, num_known + _MAX_INDEXED)].tolist())
            if not num_known:
                self.prompts_s += self._clock() - began_s
            guess = self._propose(sequence) if len(sequence.tokens) == num_tokens else []
            if guess:
                found[slot] = guess
        return Drafts.of(list(found), list(found.values()))

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        sequence = self._sequences.pop(slot, None)
        if sequence is not None:
            self.finished.add(sequence.tokens[num_prompt_tokens:])

    def _begin(self, slot: int) -> Occurrences:
        return self._sequences.setdefault(slot, Occurrences(_RUN))

    def _propose(self, own: Occurrences) -> list[int]:
        """Return a guess of the tokens that follow the sequence `own`."""
        depth = self._config.suffix_decoding_max_tree_depth
        suffix = own.tokens[-depth:]
        found = [(own, own.match(end, suffix, depth)) for end in islice(own.last(), _MAX_COMPARED)]
        for sequence in self.finished.sequences():
            ends = islice(sequence.of(tuple(suffix[-_RUN:])), _MAX_COMPARED)
            found += [(sequence, sequence.match(end, suffix, depth)) for end in ends]
        if not found:
            return []
        length = max(match.length for _, match in found)
        factor, most = self._config.suffix_decoding_max_spec_factor, self._config.num_speculative_tokens
        limit = min(most, int(length * factor), depth - length)
        return _likeliest(
            [_continuation(sequence, match, limit) for sequence, match in found if match.length == length],
            self._config.suffix_decoding_min_token_prob,
        )


def _continuation(sequence: Occurrences, match: Match, num_tokens: int) -> list[int]:
    found = sequence.after(match.end, max(0, num_tokens))
    return found[: found.index(_BETWEEN)] if _BETWEEN in found else found


def _likeliest(continuations: list[list[int]], least_probability: float) -> list[int]:
    """Follow the most frequent token at each offset, while its probability is at least `least_probability`."""
    guess: list[int] = []
    total = len(continuations)
    while True:
        offset = len(guess)
        counts = Counter(each[offset] for each in continuations if len(each) > offset)
        if not counts:
            return guess
        token, count = counts.most_common(1)[0]
        if count < least_probability * total:
            return guess
        guess.append(token)
        continuations = [each for each in continuations if len(each) > offset and each[offset] == token]
