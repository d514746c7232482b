"""Normalizes and checks the prompts, request ids and priorities that users pass.

Pure, but for images, which `raycore.parts.images.client` fetches and processes. Whether a request exceeds the engine's
limits is checked elsewhere (`RequestLimits`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, cast

from raycore.beam_search import BeamSearchParams
from raycore.client.tokenization import PLAIN, Tokenization
from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.lora.request import LoRARequest
from raycore.messages import Feature, FeatureData
from raycore.sampling_params import SamplingParams, checked_int
from raycore.system import Executor
from raycore.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or one of the types in `raycore.inputs`. A mapping may also have a `cache_salt`.
One of a pair of texts may have `token_type_ids`: 0 for the tokens of the first text, then 1 for those of the second.
Prompts of models that take images may have `multi_modal_data`, `multi_modal_uuids` and `mm_processor_kwargs`."""

_EMBEDS_KEYS = ("prompt_embeds", "prompt_is_token_ids")
_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "token_type_ids", "prompt_token_offsets", *_EMBEDS_KEYS)
_IMAGE_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs")


class PromptImages:
    """What makes prompts with images or of embeddings: `raycore.parts.images.client.inputs.ImageInputs`, or `OnlyText`,
    whose properties are these."""

    def complete(
        self, where: str, prompt: str | list[int], fields: Mapping[str, Any], *, adds_special_tokens: bool = True
    ) -> tuple[list[int], list[Feature], list[FeatureData]]:
        """Return the prompt's token ids, where its images are, and their data. Raises InvalidRequest."""
        raise NotImplementedError

    def embed(self, where: str, fields: Mapping[str, Any]) -> tuple[list[int], list[Feature], list[FeatureData]]:
        """The same for a prompt of embeddings, `prompt_embeds`."""
        raise NotImplementedError

    @property
    def executor(self) -> Executor | None:
        """The threads that do this for event loops. None: it takes no time."""
        return None

    @property
    def placeholder(self) -> str | None:
        """What stands for an image in a text. None: nothing does."""
        return None

    @property
    def interleaves(self) -> bool:
        """Whether the placeholders of templates that take only text are where the images are."""
        return False

    @property
    def max_embeds_bytes(self) -> int | None:
        """How many bytes the embeddings of a prompt have at most, in float64. None: they are refused."""
        return None

    def take_lookups(self) -> tuple[int, int]:
        """How many images were looked up among those that are kept since the last call, and how many were found."""
        return 0, 0

    def clear(self) -> None:
        """Drop everything that is kept."""


class Embeds(Protocol):
    """What makes prompts of embeddings: `raycore.client.prompt_embeds.PromptEmbeds`."""

    @property
    def max_bytes(self) -> int:
        """How many bytes the embeddings of a prompt have at most, in float64."""
        ...

    def complete(
        self, where: str, given: object, token_ids: Sequence[int] | None, is_token: object = None
    ) -> tuple[list[int], list[Feature], list[FeatureData]]:
        """Return the prompt's token ids, its features, and their data. Raises InvalidRequest."""
        ...


class OnlyText(PromptImages):
    """For a model that takes only text."""

    def __init__(self, model: str = "this model", embeds: Embeds | None = None) -> None:
        """`embeds`: makes prompts of embeddings. None: they are refused."""
        self._model = model
        self._embeds = embeds

    def complete(
        self, where: str, prompt: str | list[int], fields: Mapping[str, Any], *, adds_special_tokens: bool = True
    ) -> tuple[list[int], list[Feature], list[FeatureData]]:
        """Refuse the images."""
        raise InvalidRequest(f"{where} has images, but {self._model} takes only texts")

    @property
    def max_embeds_bytes(self) -> int | None:
        """Those of prompts of embeddings, if they aren't refused."""
        return None if self._embeds is None else self._embeds.max_bytes

    def embed(self, where: str, fields: Mapping[str, Any]) -> tuple[list[int], list[Feature], list[FeatureData]]:
        """Make a prompt of embeddings."""
        if self._embeds is None:
            raise InvalidRequest(f"{where} has prompt_embeds, which need an engine with enable_prompt_embeds=True")
        ids: Any = fields.get("prompt_token_ids")
        given = None if ids is None else _token_ids(f"{where}: 'prompt_token_ids'", ids, "a list of token ids")
        return self._embeds.complete(where, fields["prompt_embeds"], given, fields.get("prompt_is_token_ids"))


