"""Embeddings of images that users give instead of images."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from io import BytesIO
from math import isqrt
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidRequest
from raycore.messages import FeatureData
from raycore.parts.images.client.processor import ImagePart, Processed
from raycore.parts.images.client.sources import decode_base64
from raycore.parts.images.models import VisionSpec

_MAX_VALUES = 1 << 28


def processed_embeddings(given: Any, vision: VisionSpec, max_bytes: int) -> list[Processed]:
    """Return the embeddings of one image or several as a model gets them.

    Args:
        given: float arrays of (tokens, width) for one image, (images, tokens, width), or a list of the first; of models
            whose images have different sizes, in a mapping with `image_embeds` and `image_grid_thw`, the frames, rows
            and columns of patches of each image. Arrays may be texts: the base64 of an .npy file.

    Raises:
        InvalidRequest: shapes don't fit the model or each other.
    """
    fields: Mapping[str, Any] = (
        cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {"image_embeds": given}
    )
    unknown = fields.keys() - {"image_embeds", "image_grid_thw"}
    if unknown or "image_embeds" not in fields:
        raise InvalidRequest(
            f"embeddings are in 'image_embeds', with 'image_grid_thw', and not in {sorted(map(str, fields))}"
        )
    rows = _rows(fields["image_embeds"], max_bytes)
    if vision.image_size is not None:
        side = isqrt(vision.tokens_per_image or 1)
        return [_processed(each, (1, side, side), vision) for each in rows]
    grids = fields.get("image_grid_thw")
    if grids is None:
        raise InvalidRequest("embeddings for this model need 'image_grid_thw', the grid of patches of each image")
    wanted = [_grid(each) for each in np.atleast_2d(_array(grids, max_bytes))]
    if len(rows) == 1 and len(wanted) > 1:
        ends = np.cumsum([vision.num_tokens(grid) for grid in wanted])
        if len(rows[0]) != ends[-1]:
            raise InvalidRequest(f"there are {len(rows[0])} embeddings for grids of {ends[-1]}")
        rows = np.split(rows[0], ends[:-1])
    if len(rows) != len(wanted):
        raise InvalidRequest(f"there are embeddings of {len(rows)} images, and grids of {len(wanted)}")
    return [_processed(each, grid, vision) for each, grid in zip(rows, wanted, strict=True)]


def is_embeddings(given: Any) -> bool:
    """Whether a value, such as an array of floats, stands for embeddings and not for an image."""
    if isinstance(given, Mapping):
        return True
    kind = str(getattr(given, "dtype", ""))
    return "float" in kind and getattr(given, "ndim", 0) in (2, 3)


def _rows(given: Any, max_bytes: int) -> list[NDArray[np.float32]]:
    """Return a matrix for each image."""
    values: list[Any] = cast("list[Any]", given) if isinstance(given, list | tuple) else [given]
    found: list[NDArray[np.float32]] = []
    for each in values:
        array = _array(each, max_bytes)
        if array.ndim not in (2, 3) or not array.size:
            raise InvalidRequest(f"embeddings are of shape {array.shape}, not (tokens, width)")
        found += list(array) if array.ndim == 3 else [array]
    return [np.ascontiguousarray(each, np.float32) for each in found]


def _array(given: Any, max_bytes: int) -> NDArray[Any]:
    if isinstance(given, str):
        data = decode_base64(given, max_bytes, "the array")
        if not data.startswith(b"\x93NUMPY"):
            raise InvalidRequest("the array isn't the base64 of an .npy file, as numpy.save() writes it")
        try:
            return np.load(BytesIO(data), allow_pickle=False)
        except (ValueError, OSError, EOFError, MemoryError, SyntaxError, TypeError) as error:
            raise InvalidRequest(f"the array can't be read: {error}"[:300]) from None
    if hasattr(given, "detach"):  # a tensor; numpy has no bfloat16
        given = given.detach().float().cpu().numpy()
    array = np.asarray(given)
    if array.dtype.kind not in "fiu" or array.size > _MAX_VALUES:
        raise InvalidRequest(f"the array has {array.size} values of {array.dtype}, not numbers")
    return array


def _grid(given: NDArray[Any]) -> tuple[int, int, int]:
    if given.shape != (3,) or given.dtype.kind not in "iu" or given.min() < 1 or given.max() > 1 << 20:
        raise InvalidRequest(f"image_grid_thw has {given.tolist()!r}, not three positive integers")
    return int(given[0]), int(given[1]), int(given[2])


def _processed(rows: NDArray[np.float32], grid: tuple[int, int, int], vision: VisionSpec) -> Processed:
    reason = vision.check_grid(grid)
    if reason is not None:
        raise InvalidRequest(f"image_grid_thw has {grid}: {reason}")
    wanted = vision.num_tokens(grid), vision.embedding_width
    if rows.shape != wanted:
        raise InvalidRequest(f"embeddings are of shape {rows.shape}, and the model's are of {wanted}")
    if not np.isfinite(rows).all():
        raise InvalidRequest("embeddings have values that aren't finite")
    data = rows.tobytes()
    identifier = blake2b(data + repr(grid).encode(), digest_size=20, person=b"image_embeds").hexdigest()
    return Processed([ImagePart(identifier, grid, len(rows), FeatureData(data, list(rows.shape), is_embedding=True))])
