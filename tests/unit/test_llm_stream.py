"""`LLM.stream`, with a client that the test plays."""

from __future__ import annotations

from types import SimpleNamespace

from raycore import LLM, SamplingParams
from raycore.client.ask import Ask
from raycore.client.updates import Sink, Update
from raycore.client.watchers import Watchers
from raycore.outputs import CompletionOutput, RequestOutput


def test_an_output_that_comes_after_the_last_update_is_ignored() -> None:
    """As when a rank's thread is about to deliver an output while another thread aborts the request."""

    def update(request_id: str, num_tokens: int, finished: bool) -> Update:
        completion = CompletionOutput(0, "", [5] * num_tokens)
        return Update(request_id, RequestOutput(request_id, None, [1], None, [completion], finished))

    def submit(asks: list[Ask], sink: Sink) -> None:
        sink([update(asks[0].request_id, 2, finished=True)])
        sink([update(asks[0].request_id, 1, finished=False)])

    llm = object.__new__(LLM)
    llm._client = SimpleNamespace(  # pyright: ignore
        tokenizer=None,
        images=None,
        stream_interval=1,
        submit=submit,
        watchers=Watchers(),
        abort=lambda ids, notify: None,
    )
    outputs = list(llm.stream({"prompt_token_ids": [1]}, SamplingParams()))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2]
