"""Output for notebook cells: an engine with a table of its ranks, and text while it is generated."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Generator
from contextlib import aclosing, closing
from html import escape
from typing import overload

from raycore.outputs import RequestOutput
from raycore.status import (
    COLUMNS,
    LEFT_ALIGNED,
    EngineStatus,
    RankState,
    RankStatus,
    num_serving,
    rank_cells,
    remarks,
)

_STATE_COLOURS: dict[RankState, str] = {"serving": "#2da44e", "gone": "#e5534b"}
_OTHER_COLOUR = "#bf8700"
"""The colors of the states are readable on light and on dark backgrounds. Everything else has the theme's colors."""


@overload
def echo(outputs: Generator[RequestOutput, None, None]) -> None: ...
@overload
def echo(outputs: AsyncGenerator[RequestOutput, None]) -> Awaitable[None]: ...
def echo(
    outputs: Generator[RequestOutput, None, None] | AsyncGenerator[RequestOutput, None],
) -> Awaitable[None] | None:
    """Print a request's text as it arrives: `echo(llm.stream(…))`, or `await echo(async_llm.generate(…))`.

    With several sequences (`n` above 1), the first is shown. An interrupt aborts the request.
    """
    if isinstance(outputs, AsyncGenerator):
        return _echo_async(outputs)
    printer = _Printer()
    # close the generator explicitly, because after an interrupt the cell's traceback keeps a reference to it
    with closing(outputs):
        for output in outputs:
            printer.show(output)
    return None


async def _echo_async(outputs: AsyncGenerator[RequestOutput, None]) -> None:
    printer = _Printer()
    async with aclosing(outputs):
        async for output in outputs:
            printer.show(output)


class _Printer:
    """Prints the new text of each output, and a line break after the last one."""

    def __init__(self) -> None:
        self._num_shown = 0

    def show(self, output: RequestOutput) -> None:
        text = output.outputs[0].text
        print(text[self._num_shown :], end="\n" if output.finished else "", flush=True)
        self._num_shown = len(text)


def engine_html(kind: str, status: EngineStatus, unavailable_reason: str | None) -> str:
    """An engine's headline and the table of its ranks, as HTML.

    Args:
        kind: the name of the engine's class.
        unavailable_reason: why the engine refuses requests; None if it accepts them.
    """
    name, model = f"<b>{escape(kind)} {escape(status.name)}</b>", f"model <code>{escape(status.model)}</code>"
    headline = f"{name}, {model}: {escape(unavailable_reason or num_serving(status))}"
    below = "".join(f"<div>{escape(sentence)}</div>" for sentence in remarks(status.ranks))
    return f"<div>{headline}</div>{_table(status.ranks) if status.ranks else ''}{below}"


def _table(ranks: list[RankStatus]) -> str:
    heading = "".join(_cell("th", column, escape(name)) for column, name in enumerate(COLUMNS))
    rows = "".join(f"<tr>{_row(rank)}</tr>" for rank in ranks)
    return f"<table><thead><tr>{heading}</tr></thead><tbody>{rows}</tbody></table>"


def _row(rank: RankStatus) -> str:
    cells = dict(enumerate(map(escape, rank_cells(rank))))
    state = COLUMNS.index("state")
    cells[state] = f'<span style="color: {_STATE_COLOURS.get(rank.state, _OTHER_COLOUR)}">●</span> {cells[state]}'
    return "".join(_cell("td", column, content) for column, content in cells.items())


def _cell(tag: str, column: int, content: str) -> str:
    side = "left" if column < LEFT_ALIGNED else "right"
    return f'<{tag} style="text-align: {side}">{content}</{tag}>'
