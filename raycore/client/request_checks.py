"""Checks requests before a client submits them, and completes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from raycore.client.ask import Ask, CheckedAsk
from raycore.client.inputs import ParsedPrompt, checked_request_id
from raycore.config import EngineConfig
from raycore.config.logits_processors import processor_classes
from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.messages import EngineInfo
from raycore.parts.adapters.client import AdapterChecks
from raycore.parts.constraints.client import ThinkingLimits
from raycore.parts.constraints.grammar.gate import ConstraintGate
from raycore.parts.images.client.encoding_only import encoding_checks
from raycore.parts.pooling.client.late_texts import prompt_completion
from raycore.parts.pooling.client.pooling import PLACEHOLDER, not_generating, not_pooling, resolved
from raycore.parts.transfers.client.params import params_check
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams, checked_int
from raycore.scheduler.request import RequestLimits
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.no_tokenizer import NoTokenizer, no_tokenizer
from raycore.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from raycore.client.beams import BeamSearch

Validator = tuple[str, Callable[[SamplingParams], Any]]
"""A logits processor's class, by name, and its `validate_params`."""


class RequestChecks:
    """What one client checks its requests against. Thread-safe. Holds no requests."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, tightest: EngineInfo | None = None) -> None:
        self.tightest = tightest
        """The rank whose limits requests are checked against. None: there has been no rank yet."""
        self._tokenizer = tokenizer
        self._spec = spec = config.model.spec
        self.pooling = spec.pooling
        """What the model pools. None: it generates."""
        self._with_prompts = prompt_completion(spec.pooling)
        self._constraints = ConstraintGate(config.model.tokenizer, spec.vocab_size, spec.eos_token_ids)
        if config.model.prepare_structured_outputs:
            self._constraints.prepare()  # while the ranks start
        outputs = config.structured_outputs_config
        self._has_compact_json = outputs is not None and outputs.disable_any_whitespace
        self.adapters = AdapterChecks(spec, config.lora)
        self._encoder = config.encoder_limits
        self._max_logprobs = config.model.max_logprobs
        self._checks = [*encoding_checks(config), params_check(config)]
        """Those of capabilities. They raise InvalidRequest."""
        self._validators = validators(config)
        self._thinking = ThinkingLimits(config, tokenizer)

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its output together."""
        assert self.tightest is not None, "there has been no rank yet"
        return self.tightest.max_model_len

    def close(self) -> None:
        """End the process that compiles constraints, and wait for it."""
        self._constraints.close()

    def complete(self, asks: Sequence[Ask]) -> list[CheckedAsk]:
        """Check requests, and return them as they are submitted. Parameters that requests share are looked at once.

        Raises:
            InvalidRequest: a request is invalid; the message says why.
        """
        asks = self._with_prompts(asks, self.max_model_len)
        ids = _checked_ids([ask.request_id for ask in asks])
        # the caller may change its own objects while a request runs
        own = {id(each): self._own(each) for each in {id(ask.params): ask.params for ask in asks}.values()}
        given = [own[id(ask.params)] for ask in asks]
        for ask, (params, pooling) in zip(asks, given, strict=True):
            self._check(ask.parsed, params, pooling)
            if ask.lora is not None:
                self.adapters.check(ask.lora)
        constraints = [params.structured_outputs for params, _ in given]
        self._constraints.check_all(each for each in constraints if each is not None)
        return [
            CheckedAsk(
                *(ask, request_id, checked_int("priority", ask.priority)),
                None if ask.data_parallel_rank is None else checked_int("data_parallel_rank", ask.data_parallel_rank),
                params,
                self._tokenizer.bad_words_token_ids(params.bad_words or ()),
                self._thinking.of(params),
                pooling,
            )
            for ask, request_id, (params, pooling) in zip(asks, ids, given, strict=True)
        ]

    def _own(self, params: object) -> tuple[SamplingParams, PoolingParams | None]:
        """A copy of a request's parameters, and what it pools."""
        if isinstance(params, PoolingParams):
            return PLACEHOLDER, self.resolved_pooling(params)
        if self.pooling is not None:
            raise not_generating(self.pooling)
        assert isinstance(params, SamplingParams), "a beam search is submitted step by step"
        copy = params.snapshot()
        copy.structured_outputs = self._constraint(copy)
        if isinstance(self._tokenizer, NoTokenizer):
            copy.detokenize = False
        return copy, None

    def check(self, prompt: ParsedPrompt, params: SamplingParams | PoolingParams) -> None:
        """Raise InvalidRequest if the request could never run. Neither its constraint nor its adapter is checked."""
        if isinstance(params, PoolingParams):
            (ask,) = self._with_prompts([Ask(prompt, params, "")], self.max_model_len)
            self._check(ask.parsed, PLACEHOLDER, self.resolved_pooling(params))
        else:
            self._check(prompt, params, None)

    def _check(self, prompt: ParsedPrompt, params: SamplingParams, pooling: PoolingParams | None) -> None:
        """The same for parameters that leave nothing open. With `pooling`, the request pools; `params` don't count."""
        assert self.tightest is not None, "there has been no rank yet"
        limits = RequestLimits.of(self.tightest, self._spec.vocab_size, self._encoder, self._max_logprobs)
        limits.check(prompt.token_ids, params, pooling, prompt.features)
        if pooling is not None:
            return
        if prompt.has_unknown_tokens and params.prompt_logprobs is not None:
            raise InvalidRequest(
                f"prompt_logprobs={params.prompt_logprobs} needs the prompt's tokens, and the prompt has embeddings: "
                "give prompt_token_ids, too"
            )
        if params.thinking_token_budget is not None:
            self._thinking.of(params)  # raises if it can't be limited
        if isinstance(self._tokenizer, NoTokenizer):
            for name, value in (("stop", params.stop), ("structured_outputs", params.structured_outputs)):
                if value:
                    raise no_tokenizer(f"{name}={shortened(value)}")
        for check in self._checks:
            check(params)
        validate(self._validators, params)

    def check_structured_outputs(self, params: SamplingParams) -> None:
        """Check in another process that the constraint in `params` can be compiled. If `knows_structured_outputs` says
        no, that may take seconds.

        Raises:
            InvalidRequest: the constraint is invalid; the message says why.
        """
        constraint = self._constraint(params)
        if constraint is not None:
            self._constraints.check(constraint)

    def knows_structured_outputs(self, params: SamplingParams) -> bool:
        """Whether there is no constraint in `params`, or it has been checked before."""
        constraint = self._constraint(params)
        return constraint is None or self._constraints.knows(constraint)

    def _constraint(self, params: SamplingParams) -> StructuredOutputsParams | None:
        """A request's constraint, with what the engine's settings add."""
        found = params.structured_outputs
        if found is None or not self._has_compact_json or found.disable_any_whitespace:
            return found
        return msgspec.structs.replace(found, disable_any_whitespace=True)

    def beam_search(self, ask: Ask) -> BeamSearch:
        """Begin a search for the continuations of a prompt. Sends nothing.

        Raises:
            InvalidRequest: the prompt could never be continued, or the model pools. The message says why.
        """
        if self.pooling is not None:
            raise not_generating(self.pooling)
        if isinstance(self._tokenizer, NoTokenizer):
            raise no_tokenizer("beam search")
        from raycore.client.beams import BeamSearch  # imported lazily: few programs need it

        search = BeamSearch(ask, self._spec.eos_token_ids, self._spec.vocab_size, self.max_model_len)
        num_logprobs = search.step_params.logprobs or 0
        if self._max_logprobs not in (None, -1) and num_logprobs > self._max_logprobs:
            raise InvalidRequest(
                f"beam_width={search.beam_width} needs the log probabilities of {num_logprobs} tokens, more than "
                f"max_logprobs={self._max_logprobs}, an engine option"
            )
        self.check(ask.parsed, search.step_params)
        return search

    def resolved_pooling(self, params: PoolingParams | None, task: str | None = None) -> PoolingParams:
        """Return a copy of a request's parameters that leaves nothing open.

        Args:
            params: None: the model's defaults.
            task: what the caller asks for. None: the task of `params`, or else the model's default.

        Raises:
            InvalidRequest: the engine generates, or a parameter is invalid, or the model doesn't support it.
        """
        if self.pooling is None:
            raise not_pooling(task or (params.task if isinstance(params, PoolingParams) else None))
        return resolved(params, task, self.pooling)


def _checked_ids(request_ids: Sequence[str]) -> list[str]:
    ids = [checked_request_id(request_id) for request_id in request_ids]
    repeated = [request_id for request_id, count in Counter(ids).items() if count > 1]
    if repeated:
        raise InvalidRequest(f"request_id={repeated[0]!r} is used for more than one request")
    return ids


def validators(config: EngineConfig) -> list[Validator]:
    """The checks of an engine's logits processors.

    Raises:
        InvalidConfig: a class can't be imported.
    """
    if not config.has_logits_processors:
        return []
    classes = processor_classes(config.plugins, config.logits_processors)
    return [
        (each.__qualname__, each.validate_params)
        for each in classes
        if callable(getattr(each, "validate_params", None))
    ]


def validate(validators: Sequence[Validator], params: SamplingParams) -> None:
    """Check a request's parameters. Raises InvalidRequest if a processor raises ValueError."""
    for name, check in validators:
        try:
            check(params)
        except InvalidRequest:
            raise
        except ValueError as error:
            raise InvalidRequest(f"the logits processor {name} refuses the request: {error}") from error
