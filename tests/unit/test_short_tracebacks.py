"""The traceback of a caller's mistake has their frames, and one of raycore's."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raycore
from raycore import LLM, AsyncLLM, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from raycore.beam_search import BeamSearchParams
from raycore.client.ask import Ask
from raycore.data import ProcessorConfig, build_processor
from raycore.demo import demo_model_path
from raycore.errors import EngineDeadError, InitializationError, InvalidConfig, InvalidRequest, PlacementShortage
from raycore.serve import build_openai_app
from raycore.server.serve_app import build_serve_app
from raycore.short_tracebacks import ends_traceback
from raycore.structured_outputs import StructuredOutputsParams

OURS = str(Path(raycore.__file__).parent)
MODEL = demo_model_path()
TOKENS = {"prompt_token_ids": [1]}
MODELS = [{"model_loading_config": {"model_id": "m"}, "engine_kwargs": {"tensor_parallel_sze": 1}}]


def without_engine(kind: type[Any]) -> Any:
    """An engine whose requests are refused before they reach its ranks."""
    llm = object.__new__(kind)
    llm._client = SimpleNamespace(tokenizer=None, images=None, checks=SimpleNamespace(max_model_len=8))
    return llm


MISTAKES: dict[str, Callable[[], object]] = {
    "option": lambda: LLM(MODEL, tensor_parallel_sze=2),  # pyright: ignore
    "value": lambda: LLM(MODEL, tensor_parallel_size=0),
    "type": lambda: LLM(MODEL, tensor_parallel_size="two"),  # pyright: ignore
    "dtype": lambda: LLM(MODEL, dtype="float12"),  # pyright: ignore
    "path": lambda: LLM("/no/such/directory"),
    "no path": lambda: LLM(None),  # pyright: ignore
    "combination": lambda: LLM(MODEL, tensor_parallel_size=3),
    "template": lambda: LLM(MODEL, chat_template="/no/such/template.jinja"),
    "AsyncLLM": lambda: AsyncLLM(MODEL, max_model_len=100000),
    "AsyncLLM.create": lambda: asyncio.run(AsyncLLM.create(MODEL, max_num_seqs=0)),
    "get_or_create": lambda: LLM.get_or_create(MODEL, max_num_seqs=0),
    "from_engine_args": lambda: AsyncLLM.from_engine_args(EngineArgs(MODEL, max_num_seqs=0)),
    "LLMEngine": lambda: LLMEngine.from_engine_args(EngineArgs(MODEL, max_num_seqs=0)),
    "EngineArgs": lambda: EngineArgs(MODEL, max_num_sekuences=1),
    "create_engine_config": lambda: EngineArgs(MODEL, max_num_seqs=0).create_engine_config(),
    "SamplingParams": lambda: SamplingParams(temperature=-1),
    "StructuredOutputsParams": lambda: StructuredOutputsParams(regex="a", choice=["a"]),
    "BeamSearchParams": lambda: BeamSearchParams(beam_width=0, max_tokens=1),
    "LoRARequest": lambda: LoRARequest("", 1, "path"),
    "ProcessorConfig": lambda: ProcessorConfig(model_source=MODEL, concurrency=0),
    "build_processor": lambda: build_processor(1),  # pyright: ignore
    "build_openai_app": lambda: build_openai_app({"llm_configs": MODELS}),
    "build_serve_app": lambda: build_serve_app({"tensor_parallel_sze": "1"}),
    "numbers of params": lambda: without_engine(LLM).generate([TOKENS, TOKENS], [SamplingParams()]),
    "params": lambda: without_engine(LLM).generate([TOKENS], {"temperature": 1}),
    "messages": lambda: without_engine(LLM).chat([], chat_template_content_format="other"),
    "params of AsyncLLM": lambda: without_engine(AsyncLLM).generate("a", {"temperature": 1}),
}


def frames(error: BaseException) -> list[str]:
    """The files of the traceback's frames that are raycore's."""
    return [each.filename for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(OURS)]


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_shows_one_frame_of_raycore(mistake: Callable[[], object]):
    with pytest.raises(ValueError) as caught:
        mistake()
    assert len(frames(caught.value)) == 1
    # and nothing above it
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "\n" not in str(caught.value)


def test_a_mistake_of_a_stream_shows_no_more_than_its_generator():
    from raycore.client.streams import Streams
    from raycore.client.watchers import Watchers

    async def generate() -> None:
        client = SimpleNamespace(tokenizer=None, images=None, stream_interval=1, watchers=Watchers())
        async for _ in Streams(client).ask([Ask("a", SamplingParams(), 7)]):  # pyright: ignore
            pass

    with pytest.raises(ValueError, match="request_id=7") as caught:
        asyncio.run(generate())
    assert len(frames(caught.value)) == 2


@pytest.mark.parametrize(
    ("error", "keeps_cause"),
    [
        (InvalidConfig("invalid"), False),
        (PlacementShortage("no room"), False),
        (EngineDeadError("dead"), True),
        (InitializationError("a rank failed"), True),
    ],
)
def test_a_failure_keeps_its_cause_and_a_mistake_does_not(error: Exception, keeps_cause: bool):
    cause = RuntimeError("in a worker")

    @ends_traceback
    def fail() -> None:
        raise error from cause

    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value.__cause__ is (cause if keeps_cause else None)
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 2  # this function's, and the decorator's


def test_other_errors_are_left_alone():
    @ends_traceback
    def fail() -> None:
        raise KeyError("a fault of raycore's")

    with pytest.raises(KeyError) as caught:
        fail()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail"


def test_tracebacks_are_whole_at_the_level_debug(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, "raycore"), pytest.raises(InvalidConfig) as caught:
        LLM(MODEL, tensor_parallel_size=0)
    assert len(frames(caught.value)) > 5


def test_a_mistake_that_a_generator_finds_shows_one_frame_and_leaving_it_ends_it():
    ends: list[str] = []

    def inner() -> None:
        raise InvalidRequest("wrong")

    @ends_traceback
    def generate(is_wrong: bool) -> Generator[int, None, None]:
        try:
            yield 1
            if is_wrong:
                inner()
            yield 2
        finally:
            ends.append("ended")

    assert list(generate(False)) == [1, 2]
    with pytest.raises(InvalidRequest, match="wrong") as caught:
        list(generate(True))
    assert len(caught.traceback) == 2
    left = generate(False)
    next(left)
    left.close()
    assert ends == ["ended"] * 3