_ONLY_TEXT = OnlyText()


@dataclass(slots=True)
class ParsedPrompt:
    """A prompt as token ids, and as text if it was given as text."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    """Cached prefixes are shared only among requests with the same salt."""
    second_text: int = 0
    """The index of the token at which the second text of a pair begins. 0: there is one text."""
    features: Sequence[Feature] = ()
    """Where images or embeddings are in the prompt."""
    feature_data: Sequence[FeatureData] = ()
    """What these are encoded from."""
    has_unknown_tokens: bool = False
    """Whether there are embeddings of tokens that the request doesn't name."""
    is_tokenized: bool = False
    """Whether `token_ids` are those of `text`, and nothing was added to them."""


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    given: Any = prompts  # users may pass anything
    if isinstance(given, str | Mapping):
        return [cast(Prompt, given)]
    if not isinstance(given, Sequence):
        raise InvalidRequest(
            f"prompts={given!r} isn't a prompt (a string, token ids or a mapping) or a list of prompts{_hint(given)}"
        )
    items = list(cast(Sequence[Any], given))
    if items and all(isinstance(item, Integral) for item in items):
        return [items]
    return items


def parse_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, how: Tokenization = PLAIN, images: PromptImages = _ONLY_TEXT
) -> list[ParsedPrompt]:
    """Check prompts, and tokenize all those that are given as text in one batch.

    `images`: makes prompts with images, which may take long.

    Raises:
        InvalidRequest: a prompt is invalid; the message names its index.
    """
    parsed = [_split(index, prompt) for index, prompt in enumerate(prompts)]
    for index, prompt in enumerate(prompts):
        if has_images(prompt):
            _add_images(index, parsed[index], cast("Mapping[str, Any]", prompt), images, how)
        elif has_embeds(prompt):
            _add_embeds(index, parsed[index], cast("Mapping[str, Any]", prompt), images, how)
    texts = [p.text for p in parsed if p.text is not None and not p.token_ids]
    encoded = iter(how.encode(texts, tokenizer) if texts else [])
    for p in parsed:
        if p.text is not None and not p.token_ids:
            p.token_ids, p.is_tokenized = next(encoded), True
        else:
            p.token_ids = how.cut(p.token_ids, tokenizer)
    return parsed


def has_images(prompt: object) -> bool:
    """Whether a prompt has images, so that making it a `ParsedPrompt` may take long."""
    return isinstance(prompt, Mapping) and bool(cast("Mapping[str, Any]", prompt).get("multi_modal_data"))


def _add_images(
    index: int, parsed: ParsedPrompt, fields: Mapping[str, Any], images: PromptImages, how: Tokenization
) -> None:
    if how.max_tokens is not None:
        raise InvalidRequest(f"prompt {index} has images, and truncate_prompt_tokens could cut one off")
    given = parsed.token_ids or parsed.text or ""
    parsed.token_ids, parsed.features, parsed.feature_data = images.complete(
        f"prompt {index}", given, fields, adds_special_tokens=how.add_special_tokens
    )


def has_embeds(prompt: object) -> bool:
    """Whether a prompt is given as embeddings."""
    return isinstance(prompt, Mapping) and cast("Mapping[str, Any]", prompt).get("prompt_embeds") is not None


