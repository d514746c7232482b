"""A request as the scheduler represents it, and the limits that requests are checked against."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from raycore.cache_layout import CacheLayout
from raycore.errors import InvalidRequest, RequestTooLarge
from raycore.kvcache.prefix_cache import ROOT_DIGEST, adapter_digest, extend_digests, identity_digest, root_digest
from raycore.messages import NO_ADAPTER, EngineInfo, EngineRequest, Feature, FeatureData, NewRequest, ThinkingLimit
from raycore.parts.images.config import EncoderLimits
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import RepetitionDetectionParams, SamplingParams

PUBLISHES_ALL = 1 << 40
"""More blocks than any request has."""
REASON, DETAIL = "repetition", "repetition_detected"
"""The finish reason and the stop reason of an output that ends because of it."""


class RepetitionDetector:
    """Detects that the end of an output repeats itself. Gets its tokens, each of which costs as many comparisons as
    there are sizes of patterns."""

    def __init__(self, params: RepetitionDetectionParams, max_tokens: int, output: Iterable[int] = ()) -> None:
        """`max_tokens`: of the output. `output`: its tokens so far."""
        first = max(1, params.min_pattern_size)
        last = min(params.max_pattern_size, max_tokens // max(2, params.min_count))
        sizes = np.arange(first, last + 1)
        self._past = np.full(max(0, last), -1, np.int32)
        """The last tokens, the newest first; -1 before the first one."""
        self._same = self._past[first - 1 :]
        """By size of pattern: the token that is so many tokens before the next one."""
        self._runs = np.zeros(len(sizes), np.int64)
        """By size of pattern: how many of the last tokens in a row are the same as those so many tokens before them."""
        self._needed = sizes * (params.min_count - 1)
        for token_id in output:
            self.add(token_id)

    def add(self, token_id: int) -> bool:
        """Take in the next token. Returns whether the output, up to and including it, ends with a repetition."""
        if not len(self._runs):
            return False
        self._runs = np.where(self._same == token_id, self._runs + 1, 0)
        self._past[1:] = self._past[:-1]  # NumPy copies overlapping slices as if there were two arrays
        self._past[0] = token_id
        return bool((self._runs >= self._needed).any())


@dataclass(slots=True, eq=False)
class Request:
    """A request from its submission to its end. While it runs, `SlotTable` has its token counts."""

    seq_id: int
    arrival: int
    """Serial number. Requests that arrived earlier have smaller numbers."""
    priority: int
    params: SamplingParams
    seed: int
    eos_token_ids: list[int]
    bad_words_token_ids: list[list[int]]
    flush_interval_s: float
    tokens: NDArray[np.int32]
    """int32: the tokens of prompt and output. Up to date while the request waits; later, see `SlotTable`."""
    num_prompt_tokens: int
    max_tokens: int
    """Maximum number of tokens of prompt and output together."""
    min_tokens: int
    """A stop token ends the request only once prompt and output, with the stop token, have this many tokens."""
    stop_token_ids: frozenset[int]
    """Every token that ends the request, including end-of-sequence unless `ignore_eos`. All are in the vocabulary."""
    early_end_ids: frozenset[int] = frozenset()
    """The stop tokens that end the request even before `min_tokens`. Before that, workers sample them only if a
    constrained output is complete."""
    own_digest: bytes = ROOT_DIGEST
    """What the request's salt and adapter add to the digests of its blocks; see `raycore.kvcache.prefix_cache`."""
    root_digest: bytes = ROOT_DIGEST
    """Parent digest of the request's first block: besides `own_digest`, of the weights that compute it."""
    adapter: int = NO_ADAPTER
    """The slot of the LoRA adapter that the request uses, among those that the workers hold."""
    pooling: PoolingParams | None = None
    """None: the request generates. Otherwise it ends with the first token, which stands for its result."""
    features: Sequence[Feature] = ()
    """The parts of the prompt that aren't text, in order."""
    feature_data: Sequence[FeatureData] = ()
    """For each feature: what it is encoded from."""
    second_text: int = 0
    """As in `EngineRequest`."""
    thinking: ThinkingLimit | None = None
    """As in `EngineRequest`."""
    repetition: RepetitionDetector | None = None
    """Has seen the output so far."""
    slot: int = -1
    """-1 while the request waits."""
    was_started: bool = False
    is_aborted: bool = False
    digests: list[bytes] = field(default_factory=list[bytes])
    """Digests of the request's first full blocks; see `raycore.kvcache.prefix_cache`."""
    num_published_blocks: int = 0
    """Number of leading blocks that the request found in, or added to, the prefix cache since it got its slot."""
    max_published_blocks: int = PUBLISHES_ALL
    """So many of the first blocks may be published at most, because it isn't known yet whether the others are right."""
    request_id: str = ""
    lora_name: str | None = None
    """The name of the adapter that the request uses."""
    hints: dict[str, Any] | None = None
    hands_over: bool = False
    """Both as in `EngineRequest`."""
    may_load: bool = True
    """Whether the KV connector may bring blocks. After a failure, it may not."""
    num_computed_tokens: int = 0
    """When the request has left its slot: of so many of its first tokens its blocks had keys and values. Only with a KV
    connector."""
    num_prompt_logprobs: int = 0
    """The prompt logprobs of positions below this have been sent."""

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What the caller tells the KV connector."""
        return (self.params.extra_args or {}).get("kv_transfer_params")

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the request may reuse cached blocks.

        With prompt logprobs it may not: they need the hidden state of every position, which the cache doesn't hold.
        Neither may a request that pools all its hidden states.
        """
        if self.pooling is not None:
            return not self.pooling.skip_reading_prefix_cache
        return self.params.prompt_logprobs is None and not self.params.return_prompt_hidden_states

    def end_of(self, token_id: int, num_tokens: int) -> tuple[str, int | str | None] | None:
        """Return (finish reason, stop reason) if the request ends with `token_id`, otherwise None.

        To be called once for each token of a request that detects repetitions.

        `num_tokens`: the number of tokens of prompt and output, including `token_id`.
        """
        if self.pooling is not None:
            return "stop", None
        if token_id in self.stop_token_ids and (num_tokens >= self.min_tokens or token_id in self.early_end_ids):
            is_eos = not self.params.ignore_eos and token_id in self.eos_token_ids
            return "stop", None if is_eos else token_id
        repeats = self.repetition is not None and self.repetition.add(token_id)
        if num_tokens >= self.max_tokens:
            return "length", None
        return (REASON, DETAIL) if repeats and num_tokens >= self.min_tokens else None

    def set_adapter(self, adapter_slot: int, load_id: int) -> None:
        """Use the adapter in `adapter_slot` of the workers. Prefixes are shared only within the same load of it."""
        self.adapter = adapter_slot
        self.own_digest = adapter_digest(self.own_digest, load_id)

    def belong_to(self, identity: bytes) -> None:
        """Have digests that begin with the identity of what computes the request, which has no blocks."""
        root = identity_digest(self.own_digest, identity)
        if root != self.root_digest:
            self.root_digest = root
            self.digests.clear()

    def extend_digests(self, tokens: NDArray[np.int32], num_blocks: int, block_size: int) -> None:
        """Extend `digests` to the first `num_blocks` blocks of `tokens`, the request's tokens so far."""
        extend_digests(self.digests, tokens, num_blocks, block_size, self.root_digest, self.features)

    def data_of(self, feature: Feature) -> FeatureData:
        """Return what one of the request's features is encoded from."""
        return next(data for each, data in zip(self.features, self.feature_data, strict=True) if each is feature)

    def for_workers(self, num_computed_tokens: int, block_ids: NDArray[np.int32]) -> NewRequest:
        """Return the message that tells the workers about the request when it gets its slot."""
        return NewRequest(
            slot=self.slot,
            token_ids=self.tokens.tobytes(),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
            block_ids=block_ids.tobytes(),
            params=self.params,
            seed=self.seed,
            eos_token_ids=self.eos_token_ids,
            bad_words_token_ids=self.bad_words_token_ids,
            adapter=self.adapter,
            pooling=self.pooling,
            features=list(self.features),
            second_text=self.second_text,
            thinking=self.thinking,
        )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The engine's limits, against which requests are checked."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    layout: CacheLayout | None = None
    """The groups of layers that share the blocks. None: there is one, which keeps all tokens."""
    encoder: EncoderLimits | None = None
    """None: prompts are only text."""
    max_logprobs: int | None = None
    """Maximum of `logprobs` and `prompt_logprobs`. None or -1: the vocabulary's size."""

    @staticmethod
    def of(
        engine: EngineInfo, vocab_size: int, encoder: EncoderLimits | None = None, max_logprobs: int | None = None
    ) -> RequestLimits:
        """Return the limits of the engine that `engine` describes."""
        sizes = engine.max_model_len, engine.block_size, engine.num_blocks
        return RequestLimits(vocab_size, *sizes, engine.cache_layout, encoder, max_logprobs)

    def check(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        pooling: PoolingParams | None = None,
        features: Sequence[Feature] = (),
    ) -> None:
        """Raise an error if a request could not run even on an idle engine.

        With `pooling`, `params` don't count.

        Raises:
            RequestTooLarge: the prompt, or prompt and output together, exceed the model's length or the KV cache. The
                message has the numbers.
            InvalidRequest: the prompt is empty, a token id isn't in the vocabulary, a parameter lists or asks for more
                tokens than the vocabulary has, or an image has more tokens than a step can compute.
        """
        if not prompt_token_ids:
            raise InvalidRequest(
                f"the prompt has no tokens: there is nothing to {'continue' if not pooling else 'pool'}"
            )
        self._check_length(len(prompt_token_ids), params.max_tokens, pools=pooling is not None)
        if features:
            self._check_features(features, len(prompt_token_ids))
        self._check_ids("the prompt", prompt_token_ids)
        if pooling is not None:
            return
        for name, chosen in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("logit_bias", params.logit_bias),
            ("logprob_token_ids", params.logprob_token_ids),
        ):
            # duplicates have no effect, but a list with many of them takes time
            if chosen is not None and len(chosen) > self.vocab_size:
                raise InvalidRequest(
                    f"{name} has {len(chosen)} entries, more than the vocabulary's {self.vocab_size} tokens"
                )
            self._check_ids(name, chosen or ())
        self._check_replay(len(prompt_token_ids), params.trace_decode_token_ids or ())
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > self.vocab_size:
                raise InvalidRequest(f"{name}={count} is more than the vocabulary's {self.vocab_size} tokens")
            if count and self.max_logprobs not in (None, -1):
                asked = f"{name}=-1 (all {self.vocab_size} tokens)" if count == -1 else f"{name}={count}"
                if (self.vocab_size if count == -1 else count) > self.max_logprobs:
                    raise InvalidRequest(f"{asked} is more than max_logprobs={self.max_logprobs}, an engine option")

    def admit(self, message: EngineRequest, arrival: int) -> Request:
        """Check a client's request and convert it to the scheduler's form.

        Raises:
            RequestTooLarge, InvalidRequest: see `check`.
            InvalidRequest: the request already has all its output tokens.
        """
        params, prompt, output = message.params, message.prompt_token_ids, message.output_token_ids
        self.check(prompt, params, message.pooling, message.features)
        if len(message.feature_data) != len(message.features) or None in message.feature_data:
            raise InvalidRequest("feature_data doesn't have an entry for each feature")
        self._check_ids("output_token_ids", output)
        max_tokens = self._max_tokens(len(prompt), params.max_tokens)
        if message.pooling is not None:
            max_tokens = len(prompt) + 1  # the result's token, which is never computed, doesn't count
        elif message.hands_over:
            max_tokens = min(max_tokens, len(prompt) + len(output) + 1)
        if len(prompt) + len(output) >= max_tokens:
            raise InvalidRequest(
                f"the request already has {len(output)} output tokens and may have at most "
                f"{max_tokens - len(prompt)}: there is nothing left to generate"
            )
        stops = {*(params.stop_token_ids or []), *(() if params.ignore_eos else message.eos_token_ids)}
        detected = None if message.pooling is not None else params.repetition_detection
        return Request(
            seq_id=message.seq_id,
            arrival=arrival,
            priority=message.priority,
            params=params,
            seed=message.seed,
            eos_token_ids=message.eos_token_ids,
            bad_words_token_ids=message.bad_words_token_ids,
            flush_interval_s=message.flush_interval_s,
            tokens=np.array(prompt + output, np.int32),
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            min_tokens=len(prompt) + params.min_tokens,
            stop_token_ids=frozenset(token for token in stops if 0 <= token < self.vocab_size),
            early_end_ids=frozenset(params.early_end_ids(message.eos_token_ids)),
            own_digest=root_digest(message.cache_salt),
            request_id=message.request_id,
            lora_name=None if message.lora is None else message.lora.lora_name,
            hints=message.hints,
            hands_over=message.hands_over,
            pooling=message.pooling,
            features=message.features,
            feature_data=cast("list[FeatureData]", message.feature_data),
            second_text=message.second_text,
            thinking=message.thinking,
            repetition=None if detected is None else RepetitionDetector(detected, max_tokens - len(prompt), output),
        )

    def _check_features(self, features: Sequence[Feature], num_prompt: int) -> None:
        if self.encoder is None:
            raise InvalidRequest("this model takes only text")
        end = 0
        for index, feature in enumerate(features):
            if feature.num_tokens > self.encoder.max_feature_tokens:
                hint = "" if self.encoder.is_divisible else ", because one step computes all of them"
                raise RequestTooLarge(
                    f"{feature.modality} {index} has {feature.num_tokens} tokens, and this engine takes at most "
                    f"{self.encoder.max_feature_tokens}{hint}. Use a smaller {feature.modality}, or raise "
                    "max_num_batched_tokens"
                )
            if not (end <= feature.position and 1 <= feature.num_tokens <= num_prompt - feature.position):
                raise InvalidRequest(
                    f"feature {index} has {feature.num_tokens} tokens from position {feature.position} on, which isn't "
                    f"after position {end} in the {num_prompt} tokens of the prompt"
                )
            end = feature.position + feature.num_tokens

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            bad = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
            raise InvalidRequest(f"{name} contains token id {bad}, outside the vocabulary of {self.vocab_size}")

    def _check_length(self, num_prompt: int, asked: int | None, *, pools: bool = False) -> None:
        if pools:
            self._check_pooled_length(num_prompt)
            return
        if num_prompt >= self.max_model_len:
            raise RequestTooLarge(
                f"the prompt has {num_prompt} tokens, which leaves no room for output: "
                f"max_model_len={self.max_model_len} counts both. Shorten the prompt or raise max_model_len"
            )
        # the last token is never an input, so it needs no keys and values
        num_cached = self._max_tokens(num_prompt, asked) - 1
        num_needed = self.num_blocks_for(num_cached)
        if num_needed > self.num_blocks:
            need, held = f"{num_cached} tokens", f"{self.num_blocks * self.block_size}"
            if self.layout is not None and not self.layout.keeps_all_in_one_group:
                need, held = f"{num_cached} tokens ({num_needed} blocks)", "fewer"
            raise RequestTooLarge(
                f"{num_prompt} prompt tokens and max_tokens={asked} need KV cache for {need}, but the "
                f"engine has {held} ({self.num_blocks} blocks of {self.block_size}). Lower max_tokens, shorten "
                "the prompt, or give the engine more KV cache"
            )

    def _check_replay(self, num_prompt: int, trace: Collection[int]) -> None:
        self._check_ids("trace_decode_token_ids", trace)
        if trace and num_prompt + len(trace) > self.max_model_len:
            raise RequestTooLarge(
                f"trace_decode_token_ids has {len(trace)} tokens and the prompt {num_prompt}, together more than "
                f"max_model_len={self.max_model_len}: the replay would be cut. Shorten it, or raise max_model_len"
            )

    def _check_pooled_length(self, num_prompt: int) -> None:
        if num_prompt > self.max_model_len:
            raise RequestTooLarge(
                f"the prompt has {num_prompt} tokens, more than max_model_len={self.max_model_len}. Shorten the "
                "prompt, give truncate_prompt_tokens, or raise max_model_len"
            )
        num_needed = self.num_blocks_for(num_prompt)
        if num_needed > self.num_blocks:
            raise RequestTooLarge(
                f"the prompt has {num_prompt} tokens and needs {num_needed} blocks of the KV cache, but the engine has "
                f"{self.num_blocks} of {self.block_size} tokens. Shorten the prompt, or give the engine more KV cache"
            )

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a request with `num_tokens` computed tokens needs."""
        if self.layout is not None:
            return self.layout.num_blocks_for(num_tokens)
        return -(-num_tokens // self.block_size)

    def _max_tokens(self, num_prompt: int, asked: int | None) -> int:
        """Return the maximum number of tokens of prompt and output together."""
        return self.max_model_len if asked is None else min(num_prompt + asked, self.max_model_len)
