"""What models of late interaction, such as ColBERT, want of queries and documents. Does not import torch.

They have an embedding for each token. A marker after a text's first token says whether it is a query or a document, and
the score of a pair adds up, for each token of the query, the greatest product with a token of the document.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from raycore.errors import InvalidRequest
from raycore.pooling_params import InputType


class LateInteraction(msgspec.Struct, frozen=True):
    """How prompts are made of queries and of documents, and which of their tokens have results."""

    query_marker: int
    """The token after the first one of a query."""
    document_marker: int
    query_length: int
    """The most tokens of a query, with its marker. Longer ones are cut, but for their last token, which ends a text."""
    document_length: int
    expansion_token: int | None = None
    """Queries are filled up to `query_length` with this token. None: they aren't."""
    attends_to_expansion: bool = False
    """Whether other tokens see those that a query is filled up with. If not, these see the query's own, and no other.
    """
    skipped: list[int] = []
    """Tokens of documents that have no result, such as punctuation."""
    projected_size: int | None = None
    """The outputs of a linear layer without a bias in the checkpoint's own files. None: there is none."""

    def tokens(
        self, token_ids: Sequence[int], kind: InputType, *, max_length: int | None = None, is_text: bool = False
    ) -> list[int]:
        """Return the prompt of a text's tokens, which begin with a special one and end with another.

        Args:
            max_length: the most tokens of a document. None: only the model's own lengths count.
            is_text: whether a tokenizer made them of a text. If not, what has a marker already stays as it is.

        Raises:
            InvalidRequest: there is only one token.
        """
        given = list(token_ids)
        if len(given) == 1:
            raise InvalidRequest(
                f"the prompt has only the token {given[0]}, and this model's prompts have a special one at both ends"
            )
        if not given or (not is_text and self.is_marked(given)):
            return given
        is_query = kind == "query"
        length = self.query_length
        if not is_query:
            length = self.document_length if max_length is None else min(self.document_length, max(3, max_length))
        kept = given if len(given) < length else [*given[: length - 2], given[-1]]
        found = [kept[0], self.query_marker if is_query else self.document_marker, *kept[1:]]
        if is_query and self.expansion_token is not None:
            found += [self.expansion_token] * (length - len(found))
        return found

    def is_marked(self, token_ids: Sequence[int]) -> bool:
        """Whether a prompt has a marker."""
        return len(token_ids) > 1 and token_ids[1] in (self.query_marker, self.document_marker)

    def num_seen(self, token_ids: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens are seen by others: all but those that a query is filled up with,
        if these aren't."""
        if self.attends_to_expansion or token_ids[1:2] != [self.query_marker]:
            return len(token_ids)
        end = len(token_ids)
        while token_ids[end - 1] == self.expansion_token:
            end -= 1
        return end
