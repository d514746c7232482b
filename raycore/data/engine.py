"""An engine whose calls tell of each row whether it failed. Does not depend on Ray Data."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

# imported before any module that imports Ray, because this import silences Ray's message about missing widgets
from raycore.display.progress_bars import request_bar

# isort: split

from raycore.checkpoint.hub_cache import find_directory
from raycore.client.ask import Ask
from raycore.client.collector import Collector
from raycore.client.inputs import ParsedPrompt
from raycore.client.rendering import chat_prompts, completion_prompts
from raycore.data.config import ProcessorConfig, engine_options
from raycore.data.rows import Row, continues, has_messages, pooling_params, prompt_of, sampling_params
from raycore.errors import InvalidCheckpoint, InvalidRequest, RequestFailed
from raycore.llm import LLM
from raycore.lora.request import LoRARequest
from raycore.outputs import RequestOutput
from raycore.parts.adapters.checkpoint.spec import CONFIG_FILE
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams

Params = SamplingParams | PoolingParams
RowError = InvalidRequest | RequestFailed
AdaptedPrompt = tuple[ParsedPrompt, LoRARequest | None]
"""A row's prompt, and the adapter that it names."""

_T = TypeVar("_T")


class RowEngine(LLM):
    """An engine for the rows of a dataset. Several threads may use it at a time."""

    def __init__(self, config: ProcessorConfig, **options: Any) -> None:
        """Start the engine. `options` come before those of the configuration. The errors are those of `LLM`."""
        self._exports_metrics = config.log_engine_metrics
        self._data = config
        self._adapters: dict[str, LoRARequest] = {}
        self._adding = threading.Lock()
        super().__init__(config.model_source, use_tqdm_on_load=False, **engine_options(config) | options)

    def run(self, rows: Sequence[Row]) -> list[tuple[Params, RequestOutput] | RowError]:
        """Run rows that have prompts or conversations. Returns what each has become, in order: its parameters and its
        output, or its error.

        Raises:
            EngineDeadError: the engine has failed.
        """
        params = self._params(rows)
        prompts = self._prompts(rows)
        asks = {
            index: Ask(prompt[0], param, uuid.uuid4().hex, lora=prompt[1])
            for index, (prompt, param) in enumerate(zip(prompts, params, strict=True))
            if not isinstance(prompt, InvalidRequest) and not isinstance(param, InvalidRequest)
        }
        outputs = dict(zip(asks, self._outputs(list(asks.values())), strict=True))
        found: list[tuple[Params, RequestOutput] | RowError] = []
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            output = outputs.get(index)
            error = next((each for each in (prompt, param, output) if isinstance(each, RowError)), None)
            found.append(error if error is not None else (param, output))  # pyright: ignore[reportArgumentType]
        return found

    def _params(self, rows: Sequence[Row]) -> list[Params | InvalidRequest]:
        """The rows' parameters. Rows with the same ones share an object, because each object costs the client time."""
        name = "sampling_params" if self._data.task_type == "generate" else "pooling_params"
        made: dict[str, Params | InvalidRequest] = {}
        found: list[Params | InvalidRequest] = []
        for row in rows:
            key = repr(row.get(name))
            if key not in made:
                made[key] = _attempt(self._params_of, row)
            found.append(made[key])
        return found

    def _params_of(self, row: Row) -> Params:
        if self._data.task_type == "generate":
            return sampling_params(row)
        # a task of the rows' own is one that the model has, too
        return self._client.checks.resolved_pooling(pooling_params(row), self._data.task_type)

    def _prompts(self, rows: Sequence[Row]) -> list[AdaptedPrompt | InvalidRequest]:
        """Parse the rows' prompts, those that are made alike at a time."""
        groups: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            kind = (self._renders(row), continues(row.get("messages")), has_messages(row))
            key = repr((kind, row.get("tokenization_kwargs"), row.get("mm_processor_kwargs")))
            groups.setdefault(key, []).append(index)
        parsed: dict[int, AdaptedPrompt | InvalidRequest] = {}
        for indices in groups.values():
            made = _one_by_one(self._parse, [rows[index] for index in indices])
            parsed.update(zip(indices, made, strict=True))
        return [parsed[index] for index in range(len(rows))]

    def _renders(self, row: Row) -> bool:
        """Whether the row's conversation is still to be rendered."""
        chat = self._data.chat_template
        is_done = chat.has_own_actors(self._data) and row.get("prompt") is not None
        return chat.enabled and has_messages(row) and not is_done

    def _parse(self, rows: Sequence[Row]) -> list[AdaptedPrompt]:
        """Parse prompts that are made alike. Raises InvalidRequest if one of them is invalid."""
        first, chat, tokenize = rows[0], self._data.chat_template, self._data.tokenize
        adapters = [self._adapter(row) for row in rows]
        how = dict(first.get("tokenization_kwargs") or {})
        if self._renders(first):
            to_continue = continues(first["messages"])
            parsed = chat_prompts(
                self._client,
                [row["messages"] for row in rows],
                chat_template=chat.chat_template,
                chat_template_content_format="auto",
                add_generation_prompt=not to_continue,
                continue_final_message=to_continue,
                tools=None,
                chat_template_kwargs=chat.chat_template_kwargs,
                tokenization_kwargs=how,
                mm_processor_kwargs=first.get("mm_processor_kwargs"),
            )
        else:
            if has_messages(first) and chat.enabled:
                how.setdefault("add_special_tokens", False)  # they are part of the template's text
            prefers_text = tokenize.enabled and not tokenize.has_own_actors(self._data)
            prompts = [prompt_of(row, prefers_text=prefers_text) for row in rows]
            parsed = completion_prompts(self._client, prompts, how)
        return list(zip(parsed, adapters, strict=True))

    def _adapter(self, row: Row) -> LoRARequest | None:
        """The adapter that a row names as its model. None: the model itself."""
        name = row.get("model")
        if name is None or name in (self._data.model_source, self.config.model.model):
            return None
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"the column model is {name!r}, not the name of an adapter")
        with self._adding:
            if name not in self._adapters:
                directory = self._data.dynamic_lora_loading_path
                try:
                    path = find_directory(name, CONFIG_FILE) if directory is None else os.path.join(directory, name)
                except InvalidCheckpoint as error:
                    raise InvalidRequest(f"the column model: {error}") from None
                self._adapters[name] = LoRARequest(name, len(self._adapters) + 1, os.path.abspath(path))
            return self._adapters[name]

    def _outputs(self, asks: Sequence[Ask]) -> list[RequestOutput | RowError]:
        """Run requests, and wait for them."""
        collector = Collector()

        def submit(several: Sequence[Ask]) -> list[str]:
            with self._client.watchers.around(several, collector.put) as sink:
                self._client.submit(several, sink)
            return [ask.request_id for ask in several]

        try:
            submitted = _one_by_one(submit, asks)
            running = [each for each in submitted if isinstance(each, str)]
            with request_bar(len(running), False) as bar:
                collector.wait(len(running), bar, lambda: 0)
        except BaseException:
            # the engine must not compute requests that nobody waits for
            self._client.abort([ask.request_id for ask in asks], notify=True)  # tells those who watch
            raise
        return [collector.result(each) if isinstance(each, str) else each for each in submitted]


def _attempt(call: Callable[[Any], _T], given: Any) -> _T | InvalidRequest:
    try:
        return call(given)
    except InvalidRequest as error:
        return error


def _one_by_one(call: Callable[[Sequence[Any]], list[_T]], items: Sequence[Any]) -> list[_T | InvalidRequest]:
    """Call with all items, or, if one of them is invalid, with each alone."""
    if not items:
        return []
    whole = _attempt(call, items)
    if not isinstance(whole, InvalidRequest):
        return [*whole]
    if len(items) == 1:
        return [whole]
    alone = [_attempt(call, [item]) for item in items]
    return [each if isinstance(each, InvalidRequest) else each[0] for each in alone]
