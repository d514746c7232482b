"""Which of the methods that need no model makes guesses."""

from __future__ import annotations

from collections.abc import Callable

from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.guesses.ngram import NgramGuesses
from raycore.parts.drafts.guesses.sources import GuessSource
from raycore.parts.drafts.guesses.suffix import SuffixGuesses


def guesses_from_tokens(config: SpeculativeConfig, clock: Callable[[], float]) -> GuessSource:
    """Return what makes guesses from the tokens that its owner has seen. `clock`: returns seconds."""
    return NgramGuesses(config) if config.method == "ngram" else SuffixGuesses(config, clock)
