"""What a notebook shows of an engine and of a stream."""

from __future__ import annotations

import asyncio
from xml.etree import ElementTree

import pytest

from raycore.display.notebook import echo, engine_html
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.status import EngineStatus, RankStatus

RANKS = [
    RankStatus(
        0,
        "serving",
        ["a1b2c3d4e5f6"],
        4711,
        ["0", "1"],
        num_running=3,
        num_waiting=12,
        kv_usage=0.5,
        backends=("triton",),
    ),
    RankStatus(1, "restarting", ["a1b2c3d4e5f6"], num_restarts=2),
]


def parse(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<body>{html}</body>")


def text_of(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def test_an_engines_html_has_a_row_for_each_rank():
    shown = parse(engine_html("LLM", EngineStatus("chat", "/models/m", RANKS), None))
    assert text_of(shown[0]) == "LLM chat, model /models/m: 1 of 2 ranks serving"
    rows = [[text_of(cell) for cell in row] for row in shown.iter("tr")]
    assert rows == [
        ["rank", "state", "node", "backend", "pid", "GPUs", "running", "waiting", "KV %", "restarts"],
        ["dp0", "● serving", "a1b2c3d4", "triton", "4711", "0,1", "3", "12", "50.0", "0"],
        ["dp1", "● restarting", "a1b2c3d4", "-", "-", "-", "0", "0", "0.0", "2"],
    ]


def test_the_parts_that_plain_torch_computes_are_below_the_table_of_ranks():
    ranks = [RankStatus(0, "serving", ["node"], backends=("triton",), parts_by_torch=("gates (<my gate>)",))]
    shown = parse(engine_html("LLM", EngineStatus("chat", "m", ranks), None))
    assert text_of(shown[-1]) == "plain torch computes on dp0: gates (<my gate>)"


def test_an_ended_engines_html_says_so_and_has_no_table():
    shown = parse(engine_html("LLM", EngineStatus("chat", "m", []), "the engine was shut down"))
    assert text_of(shown) == "LLM chat, model m: the engine was shut down"
    assert shown.find("table") is None


def test_names_in_an_engines_html_are_escaped():
    evil = "<script>alert(1)</script>&"
    ranks = [RankStatus(0, "gone", [evil], gpu_ids=[evil])]
    shown = parse(engine_html("LLM", EngineStatus(evil, evil, ranks), evil))
    assert shown.find(".//script") is None
    assert text_of(shown[0]).count(evil) == 3
    assert evil in text_of(shown[1])


def growing(*texts: str) -> list[RequestOutput]:
    return [
        RequestOutput("r", "p", [1], None, [CompletionOutput(0, text, [])], finished=number == len(texts))
        for number, text in enumerate(texts, 1)
    ]


class Stream:
    """A stream of outputs that knows whether it was closed."""

    def __init__(self, outputs: list[RequestOutput], error: BaseException | None = None) -> None:
        self.outputs, self.error, self.is_closed = outputs, error, False

    def blocking(self):
        try:
            yield from self.outputs
            if self.error:
                raise self.error
        finally:
            self.is_closed = True

    async def asynchronous(self):
        for output in self.blocking():
            yield output


@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
def test_echo_prints_each_piece_of_text_once_as_it_comes(kind, capsys):
    seen = []

    class Watched(Stream):
        def blocking(self):
            for output in super().blocking():
                yield output
                seen.append(capsys.readouterr().out)

    stream = Watched(growing("a", "a", "ab\n", "ab\ncd"))
    echoed = echo(getattr(stream, kind)())
    if echoed is not None:
        asyncio.run(echoed)
    assert seen == ["a", "", "b\n", "cd\n"]


def test_an_interrupted_echo_closes_its_stream_even_while_a_traceback_refers_to_it(monkeypatch):
    stream = Stream(growing("a", "ab"))
    outputs = stream.blocking()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        echo(outputs)
    monkeypatch.undo()
    assert stream.is_closed
    assert outputs is not None
