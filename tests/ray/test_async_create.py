"""`AsyncLLM.create` leaves its event loop free while it starts an engine, and nothing behind when it is cancelled."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
import ray
from fake_ranks import live_groups
from job_cluster import STEP_S, eventually

from raycore import AsyncLLM, InvalidConfig, PlacementShortage, SamplingParams
from raycore.demo import demo_model_path

MODEL = demo_model_path()
LIMITS = {"num_threads": 1, "dtype": "float32", "max_model_len": 256, "standby_delay_s": None}
QUIET = {"use_tqdm_on_load": False, **LIMITS}
GREEDY = SamplingParams(temperature=0, max_tokens=8)

WITHOUT_RAY = """
import asyncio
from raycore import AsyncLLM, SamplingParams
from raycore.demo import demo_model_path

async def answer(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    async for output in llm.generate("27 + 58 =", params, stream=False):
        return output.outputs[0].text

if __name__ == "__main__":
    options = {"num_threads": 1, "dtype": "float32", "max_model_len": 256, "use_tqdm_on_load": False}
    llm = asyncio.run(AsyncLLM.create(demo_model_path(), **options))
    print(asyncio.run(answer(llm)))
    llm.shutdown()
"""


async def answer(llm: AsyncLLM) -> str:
    *_, last = [output async for output in llm.generate("27 + 58 =", GREEDY)]
    return last.outputs[0].text


async def until(is_so: Any) -> None:
    async with asyncio.timeout(STEP_S):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("ray_cluster")
def test_the_event_loop_runs_other_tasks_while_create_starts_an_engine():
    async def start_and_count() -> tuple[int, str]:
        num_ticks = 0

        async def tick() -> None:
            nonlocal num_ticks
            while True:
                await asyncio.sleep(0.01)
                num_ticks += 1

        ticking = asyncio.create_task(tick())
        async with await AsyncLLM.create(MODEL, **QUIET) as llm:
            ticking.cancel()
            return num_ticks, await answer(llm)

    num_ticks, text = asyncio.run(start_and_count())
    assert num_ticks > 5  # of some 10 ms; a start takes a few tenths of a second or more
    assert text == " 85"
    eventually(lambda: not live_groups())


@pytest.mark.usefixtures("ray_cluster")
def test_ray_warns_of_the_users_blocking_calls_in_an_async_actor_and_not_of_the_engines():
    @ray.remote(num_cpus=0)
    class Owner:
        def __init__(self) -> None:
            self._warnings: list[str] = []
            logging.getLogger("ray._private.worker").addFilter(lambda record: self._warnings.append(record.msg))

        async def run_an_engine(self) -> list[str]:
            async with await AsyncLLM.create(MODEL, **QUIET) as llm:
                assert await answer(llm) == " 85"
            return self._warnings

        async def block(self) -> list[str]:
            assert ray.get(ray.put(5)) == 5
            return self._warnings

    owner = Owner.remote()
    assert ray.get(owner.run_an_engine.remote(), timeout=STEP_S) == []
    (told,) = ray.get(owner.block.remote(), timeout=STEP_S)
    assert "blocks the event loop" in told
    ray.kill(owner)
    eventually(lambda: not live_groups())


@pytest.mark.usefixtures("ray_cluster")
def test_an_async_actor_answers_while_its_engine_starts():
    @ray.remote(num_cpus=0)
    class Owner:
        async def start(self) -> str:
            self.llm = await AsyncLLM.create(MODEL, **QUIET)
            return await answer(self.llm)

        async def ping(self) -> str:
            return "here"

    owner = Owner.remote()
    started = owner.start.remote()
    eventually(live_groups)
    assert ray.get(owner.ping.remote(), timeout=STEP_S) == "here"
    assert ray.wait([started], timeout=0) == ([], [started])
    assert ray.get(started, timeout=STEP_S) == " 85"
    ray.kill(owner)
    eventually(lambda: not live_groups())


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("num_ranks", [1, 17], ids=["ranks that start", "ranks that wait for nodes"])
def test_a_cancelled_create_leaves_no_placement_group(num_ranks: int):
    async def cancel() -> None:
        starting = asyncio.create_task(
            AsyncLLM.create(MODEL, data_parallel_size=num_ranks, wait_for_nodes_s=STEP_S, **QUIET)
        )
        await until(live_groups)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        assert starting.cancelled()
        assert live_groups() == []

    asyncio.run(cancel())


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("num_cpus", "says_so"), [(3, True), (0, False)])
def test_a_placement_shortage_names_the_cpus_that_the_starting_actor_holds(num_cpus: int, says_so: bool):
    @ray.remote(num_cpus=num_cpus)
    class Owner:
        async def start(self) -> str:
            try:
                await AsyncLLM.create(MODEL, data_parallel_size=17, **QUIET)
            except PlacementShortage as error:
                return str(error)
            return ""

    owner = Owner.remote()
    said = ray.get(owner.start.remote(), timeout=STEP_S)
    assert "17 ranks of 1 worker don't fit" in said
    assert ("The actor that starts this engine holds CPU 3 itself" in said) == says_so
    assert ("map_batches(..., num_cpus=0)" in said) == says_so
    ray.kill(owner)


@pytest.mark.usefixtures("ray_cluster")
def test_create_raises_the_errors_of_the_constructor():
    with pytest.raises(InvalidConfig, match="max_num_seqs=0"):
        asyncio.run(AsyncLLM.create(MODEL, max_num_seqs=0))


def test_a_local_ray_outlives_the_event_loop_on_which_create_started_it():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, timeout=STEP_S, check=False
    )
    assert (run.returncode, run.stdout) == (0, " 85\n"), run.stderr[-4000:]
