"""The blocking calls of a model that pools: `encode`, `embed`, `classify`, `score` and `reward` of `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from raycore.client.ask import Ask
from raycore.client.client import EngineClient
from raycore.client.collector import Collector
from raycore.client.inputs import (
    ParsedPrompt,
    Prompt,
    adapters_for_each,
    as_prompt_list,
    parse_prompts,
    priorities_for_each,
)
from raycore.client.request_state import PooledOutput
from raycore.client.tokenization import Tokenization
from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.lora.request import LoRARequest
from raycore.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from raycore.parts.pooling.client.pooling import not_pooling, pooling_for_each, supported_tasks
from raycore.pooling_params import PoolingParams, PoolingTask
from raycore.short_tracebacks import ends_tracebacks
from raycore.system import uuid
from raycore.text.pairs import PairFormat, cosine, max_similarity, pair_prompts

_Params = PoolingParams | Sequence[PoolingParams] | None
_Adapters = LoRARequest | Sequence[LoRARequest | None] | None


@ends_tracebacks
class PoolingCalls:
    """What `LLM` has for models that pool."""

    _client: EngineClient

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the engine can be asked for, the default first: `generate`, or those of a model that pools."""
        return supported_tasks(self._client.checks.pooling)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: _Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: _Adapters = None,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool one or more prompts. Returns when all are finished. Needs a model that pools.

        Args:
            prompts: one prompt or a list, as in `generate()`.
            pooling_params: one for all prompts, or one per prompt. None: the model's defaults.
            use_tqdm: show a progress bar.
            lora_request: an adapter for all prompts, or one per prompt, where None means none. Needs `enable_lora`.
            pooling_task: one of `get_supported_tasks()`. None: that of `pooling_params`, or else the first one.
            truncate_prompt_tokens: the ends of prompts with more tokens are cut off. -1: with more than
                `max_model_len`. None: such prompts are refused.
            tokenization_kwargs: may have `truncate_prompt_tokens`, `truncation_side` (`left` or `right`) and
                `add_special_tokens`.
            priority: one per prompt; lower values run first. Needs `scheduling_policy="priority"`.

        Returns: one output per prompt, in order. Its `outputs.data` is float32[size], or float32[number of tokens,
            size] for tasks that give each token a result.

        Raises:
            InvalidRequest: a prompt or parameter is unusable, or the model doesn't support the task; the message names
                it. Nothing was run.
            RequestFailed: a request failed, but the engine didn't.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
        """
        if self._client.checks.pooling is None:
            raise not_pooling(pooling_task)
        how = Tokenization.of(truncate_prompt_tokens, tokenization_kwargs, self._client.checks.max_model_len)
        parsed = parse_prompts(as_prompt_list(prompts), self._client.tokenizer, how, self._client.images)
        return self._pool(parsed, pooling_params, pooling_task, use_tqdm, lora_request, priority)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: _Params = None,
        lora_request: _Adapters = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in `outputs.embedding`. Arguments and errors are those of `encode()`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            truncate_prompt_tokens=truncate_prompt_tokens,
            tokenization_kwargs=tokenization_kwargs,
        )
        return [EmbeddingRequestOutput.from_base(each) for each in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: _Params = None,
        lora_request: _Adapters = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of each prompt's classes, in `outputs.probs`. Arguments and errors are those of
        `encode()`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            truncate_prompt_tokens=truncate_prompt_tokens,
            tokenization_kwargs=tokenization_kwargs,
        )
        return [ClassificationRequestOutput.from_base(each) for each in outputs]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: _Params = None,
        lora_request: _Adapters = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the rewards of each prompt's tokens. The same as `encode()` with the task `token_classify`."""
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="token_classify",
            truncate_prompt_tokens=truncate_prompt_tokens,
            tokenization_kwargs=tokenization_kwargs,
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well pairs of texts fit together, in `outputs.score`.

        A model with a head for scores gets both texts of a pair in one prompt. For a model of embeddings, it is the
        cosine of the angle between the embeddings of both. For one that has only embeddings of tokens, it is ColBERT's
        score.

        Args:
            data_1: one text, which is paired with each of `data_2`, or as many as these.
            data_2: one text or several.
            truncate_prompt_tokens: as in `encode()`, for a pair's prompt, or for each text.
            chat_template: for a model with a head: renders a pair as two messages, with the roles `query` and
                `document`.

        The other arguments and the errors are those of `encode()`.
        """
        pooling = self._client.checks.pooling
        if pooling is None:
            raise not_pooling("score")
        first, second = paired(data_1, data_2)
        how = Tokenization.of(truncate_prompt_tokens, tokenization_kwargs, self._client.checks.max_model_len)
        if "embed" in pooling.tasks or "token_embed" in pooling.tasks:
            return self._similarities(first, second, pooling_params, lora_request, how, use_tqdm=use_tqdm)
        params = self._client.checks.resolved_pooling(pooling_params, "score")
        pair_format = PairFormat(
            pooling.pairs == "pair", chat_template, truncate_prompt_tokens=how.max_tokens, truncation_side=how.side
        )
        pairs = list(zip(first, second, strict=True))
        tokenizer = self._client.tokenizer
        prompts = parse_prompts(list(pair_prompts(tokenizer, pairs, pair_format)), tokenizer)
        outputs = self._pool(prompts, params, "score", use_tqdm, lora_request)
        return [ScoringRequestOutput.from_base(each) for each in outputs]

    def _similarities(
        self,
        first: list[str],
        second: list[str],
        params: PoolingParams | None,
        lora_request: LoRARequest | None,
        how: Tokenization,
        *,
        use_tqdm: bool,
    ) -> list[ScoringRequestOutput]:
        """Return how similar the embeddings of pairs of texts are. Each different text is embedded once."""
        assert self._client.checks.pooling is not None, "the model pools"
        task, similarity = "embed", cosine
        if "embed" not in self._client.checks.pooling.tasks:
            task, similarity = "token_embed", max_similarity
        params = self._client.checks.resolved_pooling(params, task)
        kinds = self._client.checks.pooling.kinds
        of_kind = {kind: msgspec.structs.replace(params, input_type=kind) for kind in kinds}
        pairs = [((one, kinds[0]), (other, kinds[1])) for one, other in zip(first, second, strict=True)]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        prompts = parse_prompts([text for text, _ in texts], self._client.tokenizer, how)
        pooled = self._pool(prompts, [of_kind[kind] for _, kind in texts], task, use_tqdm, lora_request)
        outputs = dict(zip(texts, pooled, strict=True))
        return [
            ScoringRequestOutput(
                request_id=outputs[one].request_id,
                outputs=ScoringOutput(similarity(outputs[one].outputs.data, outputs[other].outputs.data)),
                prompt_token_ids=outputs[one].prompt_token_ids + outputs[other].prompt_token_ids,
                metrics=outputs[one].metrics,
            )
            for one, other in pairs
        ]

    def _pool(
        self,
        prompts: list[ParsedPrompt],
        pooling_params: _Params,
        task: PoolingTask | None,
        use_tqdm: bool,
        lora_request: _Adapters,
        priority: Sequence[int] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        count = len(prompts)
        adapters = adapters_for_each(lora_request, count)
        given = pooling_for_each(pooling_params, count)
        resolve = self._client.checks.resolved_pooling
        known = {id(each): resolve(each, task) for each in {id(each): each for each in given}.values()}
        asks = [
            Ask(prompt, known[id(params)], uuid.uuid4().hex, before, lora=adapter)
            for prompt, params, before, adapter in zip(
                prompts, given, priorities_for_each(priority, count), adapters, strict=True
            )
        ]
        if not asks:
            return []
        collector = Collector()
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        outputs = collector.run(
            self._client,
            asks,
            use_tqdm,
            lambda: num_tokens * collector.num_ended // count,
            "Pooling",
            self._client.watchers,
        )
        return [each.result() for each in outputs if isinstance(each, PooledOutput)]


def paired(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Return two lists of texts of the same length: one text with each of several, or several with as many.

    Raises:
        InvalidRequest: an argument has no text, or the numbers don't fit.
    """
    first, second = _texts("data_1", data_1), _texts("data_2", data_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequest(
            f"{len(first)} texts can't be paired with {len(second)}: give one and any number, or as many of each"
        )
    return first, second


def _texts(name: str, given: object) -> list[str]:
    items = [given] if isinstance(given, str) else given
    if not isinstance(items, Sequence) or not items:
        raise InvalidRequest(f"{name}={shortened(given)} isn't a text or a list of texts")
    for item in cast("Sequence[Any]", items):
        if not isinstance(item, str) or not item:
            raise InvalidRequest(f"{name} has {shortened(item)}, which isn't a text, or is empty")
        try:
            item.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name} has a text with half of a surrogate pair") from None
    return list(cast("Sequence[str]", items))
