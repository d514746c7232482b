"""The options of models that take images."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from raycore.errors import InvalidConfig
from raycore.options.declared import json_object, json_option, option
from raycore.options.numbers import Count

_DEFAULT_LIMIT = 999
_MODALITIES = ("image", "video", "audio")
_IMAGE_IO = ("rgba_background_color",)
WHITE = (255, 255, 255)
"""The color behind transparent images by default."""


EMBEDDED_PIECE_TOKENS = 128
"""Prompts of embeddings are cut into features of so many tokens. Prefixes are shared by whole features."""


class EncoderLimits(msgspec.Struct, frozen=True):
    """What an engine can do with the features of prompts, such as images, in a step."""

    cache_size: int
    """Maximum number of embeddings that a step computes, and that a worker keeps."""
    max_feature_tokens: int
    """Maximum number of tokens of one feature. At most `cache_size`."""
    is_divisible: bool = True
    """Whether several steps may compute the tokens of one feature."""


def _parse_limits(value: str | dict[str, Any] | None) -> dict[str, int] | None:
    """Convert the option `limit_mm_per_prompt`. An entry is a number, or has it under `count`."""
    if value is None:
        return None
    limits: dict[str, int] = {}
    for name, entry in json_object("limit_mm_per_prompt", value).items():
        limit: object = (
            cast("dict[str, object]", entry).get("count", _DEFAULT_LIMIT) if isinstance(entry, dict) else entry
        )
        if name not in _MODALITIES or isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise InvalidConfig(
                f"limit_mm_per_prompt={value!r} has {name!r}: {entry!r}; it has numbers for {', '.join(_MODALITIES)}"
            )
        limits[name] = limit
    return limits


def parse_media_io(value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """Convert the option `media_io_kwargs`: what each kind of media is read with.

    Raises:
        InvalidConfig: it has other kinds, settings or values than raycore knows.
    """
    if value is None:
        return None
    given = json_object("media_io_kwargs", value)
    image: Any = given.get("image", {})
    if given.keys() - set(_MODALITIES) or not isinstance(image, dict):
        raise InvalidConfig(f"media_io_kwargs={value!r} has other keys than {', '.join(_MODALITIES)}, or not an object")
    settings = cast("dict[str, Any]", image)
    if settings.keys() - set(_IMAGE_IO) or not _is_color(settings.get("rgba_background_color", [255, 255, 255])):
        raise InvalidConfig(
            f"media_io_kwargs={value!r}: images have the setting rgba_background_color, three integers from 0 to 255"
        )
    return given


def image_background(media_io: Mapping[str, Any] | None) -> Sequence[int]:
    """The red, green and blue behind transparent images, by `media_io_kwargs`."""
    return (media_io or {}).get("image", {}).get("rgba_background_color", WHITE)


def _is_color(given: object) -> bool:
    parts = cast("list[object]", given) if isinstance(given, list | tuple) else []
    return len(parts) == 3 and all(type(part) is int and 0 <= part <= 255 for part in parts)


def _processor_kwargs(value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    return None if value is None else json_object("mm_processor_kwargs", value)


def _hosts(value: str | list[str] | tuple[str, ...] | None) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value or ())
    for name in names:
        if "/" in name or ":" in name or name != name.strip() or not name:
            raise InvalidConfig(f"allowed_media_domains has {name!r}: give host names, such as 'images.example.com'")
    return tuple(name.lower() for name in names)


def _directory(value: str | None) -> str:
    path = os.fspath(value or "")
    if path and not os.path.isdir(path):
        raise InvalidConfig(f"allowed_local_media_path={path!r} isn't a directory")
    return os.path.realpath(path) if path else ""


class MultiModalConfig(msgspec.Struct, frozen=True):
    """Which images requests may have, and how they become a model's inputs."""

    limit_mm_per_prompt: Annotated[
        dict[str, int] | None,
        option(
            'Maximum number of images of a prompt: {"image": N}. As in vLLM, other kinds may be given, too.',
            metavar="JSON",
            expected="a dict or a JSON object of numbers",
            default='{"image": 999}',
            convert=_parse_limits,
        ),
    ] = None
    language_model_only: Annotated[
        bool,
        option(
            "Load only the model of texts of a checkpoint that sees images, too. So does a limit of 0 images, as in "
            "limit_mm_per_prompt='{\"image\": 0}'."
        ),
    ] = False
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None,
        json_option(
            "Settings of the checkpoint's image processor, such as max_pixels, size or do_pan_and_scan. Requests may "
            "have others.",
            convert=_processor_kwargs,
        ),
    ] = None
    mm_processor_cache_gb: Annotated[
        float,
        Meta(ge=0),
        option(
            "GiB of processed images that each client and each rank keeps, so that an image that comes again is "
            "neither processed nor sent again. 0: none."
        ),
    ] = 4.0
    media_io_kwargs: Annotated[
        dict[str, Any] | None,
        json_option(
            'How images are read: {"image": {"rgba_background_color": [255, 255, 255]}} is the color behind '
            "transparent ones.",
            convert=parse_media_io,
        ),
    ] = None
    allowed_media_domains: Annotated[
        tuple[str, ...],
        option(
            "Hosts from which images may be fetched. Private addresses are refused, also after redirects.",
            metavar="HOST",
            default="none, so URLs of images are refused, except for data URLs",
            convert=_hosts,
        ),
    ] = ()
    allowed_local_media_path: Annotated[
        str,
        option(
            "Directory below which requests may name images by file URLs.",
            metavar="DIR",
            default="none, so file URLs are refused",
            convert=_directory,
        ),
    ] = ""
    enable_mm_embeds: Annotated[
        bool,
        option("Let requests give embeddings of images instead of images. They change what the model sees at will."),
    ] = False
    interleave_mm_strings: Annotated[
        bool,
        option(
            "With chat templates that take only text: put an image's placeholder where the image is in the message, "
            "not before its text."
        ),
    ] = False
    disable_chunked_mm_input: Annotated[
        bool, option("Compute all tokens of an image in the same step. Larger images than a step's tokens are refused.")
    ] = False
    max_image_bytes: Annotated[Count, option("Maximum size of an encoded image in bytes.")] = 32 << 20
    max_image_pixels: Annotated[
        Count, option("Maximum number of pixels of an image. Others are refused before they are decoded.")
    ] = 50_000_000
    media_timeout_s: Annotated[
        float, Meta(gt=0), option("Seconds within which an image must be fetched, with all redirects.")
    ] = 5.0
    max_image_tokens: int | None = None
    """Maximum number of tokens of an image, by the checkpoint's image processor. None: it doesn't say."""

    @property
    def max_images(self) -> int:
        """Maximum number of images of a prompt."""
        return (self.limit_mm_per_prompt or {}).get("image", _DEFAULT_LIMIT)

    @property
    def cache_bytes(self) -> int:
        """Size of a client's and of a rank's cache of processed images."""
        return int(self.mm_processor_cache_gb * 2**30)
