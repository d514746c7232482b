"""Sampling parameters. Names, defaults and meanings are vLLM's, as far as vLLM has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin

import msgspec
from msgspec import Meta

from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.reasoning_tags import ReasoningTags
from raycore.short_tracebacks import ends_traceback
from raycore.structured_outputs import StructuredOutputsParams

MIN_INT, MAX_INT = -(2**63), 2**63 - 1
"""Engines use 64-bit integers."""
MAX_SEED = MAX_INT
MAX_LOGPROB_TOKEN_IDS = 128
"""Maximum length of `logprob_token_ids`."""
_MAX_N = 1 << 14
"""Maximum of `n`, because a client creates all sequences of a request at once."""
_MAX_DEPTH = 64
"""How deep `extra_args` may be nested."""
GREEDY_BELOW = 1e-5
"""With a temperature below this, sampling is greedy."""


class RequestOutputKind(Enum):
    """What the outputs of a request contain while it runs."""

    CUMULATIVE = 0
    """All of the output so far."""
    DELTA = 1
    """What is new since the previous output that the caller got."""
    FINAL_ONLY = 2
    """There is one output, at the end."""


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True):
    """When an output ends because it repeats itself: if the same tokens follow each other `min_count` times.

    Raises:
        InvalidRequest: from the constructor, if a value is invalid. The message names it.
    """

    max_pattern_size: int = 0
    """Maximum number of tokens that are repeated. 0: nothing is detected."""
    min_pattern_size: int = 0
    """Minimum number of tokens that are repeated. 0 means 1."""
    min_count: int = 0
    """How often they have to come, at least 2."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, checked_int(f"repetition_detection.{name}", getattr(self, name), 0))
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidRequest(
                f"repetition_detection has min_pattern_size={self.min_pattern_size}, above "
                f"max_pattern_size={self.max_pattern_size}"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise InvalidRequest(f"repetition_detection.min_count={self.min_count} isn't at least 2")


class _OrderedParams(msgspec.Struct, omit_defaults=True):
    """The sampling parameters that may be given by position, in vLLM's order."""

    n: Annotated[int, Meta(ge=1, le=_MAX_N)] = 1
    """Number of sequences to generate for the prompt."""
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Subtracted once from the logit of each token that has been generated."""
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Subtracted from a token's logit once for each time it has been generated."""
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    """For tokens in the prompt or the output, positive logits are divided by the penalty, and negative logits are
    multiplied by it."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Logits are divided by the temperature. 0: greedy sampling."""
    watermarking: bool | None = None
    """None or False: raycore has no watermarks."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to at least this."""
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """Sample from the `top_k` most likely tokens. 0 or -1: all tokens."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Sample from the tokens whose probability is at least `min_p` times that of the most likely token."""
    seed: Annotated[int, Meta(ge=-1)] | None = None
    """The same seed, prompt and parameters give the same random numbers, regardless of other requests. None or -1:
    derived from the engine's seed."""
    stop: str | list[str] | None = None
    """Strings that end the sequence when they occur in its text."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the sequence, in addition to the model's own end-of-sequence tokens: those of
    `generation_config.json` (or of `config.json` if there are none), and the tokenizer's `eos_token`."""
    ignore_eos: bool = False
    max_tokens: Annotated[int, Meta(ge=1)] | None = 16
    """Maximum number of generated tokens. None: limited only by `max_model_len`."""
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Number of tokens to generate before end-of-sequence tokens and `stop_token_ids` can be sampled. A constrained
    output may end earlier, when it is complete and nothing can follow it."""
    logprobs: Annotated[int, Meta(ge=-1)] | None = None
    """For each generated token, return the log probabilities of the `logprobs` most likely tokens and of the sampled
    token. -1: of all tokens."""
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    """For each prompt token, return the log probabilities of the `prompt_logprobs` most likely tokens and of the prompt
    token. -1: of all tokens. For this and `logprobs`, True means 1, and False None."""


class SamplingParams(_OrderedParams, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request.

    The parameters from `n` to `prompt_logprobs` may be given by position, in vLLM's order.

    Raises:
        InvalidRequest: from the constructor, if a value is invalid. The message names it.
    """

    top_n_sigma: Annotated[float, Meta(ge=0)] = 0.0
    """Sample from the tokens whose logit is at most this many standard deviations of the logits below the largest
    logit, after penalties and before the temperature. 0: all tokens."""
    stop_after: str | None = None
    """The tag that closes the reasoning, such as `</think>`. The strings in `stop` are searched for after the first
    such tag; those that are only white space, after the white space that follows the tag. None: in the whole text."""
    stop_or_from: str | None = None
    """With `stop_after`: another tag that ends the reasoning, such as `<tool_call>`. The strings in `stop` are then
    searched for from this tag on."""
    flat_logprobs: bool = False
    """Whether log probabilities come in a `FlatLogprobs`, which costs less memory than as many dicts."""
    repetition_detection: RepetitionDetectionParams | None = None
    """Ends the output when it repeats itself, with the finish reason `repetition`. None: it may."""
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None
    """Maximum number of tokens of the model's reasoning. After so many, the tag that closes the reasoning is forced.
    None or -1: no limit. Needs the engine's `reasoning_config`, or `reasoning_tags`."""
    trace_decode_token_ids: list[int] | None = None
    """The output: these tokens, whatever the model would write, and no others. Log probabilities and hidden states are
    those of the model; but with `logprobs_mode="processed_logprobs"`, which are those after the forcing, the token has
    0 and all others minus infinity. `max_tokens` and the end-of-sequence token have no effect. Prompt and tokens must
    fit in `max_model_len`."""
    reasoning_tags: ReasoningTags | None = None
    """With `thinking_token_budget`: how the model writes its reasoning. None: as `reasoning_config` says."""
    logprob_token_ids: list[int] | None = None
    """For each generated token, return the log probabilities of these tokens, at most 128, and of the sampled token.
    If `logprobs` is given, too, it must be their number."""
    return_hidden_states: bool = False
    """For each generated token, return the final hidden state that it was sampled from."""
    return_prompt_hidden_states: bool = False
    """For each prompt token, return its final hidden state. The prompt is then computed without the prefix cache."""
    logit_bias: dict[int, float] | None = None
    """Added to logits, by token id. Clamped to [-100, 100]."""
    allowed_token_ids: list[int] | None = None
    """If set, only these tokens can be sampled."""
    bad_words: list[str] | None = None
    """Words that must not be generated, with or without a space before them. They are forbidden as the tokenizer writes
    them; a model may still spell a word with other tokens."""
    structured_outputs: StructuredOutputsParams | None = None
    """A constraint on the output, such as a JSON schema. If this constraint and the other parameters together leave no
    token to sample, the constraint takes precedence."""
    extra_args: dict[str, Any] | None = None
    """Arguments for code that extends raycore: a dict of values as in JSON. `kv_transfer_params`, a dict, is for the KV
    connector."""
    detokenize: bool = True
    """False: outputs have no texts, neither of sequences nor of tokens."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """No effect: the tokenizer's decoder alone decides where the text has spaces."""
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What the outputs of `AsyncLLM.generate`, `LLM.stream` and `LLMEngine.step` contain."""
    stream_interval: int | None = None
    """Number of new tokens in each of these outputs, but for the first and the last one. None: what is there."""
    on_version_change: Literal["continue", "fail"] = "continue"
    """What happens if the engine's weights change while the request runs. `continue`: the next tokens come from the new
    weights. `fail`: the request ends with a `WeightVersionChanged`."""
    skip_clone: bool = False
    """No effect: a request always has a copy of its parameters."""

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Return parameters that are the defaults where `given` has None. A `max_tokens` of None remains.

        `logit_bias` may have texts as token ids, and is clamped to [-100, 100].

        Raises:
            InvalidRequest: a value is invalid. The message names it.
        """
        chosen: dict[str, Any] = {
            name: value for name, value in given.items() if value is not None or name == "max_tokens"
        }
        biases: Any = chosen.get("logit_bias")
        if isinstance(biases, Mapping):
            chosen["logit_bias"] = {
                _token_id(key): max(-100.0, min(100.0, _checked_float(f"logit_bias[{key}]", bias)))
                for key, bias in cast("Mapping[Any, Any]", biases).items()
            }
        return cls(**chosen)

    @ends_traceback
    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self._check_ranges()
        self._check_combinations()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, empty if it is None."""
        assert not isinstance(self.stop, str), "normalised by the constructor"
        return self.stop or []

    @property
    def num_logprobs(self) -> int | None:
        """For how many tokens besides the sampled one log probabilities are returned at each position. -1: all. None:
        none are returned, not even that of the sampled token."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    def early_end_ids(self, eos_token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens that may end a complete constrained output before `min_tokens`. Empty without a constraint.

        These are the model's end-of-sequence tokens; with `ignore_eos`, they are the `stop_token_ids` instead. Stop
        tokens are otherwise left out, because they may also be parts of a constrained output.
        """
        if self.structured_outputs is None:
            return ()
        return (self.stop_token_ids or ()) if self.ignore_eos else eos_token_ids

    def clone(self) -> SamplingParams:
        """A deep copy."""
        return msgspec.convert(msgspec.to_builtins(self), SamplingParams, strict=False)

    def snapshot(self) -> SamplingParams:
        """A copy that later changes to this object don't affect. The copy's values are checked.

        Raises:
            InvalidRequest: a field was set to an invalid value.
        """
        copy = msgspec.structs.replace(self)  # runs the constructor's checks, which copy lists
        for name in ("structured_outputs", "repetition_detection"):
            if (inner := getattr(copy, name)) is not None:
                setattr(copy, name, msgspec.structs.replace(inner))
        return copy

    def _check_ranges(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(asked := getattr(self, name), bool):
                setattr(self, name, 1 if asked else None)
        for field in RANGES.values():
            value = getattr(self, field.name)
            if value is not None or not field.takes_none:
                setattr(self, field.name, field.checked(value))
        self.top_k = max(0, self.top_k)
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self._check_flags()
        self._check_tokens()

    def _check_flags(self) -> None:
        for name in _FLAGS:
            value = getattr(self, name)
            if value is not True and value is not False:
                raise InvalidRequest(f"{name}={value!r} isn't True or False")
        if self.watermarking is not None and self.watermarking is not False:
            raise InvalidRequest(f"watermarking={self.watermarking!r} isn't supported: raycore has no watermarks")
        kind: Any = self.output_kind  # users may pass anything
        if not isinstance(kind, RequestOutputKind):
            raise InvalidRequest(f"output_kind={kind!r} isn't a RequestOutputKind")
        change: Any = self.on_version_change  # users may pass anything
        if not (isinstance(change, str) and change in ("continue", "fail")):
            raise InvalidRequest(f"on_version_change={change!r} isn't 'continue' or 'fail'")
        if self.stream_interval is not None:
            self.stream_interval = checked_int("stream_interval", self.stream_interval, 1)
        if self.extra_args is not None:
            self.extra_args = json_like("extra_args", self.extra_args)

    def _check_tokens(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "trace_decode_token_ids"):
            ids = getattr(self, name)
            _check_list(name, ids)
            if ids is not None:
                setattr(self, name, [checked_int(name, token_id, 0) for token_id in ids])
        biases: Any = self.logit_bias  # users may pass anything
        if biases is None:
            return
        if not isinstance(biases, Mapping):
            raise InvalidRequest(f"logit_bias={biases!r} isn't a mapping of token ids to numbers")
        self.logit_bias = {
            checked_int("logit_bias key", token_id, 0): _checked_float(f"logit_bias[{token_id}]", bias)
            for token_id, bias in cast(Mapping[Any, Any], biases).items()
        }

    def _replay(self, token_ids: list[int]) -> None:
        """Have the output end after the tokens that are replayed, and nowhere else."""
        if not token_ids:
            raise InvalidRequest("trace_decode_token_ids=[] has no token to replay")
        if self.n != 1:
            raise InvalidRequest(f"n={self.n} with trace_decode_token_ids: all outputs would be the same")
        for name in ("stop", "stop_token_ids", "structured_outputs", "thinking_token_budget", "repetition_detection"):
            if value := getattr(self, name):
                raise InvalidRequest(
                    f"{name}={shortened(value)} with trace_decode_token_ids, which are replayed as given"
                )
        self.max_tokens, self.min_tokens, self.ignore_eos = len(token_ids), 0, True

    def _check_combinations(self) -> None:
        asked: Any = self.structured_outputs  # users may pass anything
        if asked is not None and not isinstance(asked, StructuredOutputsParams):
            raise InvalidRequest(f"structured_outputs={asked!r} isn't a StructuredOutputsParams")
        detected: Any = self.repetition_detection
        if detected is not None and not isinstance(detected, RepetitionDetectionParams):
            raise InvalidRequest(f"repetition_detection={shortened(detected)} isn't a RepetitionDetectionParams")
        if self.trace_decode_token_ids is not None:
            self._replay(self.trace_decode_token_ids)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        tags: Any = self.reasoning_tags
        if tags is not None and not isinstance(tags, ReasoningTags):
            raise InvalidRequest(f"reasoning_tags={tags!r} isn't a ReasoningTags")
        self._check_logprob_token_ids()
        if self.n > 1 and self.is_greedy:
            raise InvalidRequest(
                f"n={self.n} with temperature={self.temperature}: greedy sequences would all be the same"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids=[] leaves no token to sample")
        for name in ("stop", "bad_words"):
            words = getattr(self, name)
            _check_list(name, words)
            if words is not None:
                setattr(self, name, [_checked_word(name, word) for word in words])
        for name in ("stop_after", "stop_or_from"):
            tag: Any = getattr(self, name)
            if tag is None:
                continue
            if not isinstance(tag, str) or not tag:
                raise InvalidRequest(f"{name}={tag!r} isn't a non-empty string")
            setattr(self, name, _checked_word(name, tag))
        if self.stop_or_from is not None and self.stop_after is None:
            raise InvalidRequest(f"stop_or_from={self.stop_or_from!r} is given without stop_after: give both")
        if self.stop and not self.detokenize:
            raise InvalidRequest(f"stop={self.stop!r} needs text, but detokenize=False: use stop_token_ids")

    def _check_logprob_token_ids(self) -> None:
        self.logprob_token_ids = self.logprob_token_ids or None
        if self.logprob_token_ids is None:
            return
        count = len(self.logprob_token_ids)
        if count > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(f"logprob_token_ids has {count} entries; at most {MAX_LOGPROB_TOKEN_IDS} are returned")
        if self.logprobs not in (None, count):
            raise InvalidRequest(
                f"logprobs={self.logprobs} with {count} logprob_token_ids: omit logprobs, or give their number"
            )


class Range(NamedTuple):
    """A field of `SamplingParams` that takes a number, and the numbers that it takes."""

    name: str
    is_int: bool
    takes_none: bool
    low: float
    excludes_low: bool
    """Whether `low` itself is invalid."""
    high: float
    """`MAX_INT` or infinity if no upper bound is declared."""

    def checked(self, value: object) -> int | float:
        """`value` as a plain int or float.

        Raises:
            InvalidRequest: `value` is not in the range. The message begins with the field's name.
        """
        if self.is_int:
            return checked_int(self.name, value, int(self.low), int(self.high))
        return _checked_float(self.name, value, self.low, self.high, excludes_low=self.excludes_low)


def _ranges() -> Iterator[Range]:
    for field in msgspec.structs.fields(SamplingParams):
        hints = get_args(field.type) if get_origin(field.type) is Union else (field.type,)
        for hint in hints:
            for bounds in getattr(hint, "__metadata__", ()):
                low, high = (bounds.ge if bounds.gt is None else bounds.gt), bounds.le
                if hint.__origin__ is int:
                    high = MAX_INT if high is None else high
                else:
                    low, high = float(low), math.inf if high is None else float(high)
                yield Range(field.name, hint.__origin__ is int, NoneType in hints, low, bounds.gt is not None, high)


RANGES = {field.name: field for field in _ranges()}
"""The declared ranges, by field."""

_FLAGS = tuple(field.name for field in msgspec.structs.fields(SamplingParams) if field.type is bool)


def _check_list(name: str, value: object) -> None:
    if value is not None and not isinstance(value, list):
        raise InvalidRequest(f"{name}={value!r} isn't a list")


def _checked_word(name: str, word: object) -> str:
    if not isinstance(word, str) or not word:
        raise InvalidRequest(f"{name} contains {word!r}: every entry must be a non-empty string")
    if not is_encodable(word):
        raise InvalidRequest(f"{name} contains {word!r}: half of a surrogate pair isn't a character")
    return str.__str__(word)


def _token_id(key: object) -> int:
    if isinstance(key, str) and key.isdecimal():
        return int(key)
    return checked_int("logit_bias key", key, 0)


def json_like(name: str, given: object) -> dict[str, Any]:
    """A copy of a dict of values as in JSON.

    Raises:
        InvalidRequest: `given` isn't one. The message begins with `name`.
    """
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{name}={shortened(given)} isn't a dict")
    return _json_copy(name, cast("Mapping[Any, Any]", given), 0)


def _json_copy(name: str, value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _json_text(name, value)
    if isinstance(value, int):
        return checked_int(name, value)
    if isinstance(value, float):
        return _checked_float(name, value)
    if depth == _MAX_DEPTH:
        raise InvalidRequest(f"{name} is nested in more than {_MAX_DEPTH} levels")
    if isinstance(value, list | tuple):
        return [_json_copy(f"{name}[{index}]", each, depth + 1) for index, each in enumerate(cast("list[Any]", value))]
    if isinstance(value, Mapping):
        given = cast("Mapping[Any, Any]", value)
        for key in given:
            if not isinstance(key, str):
                raise InvalidRequest(f"{name} has the key {shortened(key)}, which isn't a string")
        return {
            _json_text(f"a key of {name}", key): _json_copy(f"{name}[{key!r}]", each, depth + 1)
            for key, each in given.items()
        }
    raise InvalidRequest(f"{name}={shortened(value)} isn't a value as in JSON")


def _json_text(name: str, value: str) -> str:
    """`value` as a plain str, which can be encoded."""
    if not is_encodable(value):
        raise InvalidRequest(f"{name}={shortened(value)} contains half of a surrogate pair")
    return str.__str__(value)


def is_encodable(value: str) -> bool:
    """Whether a string can be encoded as UTF-8. Strings from JSON may contain halves of surrogate pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked_int(name: str, value: object, low: int = MIN_INT, high: int = MAX_INT) -> int:
    """`value` as a plain int. Other integer types, such as numpy's, are converted; booleans are refused.

    Raises:
        InvalidRequest: `value` is not an integer in [`low`, `high`]. The message begins with `name`.
    """
    if type(value) is not int:  # rare
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InvalidRequest(f"{name}={value!r} isn't an integer")
        value = int(value)
    if low <= value <= high:
        return value
    bounds = f"at least {low}" if value < low and low > MIN_INT else f"in [{low}, {high}]"
    raise InvalidRequest(f"{name}={value} isn't {bounds}")


def _checked_float(
    name: str, value: object, low: float = -math.inf, high: float = math.inf, *, excludes_low: bool = False
) -> float:
    """`value` as a plain float, finite and in [`low`, `high`], or in (`low`, `high`]. Otherwise like `checked_int`."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidRequest(f"{name}={value!r} isn't a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if math.isfinite(value) and low <= value <= high and not (excludes_low and value == low):
        return value
    if not math.isinf(high):
        bounds = f"in {'(' if excludes_low else '['}{low}, {high}]"
    elif not math.isinf(low):
        bounds = f"{'above' if excludes_low else 'at least'} {low}"
    else:
        bounds = "finite"
    raise InvalidRequest(f"{name}={value} isn't {bounds}")
