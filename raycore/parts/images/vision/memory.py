"""How much memory images take in a worker. All sizes are in bytes."""

from __future__ import annotations

import torch

from raycore.parts.images.models import VisionSpec


def kept_bytes(spec: VisionSpec, num_tokens: int, dtype: torch.dtype) -> int:
    """Return the size of the embeddings of so many tokens."""
    return num_tokens * spec.embedding_width * dtype.itemsize


def encoder_bytes(spec: VisionSpec, num_tokens: int, dtype: torch.dtype) -> int:
    """Return an upper bound on what is allocated while an image of so many tokens is encoded, with its own embeddings.

    The values of its patches come in float32. A layer holds its input, the normalized one, queries, keys and values as
    they are and by window, the result of attention, and what its feed-forward part makes of all that. Positions and
    rotations are computed in float32.
    """
    num_patches, hidden, size = num_tokens * spec.patches_per_token, spec.hidden_size, spec.intermediate_size
    values = spec.patch_values * (2 * torch.float32.itemsize + dtype.itemsize)
    layer = dtype.itemsize * max(12 * hidden, 3 * hidden + 4 * size) + 5 * torch.float32.itemsize * hidden
    merged = hidden * spec.merge_size**2
    mergers = num_tokens * dtype.itemsize * (3 * merged + 3 * spec.embedding_width)
    return num_patches * (values + layer) + mergers
