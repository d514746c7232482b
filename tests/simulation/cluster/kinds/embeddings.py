"""Prompts of which parts are embeddings, which ranks keep and share."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from raycore.messages import Feature, FeatureData
from raycore.parts.images.config import EMBEDDED_PIECE_TOKENS
from simulation.cluster.kinds.kind import Asked, Kind
from simulation.scenario import Request

WIDTH = 128
"""Of the demo model."""
_NUM_DIFFERENT = 8


def _rows(number: int, count: int) -> Any:
    """float32[count, WIDTH]: the embeddings with a number."""
    return (np.arange(count * WIDTH, dtype=np.float32) + np.float32(number * 100_003)).reshape(count, WIDTH)


class _Embeddings(Kind):
    name = "embeddings"
    engine_share = 0.25
    excludes = ("pieces", "refused")

    def options(self, draw: random.Random, options: Mapping[str, Any]) -> dict[str, Any] | None:
        speculative = options.get("speculative_config")
        if speculative is not None and speculative["method"] == "draft_model":
            return None
        return {"enable_prompt_embeds": True}

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> list[list[int]] | None:
        """(position, number of tokens, number of the embeddings) of each part, with a token between two of them."""
        if "pooled" in request.wants and request.n > 1:  # whose prompts have other lengths
            return None
        length = sum(count for _, count in request.prompt)
        parts: list[list[int]] = []
        position = draw.randrange(8)
        while len(parts) < 3:
            number = draw.randrange(_NUM_DIFFERENT)
            count = 1 + 8 * (number % 4)  # there are different ones with as many tokens
            if position + count > length:
                break
            parts.append([position, count, number])
            position += count + draw.randrange(1, 9)
        return parts or None

    def apply(self, value: list[list[int]], request: Request, asked: Asked) -> None:
        tokens = asked.prompt["prompt_token_ids"]
        asked.prompt["prompt_embeds"] = embeds = np.zeros((len(tokens), WIDTH), np.float32)
        asked.prompt["prompt_is_token_ids"] = are_tokens = [True] * len(tokens)
        features: list[Feature] = []
        data: list[FeatureData] = []
        for position, count, number in value:
            assert count <= EMBEDDED_PIECE_TOKENS, "a longer part is cut into pieces"
            rows = embeds[position : position + count] = _rows(number, count)
            are_tokens[position : position + count] = [False] * count
            features.append(Feature(f"embeddings {number}", position, count))
            data.append(FeatureData(rows.tobytes(), list(rows.shape), "float32", is_embedding=True))
        asked.engine |= {"features": features, "feature_data": data}


KIND = _Embeddings()