def _add_embeds(
    index: int, parsed: ParsedPrompt, fields: Mapping[str, Any], images: PromptImages, how: Tokenization
) -> None:
    if how.max_tokens is not None:
        raise InvalidRequest(f"prompt {index} has embeddings, which truncate_prompt_tokens doesn't cut")
    parsed.token_ids, parsed.features, parsed.feature_data = images.embed(f"prompt {index}", fields)
    parsed.has_unknown_tokens = fields.get("prompt_token_ids") is None


def _split(index: int, prompt: Any) -> ParsedPrompt:
    """Check a prompt without tokenizing it: `token_ids` of the result is empty if only text was given."""
    if isinstance(prompt, ParsedPrompt):
        return prompt
    if not isinstance(prompt, Mapping):
        return _text_or_ids(index, prompt)
    fields = cast(Mapping[Any, Any], prompt)
    _check_keys(index, fields)
    if has_embeds(fields):
        text = fields.get("prompt")
        parsed = ParsedPrompt(None if text is None else _text(index, text), [])
    elif fields.get("prompt_token_ids") is not None:
        text = fields.get("prompt")
        parsed = ParsedPrompt(
            None if text is None else _text(index, text),
            _token_ids(f"prompt {index}: 'prompt_token_ids'", fields["prompt_token_ids"], "a list of token ids"),
        )
    elif fields.get("prompt") is not None:
        parsed = _text_or_ids(index, fields["prompt"])
    else:
        raise InvalidRequest(
            f"prompt {index} is a mapping without 'prompt', 'prompt_token_ids' or 'prompt_embeds': {list(fields)}"
        )
    parsed.cache_salt = _cache_salt(index, fields.get("cache_salt"))
    if fields.get("token_type_ids") is not None:
        parsed.second_text = _second_text(index, fields["token_type_ids"], parsed.token_ids)
    return parsed


def _check_keys(index: int, fields: Mapping[Any, Any]) -> None:
    for key, value in fields.items():
        if key in _KEYS or (key in _IMAGE_KEYS and (not value or has_images(fields))):
            continue
        if key in ("encoder_prompt", "decoder_prompt"):
            raise InvalidRequest(
                f"prompt {index} has {key!r}, for models that encode one text and decode another: raycore has none"
            )
        raise InvalidRequest(
            f"prompt {index} has the key {key!r}, which isn't supported: a prompt has 'prompt' (a string) or "
            "'prompt_token_ids' or 'prompt_embeds', and may have 'cache_salt', 'token_type_ids' and "
            "'multi_modal_data', with 'multi_modal_uuids' and 'mm_processor_kwargs'"
        )
    if has_images(fields) and has_embeds(fields):
        raise InvalidRequest(f"prompt {index} has both 'prompt_embeds' and 'multi_modal_data': give one of them")


def _second_text(index: int, given: Any, token_ids: list[int]) -> int:
    types = _token_ids(f"prompt {index}: 'token_type_ids'", given, "a list of 0 and 1")
    if len(types) != len(token_ids):
        raise InvalidRequest(
            f"prompt {index}: 'token_type_ids' has {len(types)} types for {len(token_ids)} 'prompt_token_ids': give "
            "one for each"
        )
    second = types.index(1) if 1 in types else len(types)
    if types != [0] * second + [1] * (len(types) - second) or second == 0:
        raise InvalidRequest(f"prompt {index}: 'token_type_ids' isn't 0 for a first text, then 1 for a second one")
    return second if second < len(types) else 0


def _text_or_ids(index: int, prompt: Any) -> ParsedPrompt:
    if isinstance(prompt, str):
        return ParsedPrompt(_text(index, prompt), [])
    return ParsedPrompt(None, _token_ids(f"prompt {index}", prompt, f"a string or a list of token ids{_hint(prompt)}"))


def _hint(given: object) -> str:
    return "; streams of StreamingInput are for AsyncLLM.generate()" if isinstance(given, AsyncIterator) else ""


