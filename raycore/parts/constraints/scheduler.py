"""Has requests wait for their last token if what may follow depends on it."""

from __future__ import annotations

from raycore.scheduler.part import SchedulerPart
from raycore.scheduler.request import Request


class Constraints(SchedulerPart):
    """Knows the rules that workers apply to a token after they have seen all before it."""

    order = 80

    def needs_output(self, request: Request) -> bool:
        """A grammar, or a word that may not come, follows the tokens, or reasoning ends after so many of them."""
        if request.params.structured_outputs is not None or request.thinking is not None:
            return True
        return any(len(word) > 1 for word in request.bad_words_token_ids)
