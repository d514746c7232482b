"""A program that is interrupted, as by Ctrl-C, while it starts, uses or ends an engine, in a simulated cluster.

The interrupt comes while the main thread waits, or before any statement of the product. Whoever made the call gets
KeyboardInterrupt and nothing else. After a start, nothing is left. After a request, the engine keeps nothing of it, and
computes the next one. After a shutdown, all is gone soon, as without the interrupt.

`python -m simulation.program interrupts FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import simulation.interruptible  # noqa: F401

# isort: split

from raycore.cli import serve
from raycore.client.client import EngineClient
from raycore.llm import LLM, AsyncLLM
from raycore.node import threads
from raycore.running_engine import RunningEngine
from raycore.sampling_params import SamplingParams
from raycore.server.listen_options import ListenOptions
from raycore.server.options import LoraModule, ServerOptions
from raycore.system import asyncio, signal, time
from simulation.cluster.accounts.callers import left_by_requests
from simulation.cluster.anywhere import MODEL
from simulation.cluster.driver import OPTIONS
from simulation.cluster.judges import left_by_driver
from simulation.program import PutIn
from simulation.putting_in import substitute
from simulation.ray import api
from simulation.ray.cluster import Cluster
from simulation.world.interrupts import Interrupt
from simulation.world.kernel import Thread

_SETTLES_S = 90.0
"""Virtual seconds within which nothing is left of what was interrupted."""
_CALLS: dict[str, tuple[int, int, int, float]] = {
    "start": (2, 2000, 10, 8.0),
    "generate": (4, 500, 2, 0.1),
    "stream": (1, 400, 2, 0.2),
    "shutdown": (1, 12, 2, 0.5),
    "serve": (3, 2100, 12, 10.0),
}
"""What may be interrupted, with how often it is drawn, and with how much of it the main thread has to do, about:
statements, places where it waits, and virtual seconds."""
_PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class Program:
    """See the module."""

    def __init__(self, cluster: Cluster, num_ranks: int) -> None:
        self._cluster = cluster
        self._num_ranks = num_ranks
        self._draws = cluster.world.generator("the scenario")
        assert cluster.world.current is not None
        self._process = cluster.world.current.process
        self._interrupt = Interrupt(cluster.world, self._process)
        (self._interrupted,) = self._draws.choices(list(_CALLS), [weight for weight, *_ in _CALLS.values()])

    def run(self) -> None:
        api.init()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        options = OPTIONS | {"data_parallel_size": self._num_ranks}
        if self._interrupted == "serve":
            self._serve(options)
            return
        llm = self._call("start", lambda: LLM(MODEL, use_tqdm_on_load=False, **options))
        if llm is not None:
            self._use(llm)
            self._call("shutdown", llm.shutdown)
            if not llm.unavailable_reason:  # the interrupt came before the shutdown began
                llm.shutdown()
        self._settle(self._left)

    def _serve(self, options: dict[str, Any]) -> None:
        """Have the command line start a server with adapters, which ends as soon as it serves."""
        numbers = range(1, 1 + self._draws.randint(1, 6))
        adapters = tuple(LoraModule(f"adapter {number}", f"/adapters/{number}") for number in numbers)
        engine = {"model": MODEL, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 8} | options
        chosen = engine, ServerOptions(("simulated",), lora_modules=adapters), ListenOptions()
        substitute(serve, "check_server", lambda _: chosen)
        substitute(serve, "_say", lambda _: None)
        shutdown = AsyncLLM.shutdown

        def look(engine: AsyncLLM, *args: Any) -> None:
            loops = [each._loop for each in self._threads("raycore-run") if each._loop is not None]
            assert not any(each._tasks for each in loops), "what the interrupted thread has waited for goes on"
            shutdown(engine, *args)

        substitute(AsyncLLM, "shutdown", look)
        args = argparse.Namespace(
            headless=False,
            api_server_count=1,
            api_server_nodes="own",
            log_level="error",
            shutdown_timeout=1.0,
            disable_log_stats=True,
        )
        self._call("serve", lambda: serve._serve(args))
        self._settle(self._left)

    def _use(self, llm: LLM) -> None:
        draws = self._draws
        prompts = [
            {"prompt_token_ids": [5 + index] * draws.choice([3, 20])} for index in range(draws.choice([1, 4, 8]))
        ]

        def generate() -> list[list[int]]:
            outputs = llm.generate(prompts, _PARAMS, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        expected = generate()
        assert self._call("generate", generate) in (None, expected)
        assert not llm.num_unfinished_requests, "the engine computes what nobody waits for"
        streamed = self._call("stream", lambda: [*llm.stream(prompts[0], _PARAMS)])
        assert not llm.num_unfinished_requests, "the engine computes what nobody waits for"
        assert streamed is None or list(streamed[-1].outputs[0].token_ids) == expected[0]
        self._settle(lambda: left_by_requests(llm))
        assert generate() == expected

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        """Make a call. Returns None if it is interrupted."""
        if what != self._interrupted:
            return call()
        self._arm()
        try:
            result = call()
            assert not self._interrupt.has_struck, f"{what} was interrupted, and its caller doesn't know"
        except KeyboardInterrupt:
            self._cluster.world.tell(f"{what} ends by the interrupt")
            return None
        finally:
            self._interrupt.cancel()
        return result

    def _arm(self) -> None:
        draws, (_, num_statements, num_places, seconds) = self._draws, _CALLS[self._interrupted]
        how = draws.choice(["statement", "statement", "place", "place", "moment"])
        if how == "statement":
            self._interrupt.after_statements(draws.randint(1, num_statements))
        elif how == "place":
            self._interrupt.at_place(draws.randint(1, num_places), draws.choice([0.0, draws.uniform(0.0, 0.05)]))
        else:
            self._interrupt.after_s(draws.uniform(0.0, seconds))

    def _settle(self, wrong: Callable[[], Iterator[str]]) -> None:
        """Wait until nothing is wrong any more. Raises AssertionError with what stays so."""
        until_s = time.monotonic() + _SETTLES_S
        while left := list(wrong()):
            assert time.monotonic() < until_s, f"{self._interrupted} was interrupted: {'; '.join(left)}"
            time.sleep(1.0)

    def _left(self) -> Iterator[str]:
        yield from left_by_driver(self._cluster)
        for each in self._threads("raycore"):
            yield f"the thread {each.name} waits for {each.waits_for}"

    def _threads(self, prefix: str) -> list[Thread]:
        """The threads of this process whose names begin so."""
        return [each for each in self._process.threads if each.name.startswith(prefix) and not each.is_over]


def main(cluster: Cluster, num_ranks: int) -> None:
    """See the module."""
    Program(cluster, min(num_ranks, 2)).run()


# ---- faults that are put in


def _an_interrupted_start_is_not_undone() -> None:
    original = RunningEngine.shutdown

    def shutdown(self: RunningEngine, *args: Any) -> None:
        if sys._getframe(1).f_code.co_name == "__init__":
            self._finalizer.detach()
        else:
            original(self, *args)

    substitute(RunningEngine, "shutdown", shutdown)


def _an_interrupted_request_goes_on() -> None:
    substitute(EngineClient, "abort", lambda *_, **__: None)


def _what_an_interrupted_wait_was_for_goes_on() -> None:
    substitute(serve, "run_apart", lambda main: threads._started(asyncio.run, main).result())


FAULTS = [
    PutIn(_an_interrupted_start_is_not_undone, 6, "the actor raycore_"),
    PutIn(_an_interrupted_request_goes_on, 8, "the engine computes what nobody waits for"),
    PutIn(_what_an_interrupted_wait_was_for_goes_on, 7, "has waited for goes on"),
]
