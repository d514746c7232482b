"""The blocking calls of a model that pools: `encode`, `embed`, `classify`, `score` and `reward` of `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# imported before any module that imports Ray, because this import silences Ray's message about missing widgets
from raycore.display.progress_bars import request_bar
from raycore.system import uuid

# isort: split

from raycore.client.client import EngineClient
from raycore.client.collector import Collector
from raycore.client.inputs import (
    ParsedPrompt,
    Prompt,
    as_prompt_list,
    parse_prompts,
    priorities_for_each,
    with_adapters,
)
from raycore.client.pooling import PLACEHOLDER, not_pooling, pooling_for_each, supported_tasks
from raycore.client.request_state import PooledOutput
from raycore.client.scoring import paired
from raycore.client.tokenization import Tokenization
from raycore.lora.request import LoRARequest
from raycore.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from raycore.pooling_params import PoolingParams, PoolingTask
from raycore.short_tracebacks import ends_tracebacks
from raycore.text.pairs import PairFormat, cosine, max_similarity, pair_prompts

_Params = PoolingParams | Sequence[PoolingParams] | None
_Adapters = LoRARequest | Sequence[LoRARequest | None] | None


@ends_tracebacks
class PoolingCalls:
    """What `LLM` has for models that pool."""

    _client: EngineClient

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the engine can be asked for, the default first: `generate`, or those of a model that pools."""
        return supported_tasks(self._client.pooling)

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
        if self._client.pooling is None:
            raise not_pooling(pooling_task)
        how = Tokenization.of(truncate_prompt_tokens, tokenization_kwargs, self._client.max_model_len)
        parsed = parse_prompts(as_prompt_list(prompts), self._client.tokenizer, how, self._client.images)
        return self._pool(with_adapters(parsed, lora_request), pooling_params, pooling_task, use_tqdm, priority)

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
        pooling = self._client.pooling
        if pooling is None:
            raise not_pooling("score")
        first, second = paired(data_1, data_2)
        how = Tokenization.of(truncate_prompt_tokens, tokenization_kwargs, self._client.max_model_len)
        if "embed" in pooling.tasks or "token_embed" in pooling.tasks:
            return self._similarities(first, second, pooling_params, lora_request, how, use_tqdm=use_tqdm)
        params = self._client.resolved_pooling(pooling_params, "score")
        pair_format = PairFormat(
            pooling.pairs == "pair", chat_template, truncate_prompt_tokens=how.max_tokens, truncation_side=how.side
        )
        pairs = list(zip(first, second, strict=True))
        tokenizer = self._client.tokenizer
        prompts = parse_prompts(list(pair_prompts(tokenizer, pairs, pair_format)), tokenizer)
        outputs = self._pool(with_adapters(prompts, lora_request), params, "score", use_tqdm, None)
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
        assert self._client.pooling is not None, "the model pools"
        task, similarity = "embed", cosine
        if "embed" not in self._client.pooling.tasks:
            task, similarity = "token_embed", max_similarity
        texts = list(dict.fromkeys([*first, *second]))
        prompts = with_adapters(parse_prompts(texts, self._client.tokenizer, how), lora_request)
        outputs = dict(zip(texts, self._pool(prompts, params, task, use_tqdm, None), strict=True))
        return [
            ScoringRequestOutput(
                request_id=outputs[one].request_id,
                outputs=ScoringOutput(similarity(outputs[one].outputs.data, outputs[other].outputs.data)),
                prompt_token_ids=outputs[one].prompt_token_ids + outputs[other].prompt_token_ids,
                metrics=outputs[one].metrics,
            )
            for one, other in zip(first, second, strict=True)
        ]

    def _pool(
        self,
        prompts: list[ParsedPrompt],
        pooling_params: _Params,
        task: PoolingTask | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        given = pooling_for_each(pooling_params, len(prompts))
        known = {
            id(each): self._client.resolved_pooling(each, task) for each in {id(each): each for each in given}.values()
        }
        priorities = priorities_for_each(priority, len(prompts))
        if not prompts:
            return []
        collector = Collector()
        request_ids = [uuid.uuid4().hex for _ in prompts]
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        try:
            self._client.submit(
                prompts,
                [PLACEHOLDER] * len(prompts),
                collector.put,
                request_ids=request_ids,
                priorities=priorities,
                pooling=[known[id(each)] for each in given],
            )
            with request_bar(len(prompts), use_tqdm, "Pooling") as bar:
                collector.wait(len(prompts), bar, lambda: num_tokens * collector.num_ended // len(prompts))
        except BaseException:
            # also after an interrupt: the engine stays usable, and must not compute requests that nobody waits for
            self._client.abort(request_ids)
            raise
        outputs = collector.outputs(request_ids)
        return [each.result() for each in outputs if isinstance(each, PooledOutput)]
