"""Makes the values that an encoder gets from images, with the checkpoint's own image processor."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from raycore.errors import InvalidCheckpoint, InvalidConfig, InvalidRequest
from raycore.extras import check_installed
from raycore.messages import FeatureData
from raycore.parts.images.models import VisionSpec
from raycore.system import Lock

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

_PAN_AND_SCAN = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
"""What Gemma 3's processor of images and texts adds to that of images."""
_CLASSES = {
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VLImageProcessor"),
    "qwen3_vl": ("qwen2_vl", "Qwen2VLImageProcessor"),
    "siglip": ("gemma3", "Gemma3ImageProcessor"),
}
"""By the kind of encoders: the package and the class of transformers that processes images."""
_KNOWN_KWARGS = frozenset(
    {"min_pixels", "max_pixels", "size", "do_resize", "do_rescale", "do_normalize", "resample", "rescale_factor"}
    | {"image_mean", "image_std", "do_convert_rgb"}
)


class ImagePart(NamedTuple):
    """One feature of an image: the image, or a crop of it."""

    identifier: str
    grid: tuple[int, int, int]
    num_tokens: int
    data: FeatureData


class Processed(NamedTuple):
    """An image as a model gets it."""

    parts: list[ImagePart]

    @property
    def num_bytes(self) -> int:
        """Size of the parts' data."""
        return sum(len(part.data.data) for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """Number of embeddings of all parts."""
        return sum(part.num_tokens for part in self.parts)


def processor_class(kind: str) -> Any:
    """The class of transformers that processes the images of a kind of encoders with Pillow.

    The numbers are then the same whatever is installed. `AutoImageProcessor` takes torchvision if that is there, and in
    some versions needs it. Versions before 5.4 have one class, which newer ones call Pil.
    """
    model, name = _CLASSES[kind]
    package = f"transformers.models.{model}"
    if find_spec(f"{package}.image_processing_pil_{model}") is not None:
        return getattr(import_module(f"{package}.image_processing_pil_{model}"), f"{name}Pil")
    return getattr(import_module(f"{package}.image_processing_{model}"), name)


class ImageProcessor:
    """The image processor of one checkpoint. Thread-safe."""

    def __init__(self, path: str, vision: VisionSpec, kwargs: Mapping[str, Any]) -> None:
        """`kwargs`: settings instead of the checkpoint's (`mm_processor_kwargs`)."""
        check_installed("images need", "multimodal")
        self._path = path
        self._vision = vision
        self._kwargs = dict(kwargs)
        self._lock = Lock()
        self._loaded: Any = None
        self._made_by: list[str] = []
        """What processes images: the version of the code, and the processor's settings."""
        self._check_kwargs(self._kwargs, InvalidConfig)

    def load(self) -> None:
        """Read the processor's files, and import what it needs. Takes seconds. Later calls do nothing.

        Raises:
            InvalidCheckpoint: the checkpoint has no image processor that can be read.
        """
        with self._lock:
            if self._loaded is not None:
                return
            try:
                self._loaded = processor_class(self._vision.kind).from_pretrained(self._path, local_files_only=True)
            except (OSError, ValueError, KeyError) as error:
                raise InvalidCheckpoint(f"{self._path} has no image processor that can be read: {error}") from error
            self._made_by = [version("transformers"), str(self._loaded.to_json_string())]

    def merged(self, asked: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the settings for a request that asks for some of its own.

        Raises:
            InvalidRequest: one isn't known, or has another type than it should.
        """
        if not asked:
            return self._kwargs
        flat = {**asked, **asked.get("images_kwargs", {})} if isinstance(asked.get("images_kwargs", {}), dict) else {}
        flat.pop("images_kwargs", None)
        self._check_kwargs(flat, InvalidRequest)
        return {**self._kwargs, **flat}

    def key(self, image: Image, kwargs: Mapping[str, Any]) -> str:
        """Return the name of what `process` makes of an image in RGB: a hash of its pixels and the settings."""
        digest = blake2b(digest_size=20, person=b"image")
        digest.update(self._stamp(kwargs, image.size))
        digest.update(image.tobytes())
        return digest.hexdigest()

    def key_of_name(self, name: str, read_with: object, kwargs: Mapping[str, Any]) -> str:
        """The same for an image that has a name of the user's (`multi_modal_uuids`), which stands for its pixels.

        `read_with`: what else its pixels depend on, and who may use the name.
        """
        digest = blake2b(digest_size=20, person=b"image_name")
        digest.update(self._stamp(kwargs, (name, read_with)))
        return digest.hexdigest()

    def process(self, image: Image, kwargs: Mapping[str, Any], key: str) -> Processed:
        """Resize and normalize an image in RGB.

        Raises:
            InvalidRequest: the processor refuses the image or the settings.
        """
        self.load()
        settings: dict[str, Any] = dict(kwargs)
        if self._vision.kind == "siglip":
            settings = {
                name: getattr(self._loaded, name, None) or value for name, value in _PAN_AND_SCAN.items()
            } | settings
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if name in settings:
                size = settings.get("size") or {
                    each: self._loaded.size[each] for each in ("shortest_edge", "longest_edge")
                }
                settings["size"] = {**cast("dict[str, int]", size), edge: settings.pop(name)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                values = self._loaded(images=[image], return_tensors="np", **settings)
            pixels = values["pixel_values"]
        except (ValueError, TypeError, KeyError, ArithmeticError, AttributeError, OSError, MemoryError) as error:
            raise InvalidRequest(f"the image processor refuses it: {error}"[:500]) from None
        if self._vision.kind == "siglip":
            side = isqrt(self._vision.tokens_per_image or 1)
            return Processed([self._part(crop, (1, side, side), f"{key}-{n}") for n, crop in enumerate(pixels)])
        frames, rows, columns = (int(each) for each in values["image_grid_thw"][0])
        return Processed([self._part(pixels, (frames, rows, columns), key)])

    def _part(self, pixels: Any, grid: tuple[int, int, int], key: str) -> ImagePart:
        values = np.ascontiguousarray(pixels, np.float32)
        reason = self._vision.check_grid(grid)
        if reason is not None or values.shape != self._vision.input_shape(grid):
            raise InvalidRequest(f"the model can't take {values.shape} values in a grid of {grid}: {reason or ''}")
        data = FeatureData(values.tobytes(), list(values.shape))
        # one name never stands for different grids
        return ImagePart(f"{key}-{'x'.join(map(str, grid))}", grid, self._vision.num_tokens(grid), data)

    def _stamp(self, kwargs: Mapping[str, Any], what: object) -> bytes:
        self.load()
        return json.dumps([self._path, self._made_by, dict(kwargs), what], sort_keys=True, default=str).encode()

    def _check_kwargs(self, kwargs: Mapping[str, Any], error: type[InvalidConfig] | type[InvalidRequest]) -> None:
        known = _KNOWN_KWARGS | (_PAN_AND_SCAN.keys() if self._vision.kind == "siglip" else set[str]())
        for name, value in kwargs.items():
            if name not in known:
                raise error(f"mm_processor_kwargs has {name!r}: images have the settings {', '.join(sorted(known))}")
            if name in ("min_pixels", "max_pixels") and (type(value) is not int or value < 1):
                raise error(f"mm_processor_kwargs has {name}={value!r}, which isn't a positive integer")
            if name.startswith("do_") and not isinstance(value, bool):
                raise error(f"mm_processor_kwargs has {name}={value!r}, which isn't true or false")
        size: Any = kwargs.get("size", {})
        edges = list(cast("dict[str, object]", size).values()) if isinstance(size, dict) else [None]
        if not all(isinstance(edge, int) and 0 < edge < 1 << 31 for edge in edges):
            raise error(f"mm_processor_kwargs has size={size!r}, which isn't an object of positive integers")