def _text(index: int, text: Any) -> str:
    if not isinstance(text, str):
        raise InvalidRequest(f"prompt {index}: 'prompt' is {type(text).__name__}, not a string")
    if not text:
        raise InvalidRequest(f"prompt {index} is an empty string: there is nothing to continue")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"prompt {index} contains {text[error.start]!a} at character {error.start}: half of a surrogate pair "
            "isn't a character"
        ) from None
    return text


def _cache_salt(index: int, salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise InvalidRequest(f"prompt {index}: cache_salt={salt!r} isn't a non-empty string")
    try:
        salt.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"prompt {index}: cache_salt={salt!a} contains half of a surrogate pair") from None
    return str.__str__(salt)


def _token_ids(where: str, ids: Any, expected: str) -> list[int]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise InvalidRequest(f"{where} is {type(ids).__name__}, not {expected}")
    if not ids:
        raise InvalidRequest(f"{where} is empty: there is nothing to continue")
    token_ids = list(cast(Sequence[Any], ids))
    if set(map(type, token_ids)) == {int}:
        return token_ids
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise InvalidRequest(f"{where} contains {token_id!r}, which isn't a token id: token ids are integers")
    return [int(token_id) for token_id in token_ids]


def checked_request_id(request_id: object) -> str:
    """`request_id` as a plain str.

    Raises:
        InvalidRequest: `request_id` isn't a string, or can't be encoded as UTF-8.
    """
    if not isinstance(request_id, str):
        raise InvalidRequest(f"request_id={request_id!r} isn't a string")
    try:
        request_id.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"request_id={request_id!r} contains half of a surrogate pair") from None
    return str.__str__(request_id)


def priorities_for_each(priority: int | Sequence[int] | None, count: int) -> list[int]:
    """The priority of each of `count` prompts. None: 0.

    Raises:
        InvalidRequest: `priority` is neither an integer nor a list of `count` integers.
    """
    given: Any = priority  # users may pass anything
    if given is None:
        return [0] * count
    if isinstance(given, Integral):
        return [checked_int("priority", given)] * count
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidRequest(f"priority={given!r} isn't a list of integers, one for each prompt")
    priorities = [checked_int("priority", each) for each in cast(Iterable[Any], given)]
    if len(priorities) != count:
        raise InvalidRequest(f"{len(priorities)} priorities for {count} prompts: give one for each")
    return priorities


def adapters_for_each(
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None, count: int
) -> list[LoRARequest | None]:
    """The adapter of each of `count` prompts: one for all, or one for each.

    Raises:
        InvalidRequest: `lora_request` is neither, or isn't valid.
    """
    given: Any = lora_request  # users may pass anything
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    each: list[Any] = list(cast(Sequence[Any], given)) if is_list else [given] * count
    if len(each) != count:
        raise InvalidRequest(f"lora_request has {len(each)} entries for {count} prompts: give one for each")
    return [checked_adapter(adapter) for adapter in each]


def checked_adapter(adapter: object) -> LoRARequest | None:
    """Return an adapter, or None for none. Raises InvalidRequest if it is something else."""
    if adapter is not None and not isinstance(adapter, LoRARequest):
        raise InvalidRequest(f"lora_request={shortened(adapter)} isn't a LoRARequest")
    return adapter


def params_for_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    """The sampling parameters of each of `count` prompts.

    Raises:
        InvalidRequest: `params` is a list of another length than `count`, or something else.
    """
    if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
        return [checked_params(params)] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling_params for {count} prompts: give one, or one for each")
    return [checked_params(each) for each in params]


def checked_params(params: object) -> SamplingParams:
    """Return sampling parameters. Raises InvalidRequest if they aren't."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"sampling_params={shortened(params)} isn't a SamplingParams: give SamplingParams(temperature=0.5), with "
            "what you need"
        )
    return params


def checked_beam_params(params: object) -> BeamSearchParams:
    """Return the parameters of a beam search. Raises InvalidRequest if they aren't."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidRequest(f"params={shortened(params)} isn't a BeamSearchParams: give its beam_width and max_tokens")
    return params
