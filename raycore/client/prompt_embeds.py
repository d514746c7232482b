"""Prompts given as embeddings instead of tokens: they become features of the prompt, in pieces of some tokens each."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from raycore.config import EngineConfig
from raycore.errors import InvalidRequest, RequestTooLarge
from raycore.messages import Feature, FeatureData
from raycore.parts.images.config import EMBEDDED_PIECE_TOKENS

UNKNOWN_TOKEN = 0
"""Stands for the token of an embedding, if the request doesn't say which one it is."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class PromptEmbeds:
    """Makes features of the embeddings in prompts. Thread-safe."""

    def __init__(self, config: EngineConfig) -> None:
        self.hidden_size = config.model.spec.hidden_size
        """The width of an embedding."""
        self._max_tokens = config.model.max_model_len

    @property
    def max_bytes(self) -> int:
        """How many bytes the embeddings of a prompt have at most, in float64."""
        return 8 * self._max_tokens * self.hidden_size

    def complete(
        self, where: str, given: object, token_ids: Sequence[int] | None, is_token: object = None
    ) -> tuple[list[int], list[Feature], list[FeatureData]]:
        """Make a prompt of embeddings.

        Args:
            where: what errors name.
            given: a tensor or an array of floats, [number of tokens, hidden size]. A first dimension of 1 may precede.
            token_ids: the token of each embedding. None: they are unknown.
            is_token: for each token, whether it counts instead of its embedding. None: all embeddings count.

        Returns: the prompt's token ids, its features and their data.

        Raises:
            RequestTooLarge: there are more than `max_model_len`.
            InvalidRequest: it isn't such an array, or has another shape, or values that aren't finite.
        """
        array, dtype = _array(where, given)
        if array.ndim == 3 and array.shape[0] == 1:
            array = array[0]
        if array.ndim != 2 or array.shape[1] != self.hidden_size or not len(array):
            raise InvalidRequest(
                f"{where}: the embeddings are of shape {list(array.shape)}, and this model's are of "
                f"[number of tokens, {self.hidden_size}]"
            )
        if len(array) > self._max_tokens:
            raise RequestTooLarge(
                f"{where}: there are {len(array)} embeddings, more than max_model_len={self._max_tokens}"
            )
        if not np.isfinite(array).all():
            raise InvalidRequest(f"{where}: the embeddings have values that aren't finite")
        ids = [UNKNOWN_TOKEN] * len(array) if token_ids is None else list(token_ids)
        if len(ids) != len(array):
            raise InvalidRequest(f"{where}: {len(ids)} prompt_token_ids for {len(array)} embeddings: give one for each")
        features: list[Feature] = []
        data: list[FeatureData] = []
        for start, end in _runs(where, len(array), is_token, has_tokens=token_ids is not None):
            for first in range(start, end, EMBEDDED_PIECE_TOKENS):
                rows = array[first : min(end, first + EMBEDDED_PIECE_TOKENS)]
                piece = FeatureData(_bytes(rows, dtype), list(rows.shape), dtype, is_embedding=True)
                features.append(Feature(_identifier(piece), first, len(rows), modality="prompt_embeds"))
                data.append(piece)
        return ids, features, data


def _array(where: str, given: object) -> tuple[NDArray[Any], str]:
    """Return an array of float16, float32 or float64, and the name of the type in which its values are sent."""
    value: Any = given
    if hasattr(value, "detach"):  # a tensor; numpy has no bfloat16
        name = str(value.dtype).removeprefix("torch.")
        if name not in _FLOATS:
            raise InvalidRequest(f"{where}: the embeddings have values of {name}, not floats")
        value = value.detach().cpu()
        array: NDArray[Any] = (value.float() if name == "bfloat16" else value).numpy()
    elif isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        name = str(array.dtype)
        if name not in _FLOATS:
            raise InvalidRequest(f"{where}: the embeddings have values of {name}, not floats")
    else:
        raise InvalidRequest(f"{where}: the embeddings are {type(given).__name__}, not a tensor or an array of floats")
    return array, "float32" if name == "float64" else name


def _bytes(rows: NDArray[Any], dtype: str) -> bytes:
    if dtype == "bfloat16":  # exact, because the values came from there
        whole = np.frombuffer(np.ascontiguousarray(rows, np.float32).tobytes(), np.uint32)
        return (whole >> 16).astype(np.uint16).tobytes()
    return np.ascontiguousarray(rows, dtype).tobytes()


def _identifier(piece: FeatureData) -> str:
    return blake2b(piece.data + piece.dtype.encode(), digest_size=20, person=b"prompt_embeds").hexdigest()


def _runs(where: str, length: int, is_token: object, *, has_tokens: bool) -> list[tuple[int, int]]:
    """Return the ranges of tokens that are embeddings."""
    if is_token is None:
        return [(0, length)]
    mask: list[Any] = list(cast("Sequence[Any]", is_token)) if isinstance(is_token, list | tuple) else []
    if not has_tokens or len(mask) != length or any(not isinstance(each, bool) for each in mask):
        raise InvalidRequest(
            f"{where}: prompt_is_token_ids isn't a list of True or False for each of the {length} prompt_token_ids"
        )
    edges = [index for index in range(length + 1) if (index in (0, length)) or mask[index] != mask[index - 1]]
    return [(start, end) for start, end in pairwise(edges) if not mask[start]]
