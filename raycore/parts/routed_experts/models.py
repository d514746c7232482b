"""The form in which the experts of tokens travel: a row for each token, with the ids of its experts in sparse layers.

Shape suffixes: T tokens, S sparse layers, L layers, K experts of a token.
"""

from __future__ import annotations

# numpy's reshape is partially typed:
# pyright: reportUnknownMemberType=false
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from raycore.models.spec import ModelSpec
from raycore.parts.experts.models import experts_of

NAME = "routed_experts"
"""The part's name in reports, and the field of outputs."""


class ExpertRows(msgspec.Struct, frozen=True):
    """What is in a token's row."""

    sparse_layers: Sequence[bool]
    """For each layer of the model, whether it has experts."""
    num_experts: int
    num_per_token: int

    @staticmethod
    def of(spec: ModelSpec) -> ExpertRows:
        """Return the rows of a model that has experts."""
        moe = experts_of(spec)
        return ExpertRows(moe.sparse_layers, moe.num_experts, moe.num_experts_per_tok)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of ids: as small as in vLLM."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def width(self) -> int:
        """Number of ids in a row: S · K."""
        return sum(self.sparse_layers) * self.num_per_token

    @property
    def num_bytes(self) -> int:
        """Size of a row."""
        return self.width * self.dtype.itemsize

    def joined(self, stages: Sequence[bytes], num_tokens: int) -> NDArray[np.generic]:
        """Return the rows [T, S · K] of what each stage's first worker reports: [T, its layers · K]."""
        parts = [np.frombuffer(each, self.dtype).reshape(num_tokens, -1) for each in stages]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def by_layer(self, rows: bytearray) -> NDArray[np.generic]:
        """Return the ids [T, L, K] of rows. Those of layers without experts are 0."""
        rows_TSK = np.frombuffer(rows, self.dtype).reshape(-1, sum(self.sparse_layers), self.num_per_token)
        ids_TLK = np.zeros((len(rows_TSK), len(self.sparse_layers), self.num_per_token), self.dtype)
        ids_TLK[:, np.flatnonzero(self.sparse_layers)] = rows_TSK
        return ids_TLK
