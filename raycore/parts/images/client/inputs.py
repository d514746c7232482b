"""The images of requests: from what users give to what an engine gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from raycore.client.inputs import PromptImages
from raycore.config import EngineConfig
from raycore.errors import InvalidConfig, InvalidRequest, RequestTooLarge
from raycore.lru_bytes import LruBytes
from raycore.messages import Feature, FeatureData
from raycore.parts.images.client.embeddings import is_embeddings, processed_embeddings
from raycore.parts.images.client.images import as_image, check_size, decode_image
from raycore.parts.images.client.placeholders import Placeholders
from raycore.parts.images.client.processor import ImageProcessor, Processed
from raycore.parts.images.client.sources import Sources
from raycore.parts.images.config import image_background, parse_media_io
from raycore.system import Executor, Lock, Thread, ThreadPoolExecutor, os, threading
from raycore.text.media_parts import MediaPart
from raycore.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

_NUM_WAITING = 16
"""Number of requests whose images are fetched or processed at the same time."""
_MAX_DECODING = 2
"""Number of images that are decoded or processed at the same time, each with up to some 10 bytes for each pixel."""
_MAX_NAME = 1024
_NAMES_BYTES = 4 << 20


class ImagePrompt(NamedTuple):
    """A prompt with images."""

    token_ids: list[int]
    features: list[Feature]
    data: list[FeatureData]


class ImageInputs(PromptImages):
    """Makes prompts with images, and keeps what it made of images. Thread-safe; its calls may take seconds."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        """
        Raises:
            InvalidConfig: a package is missing, or `mm_processor_kwargs` has settings that aren't known.
        """
        vision = config.model.spec.vision
        assert vision is not None
        self._vision = vision
        self._config = config.multimodal
        self._max_tokens = config.model.max_model_len
        self._processor = ImageProcessor(config.model.model, vision, self._config.mm_processor_kwargs or {})
        self._placeholders = Placeholders(vision, tokenizer)
        self._sources = Sources(self._config)
        self._kept: LruBytes[Processed] = LruBytes(self._config.cache_bytes)
        self._keys_of_names: LruBytes[str] = LruBytes(_NAMES_BYTES)
        """Under which key of `_kept` an image is that has a name of the user's."""
        self._lock = Lock()
        """Guards both, and the two numbers."""
        self._num_lookups = self._num_hits = 0
        self._executor = ThreadPoolExecutor(_NUM_WAITING, thread_name_prefix="raycore-images")  # has no threads yet
        self._decoding = threading.BoundedSemaphore(max(1, min(_MAX_DECODING, os.cpu_count() or 1)))

    @property
    def executor(self) -> Executor:
        """The threads on which event loops have images fetched and processed."""
        return self._executor

    @property
    def placeholder(self) -> str:
        """What stands for an image in a text."""
        return self._placeholders.text

    @property
    def interleaves(self) -> bool:
        """Whether the placeholders of templates that take only text are where the images are."""
        return self._config.interleave_mm_strings

    def prepare(self) -> None:
        """Begin to load the processor, on another thread. An error comes again with the first image."""

        def load() -> None:
            with suppress(Exception):  # told to whoever sends the first image
                self._processor.load()

        Thread(target=load, daemon=True, name="raycore-image-processor").start()

    def take_lookups(self) -> tuple[int, int]:
        """How many images were looked up among those that are kept since the last call, and how many were found."""
        with self._lock:
            taken = self._num_lookups, self._num_hits
            self._num_lookups = self._num_hits = 0
        return taken

    def clear(self) -> None:
        """Drop everything that is kept."""
        with self._lock:
            self._kept.clear()
            self._keys_of_names.clear()

    def complete(
        self, where: str, prompt: str | list[int], fields: Mapping[str, Any], *, adds_special_tokens: bool = True
    ) -> ImagePrompt:
        """Make a prompt with images.

        Args:
            where: what errors name.
            prompt: text or token ids, with a placeholder for each image.
            fields: `multi_modal_data`, and maybe `mm_processor_kwargs`, `multi_modal_uuids`, `media_io_kwargs` and
                `cache_salt`.

        Raises:
            InvalidRequest: an image is unusable, or doesn't fit the prompt. The message names it.
        """
        items = self._items(where, fields.get("multi_modal_data"))
        names = _names(where, fields.get("multi_modal_uuids"), len(items))
        asked: object = fields.get("mm_processor_kwargs")
        if asked is not None and not isinstance(asked, Mapping):
            raise InvalidRequest(f"{where}: mm_processor_kwargs={asked!r} isn't an object")
        kwargs = self._processor.merged(cast("Mapping[str, Any] | None", asked))
        background = self._background(fields.get("media_io_kwargs"))
        salt: str | None = fields.get("cache_salt")
        images: list[Processed] = []
        num_tokens = 0
        for index, (item, name) in enumerate(zip(items, names, strict=True)):
            label = item.where if isinstance(item, MediaPart) and item.where else f"{where}: image {index}"
            try:
                images += self._processed(item, name, salt, kwargs, background)
            except InvalidRequest as error:
                raise InvalidRequest(f"{label}: {error}") from None
            num_tokens = sum(image.num_tokens for image in images)
            if num_tokens >= self._max_tokens:
                # nothing more is fetched or decoded for a request that can't run
                raise RequestTooLarge(
                    f"{label}: with it, images have {num_tokens} tokens, and max_model_len is {self._max_tokens}"
                )
        try:
            if isinstance(prompt, str):
                token_ids = self._placeholders.in_text(prompt, images, adds_special_tokens=adds_special_tokens)
            else:
                token_ids = self._placeholders.in_tokens(prompt, images)
            features = self._placeholders.features(token_ids, images)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}") from None
        return ImagePrompt(token_ids, features, [part.data for image in images for part in image.parts])

    def embed(self, where: str, fields: Mapping[str, Any]) -> ImagePrompt:
        """Refuse a prompt of embeddings."""
        raise InvalidRequest(f"{where} has prompt_embeds, but a model that sees images takes no embeddings of prompts")

    # ---- what users give

    def _items(self, where: str, data: object) -> list[Any]:
        """Return the images of a prompt, as they were given."""
        if not isinstance(data, Mapping):
            raise InvalidRequest(f"{where}: multi_modal_data={data!r} isn't a mapping, such as {{'image': image}}")
        given = {key: value for key, value in cast("Mapping[str, Any]", data).items() if value is not None}
        for modality in given.keys() - {"image"}:
            raise InvalidRequest(
                f"{where}: multi_modal_data has {modality!r}, and this model takes only images and texts"
            )
        image = given.get("image")
        if isinstance(image, list | tuple):
            items = list(cast("Sequence[Any]", image))
        elif getattr(image, "ndim", 0) == 4:
            items = list(cast("Any", image))
        else:
            items = [] if image is None else [image]
        if len(items) > self._config.max_images:
            raise InvalidRequest(f"{where}: {len(items)} images, and limit_mm_per_prompt is {self._config.max_images}")
        return items

    def _background(self, asked: object) -> Sequence[int]:
        given = self._config.media_io_kwargs
        if asked is not None:
            try:
                given = parse_media_io(cast("Any", asked))
            except InvalidConfig as error:
                raise InvalidRequest(str(error)) from None
        return image_background(given)

    def _processed(
        self, item: Any, name: str | None, salt: str | None, kwargs: Mapping[str, Any], background: Sequence[int]
    ) -> list[Processed]:
        """Return an image, or several whose embeddings are in one array."""
        if isinstance(item, MediaPart):
            name = item.name or name
            if item.kind == "url":
                name = self._key_of_name(name, salt, kwargs, background)
                return [self._named(name, kwargs, lambda: self._decoded(item.value, background))]
            item = item.value if item.kind == "image" else {"image_embeds": item.value}
            inner: Any = cast("Mapping[str, Any]", item).get("image_embeds") if isinstance(item, Mapping) else None
            item = cast("Any", inner if isinstance(inner, Mapping) else item)
        if item is None or not is_embeddings(item):
            name = self._key_of_name(name, salt, kwargs, background)
            return [self._named(name, kwargs, lambda: _given(item))]
        if not self._config.enable_mm_embeds:
            raise InvalidRequest("embeddings of images need an engine with enable_mm_embeds=True")
        return processed_embeddings(item, self._vision, self._config.max_image_bytes)

    def _decoded(self, url: str, background: Sequence[int]) -> Image:
        data = self._sources.read(url)
        with self._decoding:
            return decode_image(data, self._config.max_image_pixels, background)

    def _key_of_name(
        self, name: str | None, salt: str | None, kwargs: Mapping[str, Any], background: Sequence[int]
    ) -> str | None:
        return None if name is None else self._processor.key_of_name(name, (salt, list(background)), kwargs)

    def _named(self, name: str | None, kwargs: Mapping[str, Any], load: Callable[[], Image]) -> Processed:
        """Return what is kept of an image, or process it.

        A name saves reading the image. Whatever is made of the image is known by its pixels all the same: others who
        get it, such as engines that share an `ec_connector`, needn't mean the same by a name.
        """
        kept = None if name is None else self._find_named(name)
        if kept is not None:
            return kept
        image = load()
        key = self._processor.key(image, kwargs)
        made = self._find(key, counts=name is None) or self._processed_now(image, kwargs, key)
        with self._lock:
            self._kept.put(key, made, made.num_bytes)
            if name is not None:
                self._keys_of_names.put(name, key, len(name) + len(key))
        return made

    def _processed_now(self, image: Image, kwargs: Mapping[str, Any], key: str) -> Processed:
        check_size(image.size, self._config.max_image_pixels)
        with self._decoding:
            return self._processor.process(image, kwargs, key)

    def _find_named(self, name: str) -> Processed | None:
        with self._lock:
            key = self._keys_of_names.get(name)
        return self._find(key or "")

    def _find(self, key: str, *, counts: bool = True) -> Processed | None:
        with self._lock:
            found = self._kept.get(key)
            self._num_lookups += counts
            self._num_hits += counts and found is not None
        return found


def _given(item: Any) -> Image:
    if item is None:
        raise InvalidRequest("it is None, and no image of its name in multi_modal_uuids is kept")
    image = as_image(item)
    if image is None:
        raise InvalidRequest(f"it is {type(item).__name__}, not a PIL image, an array or a tensor")
    return image


def _names(where: str, given: object, count: int) -> list[str | None]:
    """Return the images' names in `multi_modal_uuids`, with None for those without."""
    if not given:
        return [None] * count
    found: object = cast("Mapping[str, Any]", given).get("image") if isinstance(given, Mapping) else given
    names: list[Any] = list(cast("Sequence[Any]", found)) if isinstance(found, list | tuple) else [found]
    if not isinstance(given, Mapping) or len(names) != count:
        raise InvalidRequest(f"{where}: multi_modal_uuids={given!r} doesn't have a name for each of {count} images")
    for name in names:
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= _MAX_NAME):
            raise InvalidRequest(
                f"{where}: multi_modal_uuids has {name!r}, which isn't a text of 1 to {_MAX_NAME} characters"
            )
    return names
