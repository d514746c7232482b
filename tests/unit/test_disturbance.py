"""What benchmarks with faults, pauses and sleeps count, on an engine that only takes notes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chaos.comparison import Comparison
from chaos.interruptions import PAUSES, SLEEPS, Interrupter
from chaos.workload import Result, make_requests, run_all

from raycore import SamplingParams
from raycore.outputs import CompletionOutput, RequestOutput

GREEDY = SamplingParams(temperature=0)


def result(*token_ids: int, reason: str = "length") -> Result:
    return Result([list(token_ids)], [""], [None], [(reason, None)])


@pytest.mark.parametrize(
    ("part", "begins"),
    [
        (result(1, 2, reason="abort"), True),
        (result(reason="abort"), True),
        (result(1, 2, 3), True),
        (result(1, 3, reason="abort"), False),
        (result(1, 2, 3, 4, reason="abort"), False),
        (result(1, 2), False),
        (result(1, 2, 3, reason="stop"), False),
    ],
)
def test_an_aborted_result_is_a_prefix_of_the_expected_one(part: Result, begins: bool) -> None:
    whole = result(1, 2, 3)
    assert part.begins(whole) == begins
    comparison = Comparison(batch_invariant=True)
    whole.aborted.append(part)
    comparison.add(whole, result(1, 2, 3), GREEDY)
    assert (comparison.num_aborted, comparison.is_good()) == (1, begins)


@pytest.mark.parametrize("wrong", [result(1, 2), result(1, 2, 4), result(1, 2, 3, reason="stop"), ValueError("lost")])
def test_lost_and_changed_results_are_found(wrong: Result | Exception) -> None:
    comparison = Comparison(batch_invariant=True)
    comparison.add(result(1, 2, 3), result(1, 2, 3), GREEDY)
    assert comparison.is_good()
    comparison.add(wrong, result(1, 2, 3), GREEDY)
    assert not comparison.is_good()


class Engine:
    """Aborts the first attempt of each request, and notes what it is told."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.calls: list[str] = []

    async def generate(self, prompt: str, params: SamplingParams, request_id: str, lora_request: None = None) -> Any:
        self.ids.append(request_id)
        reason = "abort" if request_id.endswith("-0") else "length"
        part = CompletionOutput(0, "", [1], finish_reason=reason)
        yield RequestOutput(request_id, prompt, [1], None, [part], True)

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level}")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append("wake")


def test_aborted_requests_are_submitted_again() -> None:
    engine: Any = Engine()
    streams: dict[str, Any] = {}
    requests = [request._replace(is_stream=True) for request in make_requests(3, seed=0)]
    results = asyncio.run(run_all(engine, requests, 2, streams, first_id=5))
    assert sorted(engine.ids) == [f"request-{number}-{attempt}" for number in (5, 6, 7) for attempt in (0, 1)]
    assert all(isinstance(each, Result) and len(each.aborted) == 1 and not each.is_aborted for each in results)
    assert {request_id: len(stream.times_s) for request_id, stream in streams.items()} == {
        f"request-{number}": 2 for number in (5, 6, 7)
    }


def test_an_interrupter_without_interruptions_calls_no_engine() -> None:
    engine: Any = Engine()
    interrupter = Interrupter(engine, [], seed=0)
    asyncio.run(interrupter.run(1e-4, 1e-4, asyncio.Event()))
    assert engine.calls == []


def test_an_interrupter_ends_every_interruption() -> None:
    engine: Any = Engine()

    async def run() -> Interrupter:
        interrupter, is_over = Interrupter(engine, [*PAUSES, *SLEEPS], seed=0), asyncio.Event()
        running = asyncio.ensure_future(interrupter.run(1e-4, 1e-4, is_over))
        await asyncio.wait_for(interrupter.wait_for("still"), 20)
        while interrupter.num_done < 20:
            await asyncio.wait_for(interrupter.wait_for("running"), 20)
            await asyncio.sleep(1e-4)
        is_over.set()
        await asyncio.wait_for(running, 20)
        return interrupter

    interrupter = asyncio.run(run())
    assert interrupter.phase == "running"
    assert set(interrupter.counts) == {"pause keep", "pause wait", "pause abort", "sleep 1", "sleep 2"}
    assert len(interrupter.stills_s) == interrupter.num_done
    begin_s, end_s = interrupter.stills_s[0]
    middle_s = (begin_s + end_s) / 2
    assert interrupter.still_times([begin_s - 1, middle_s, end_s]) == [middle_s]
    assert engine.calls[-1] in ("resume", "wake")
    assert sum(call.startswith("pause") for call in engine.calls) == engine.calls.count("resume")
