"""`LLMEngine`, `LLM.enqueue` and what `LLM` passes on, with a client that the tests play."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raycore import LLM, AsyncLLM, LLMEngine, LoRARequest, PoolingParams, SamplingParams
from raycore.client.ask import Ask
from raycore.client.inputs import OnlyText
from raycore.client.request_state import PooledOutput
from raycore.client.updates import Update
from raycore.client.watchers import Watchers
from raycore.config.parallel import ParallelConfig
from raycore.errors import InvalidRequest, RequestFailed
from raycore.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from raycore.running_engine import RunningEngine
from raycore.sampling_params import RequestOutputKind

IDS = {"prompt_token_ids": [1, 2]}


class Client:
    """Answers each request at once, with its number of prompt tokens as the only token."""

    images: Any = OnlyText()
    max_model_len = 100
    num_output_tokens = 0
    stream_interval = 1
    chat_template: str | None = None

    def __init__(self, tokenizer: Any, pooling: Any = None) -> None:
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.watchers = Watchers()
        self.submitted: list[Sequence[Ask]] = []
        self.aborted: list[str] = []
        self.fails = ""
        self.error: Exception = RequestFailed("it failed")

    @property
    def checks(self) -> Any:
        return self

    def submit(self, asks: Sequence[Ask], sink: Any) -> None:
        self.submitted.append(asks)
        for ask in asks:
            request_id, prompt = ask.request_id, ask.parsed
            token_ids = prompt.token_ids
            if prompt.text is not None and prompt.text == self.fails:
                sink([Update(request_id, error=self.error)])
            elif isinstance(ask.params, PoolingParams):
                data = np.zeros(1, np.float32)
                sink([Update(request_id, PooledOutput(request_id, None, token_ids, finished=True, data=data))])
            else:
                part = CompletionOutput(0, "x", [len(token_ids)], finish_reason="length")
                sink([Update(request_id, RequestOutput(request_id, None, token_ids, outputs=[part], finished=True))])

    def abort(self, request_ids: list[str], notify: bool = False) -> None:
        self.aborted += request_ids


def made(kind: type[Any], client: Client) -> Any:
    engine = object.__new__(kind)
    engine._client = client
    engine._parts = SimpleNamespace(client=client)
    engine.config = SimpleNamespace(model=SimpleNamespace(default_sampling_params={"top_k": 3}, model="m"))
    return engine


@pytest.fixture
def client(tokenizer: Any) -> Client:
    return Client(tokenizer)


@pytest.fixture
def llm(client: Client) -> LLM:
    return made(LLM, client)


@pytest.fixture
def engine(client: Client) -> LLMEngine:
    return LLMEngine(made(RunningEngine, client))


def test_requests_are_added_and_stepped(engine: LLMEngine, client: Client) -> None:
    adapter = LoRARequest("a", 1, "/a")
    assert engine.add_request("1", "the fox", SamplingParams(), lora_request=adapter, priority=3) == "1"
    assert engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 1
    [output] = engine.step()
    assert isinstance(output, RequestOutput)
    assert output.request_id == "1"
    assert not engine.has_unfinished_requests()
    [[ask]] = client.submitted
    assert (ask.stream, ask.priority, ask.lora) == (True, 3, adapter)
    engine.add_request("1", IDS, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
    assert not client.submitted[1][0].stream
    engine.abort_request("1")
    engine.abort_request(["1", "2"])
    assert client.aborted == ["1"]
    assert not engine.has_unfinished_requests()


def test_tokenization_of_a_request_can_be_chosen(engine: LLMEngine, client: Client) -> None:
    engine.add_request("1", {"prompt_token_ids": [1, 2, 3]}, SamplingParams())
    engine.add_request(
        "2", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(), tokenization_kwargs={"truncate_prompt_tokens": 2}
    )
    assert [len(ask.parsed.token_ids) for [ask] in client.submitted] == [3, 2]
    with pytest.raises(InvalidRequest, match="tokenization_kwargs has 'x'"):
        engine.add_request("3", IDS, SamplingParams(), tokenization_kwargs={"x": 1})


def test_requests_may_pool(tokenizer: Any) -> None:
    client = Client(tokenizer, pooling=SimpleNamespace(tasks=["embed"]))
    engine = LLMEngine(made(RunningEngine, client))
    assert engine.get_supported_tasks() == ("embed",)
    engine.add_request("1", IDS, PoolingParams(task="embed"))
    [output] = engine.step()
    assert isinstance(output, PoolingRequestOutput)
    assert client.submitted[0][0].params == PoolingParams(task="embed")


def test_wrong_arguments_are_refused_by_name(engine: LLMEngine) -> None:
    for arguments, message in (
        ((1, IDS, SamplingParams()), "request_id=1 isn't a string"),
        (("1", IDS, {"top_k": 3}), r"params=\{'top_k': 3\} is neither SamplingParams nor PoolingParams"),
        (("1", [], SamplingParams()), "prompt 0"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.add_request(*arguments)  # pyright: ignore[reportArgumentType]
    assert not engine.has_unfinished_requests()


def test_queued_requests_are_returned_in_order_and_only_once(llm: LLM, client: Client) -> None:
    ids = llm.enqueue(["the fox", "the"], SamplingParams(max_tokens=1), priority=2)
    ids += llm.enqueue(IDS)
    assert [ask.priority for ask in client.submitted[0]] == [2, 2]
    assert client.submitted[1][0].params.top_k == 3  # pyright: ignore
    [other] = llm.generate([[7]], use_tqdm=False)
    assert other.prompt_token_ids == [7]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [each.request_id for each in outputs] == ids
    assert llm.wait_for_completion(RequestOutput, use_tqdm=False) == []
    assert llm.enqueue([]) == []


@pytest.mark.parametrize("kind", [RequestFailed, InvalidRequest])
def test_a_failure_among_queued_requests_has_the_other_outputs(llm: LLM, client: Client, kind: type[Exception]) -> None:
    client.fails, client.error = "the", kind("it failed")
    ids = llm.enqueue(["the fox", "the", "fox"])
    with pytest.raises(RequestFailed, match="it failed") as failure:
        llm.wait_for_completion(use_tqdm=False)
    assert [each and each.request_id for each in failure.value.outputs] == [ids[0], None, ids[2]]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_outputs_of_another_type_are_not_waited_for(llm: LLM) -> None:
    llm.enqueue([IDS])
    with pytest.raises(InvalidRequest, match="this engine's outputs are RequestOutput"):
        llm.wait_for_completion(PoolingRequestOutput, use_tqdm=False)
    assert len(llm.wait_for_completion((RequestOutput, PoolingRequestOutput), use_tqdm=False)) == 1


def test_the_engine_of_an_llm_steps_through_what_was_queued(llm: LLM) -> None:
    ids = llm.enqueue([IDS, IDS])
    engine = llm.llm_engine
    engine.add_request("own", IDS, SamplingParams())
    assert [each.request_id for each in engine.step()] == [*ids, "own"]
    assert not llm.llm_engine.has_unfinished_requests()


def test_conversations_are_queued_as_prompts(llm: LLM, client: Client) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    chats = [[{"role": "user", "content": text}] for text in ("the fox", "the")]
    llm.enqueue_chat(chats, chat_template=template)
    llm.chat(chats[0], chat_template=template, use_tqdm=False, chat_template_content_format="string", priority=1)
    texts = [[ask.parsed.text for ask in asks] for asks in client.submitted]
    assert texts == [["the fox", "the"], ["the fox"]]
    client.chat_template = template + "!"
    llm.chat(chats[0], use_tqdm=False)
    assert client.submitted[-1][0].parsed.text == "the fox!"
    with pytest.raises(InvalidRequest, match="chat_template_content_format='x' isn't one of 'auto'"):
        llm.chat(chats[0], chat_template=template, chat_template_content_format="x")


def test_a_call_has_one_priority_or_one_for_each_prompt(llm: LLM, client: Client) -> None:
    llm.generate([IDS, IDS], priority=-1, use_tqdm=False)
    llm.generate([IDS, IDS], priority=[4, 5], use_tqdm=False)
    assert [[ask.priority for ask in asks] for asks in client.submitted] == [[-1, -1], [4, 5]]
    with pytest.raises(InvalidRequest, match="1 priorities for 2 prompts"):
        llm.generate([IDS, IDS], priority=[4], use_tqdm=False)


def test_a_progress_bar_may_be_the_callers(llm: LLM) -> None:
    made: list[dict[str, Any]] = []

    def bar(**options: Any) -> Any:
        from tqdm import tqdm

        made.append(options)
        return tqdm(disable=True, **options)

    llm.generate([IDS, IDS], use_tqdm=bar)
    assert made[0]["total"] == 2


def test_the_number_of_workers_is_known(llm: LLM) -> None:
    llm.config = SimpleNamespace(parallel=ParallelConfig(data_parallel_size=2, tensor_parallel_size=3))  # pyright: ignore
    assert (llm.get_world_size(), llm.get_world_size(include_dp=False)) == (6, 3)


def test_pooling_for_asyncio_has_vllms_order() -> None:
    order = list(inspect.signature(AsyncLLM.encode).parameters)[1:8]
    assert order[:3] == ["prompt", "pooling_params", "request_id"]
    assert order[3:] == ["lora_request", "trace_headers", "priority", "tokenization_kwargs"]
