"""A program may end without shutting its engine down: it takes no time, says nothing, and keeps its exit status."""

from __future__ import annotations

import sys
import textwrap

import pytest
import shared_memory
from programs import Program

pytestmark = pytest.mark.timeout(300)

LIMIT_S = 20.0
"""It should take 3 s, of a machine that does nothing else. What goes wrong takes a minute."""

BEGIN = """
import tempfile
directory = tempfile.TemporaryDirectory()  # Python registers the exit hook of `weakref.finalize`: it runs after Ray's
import asyncio, sys, threading, time
from raycore import LLM, AsyncLLM, SamplingParams
from raycore.demo import demo_model_path

OPTIONS = dict(dtype="float32", num_threads=1, use_tqdm_on_load=False)
MODEL = str(demo_model_path())
LONG = SamplingParams(max_tokens=900, ignore_eos=True)

def end(mark="is at its end"):
    print(mark, flush=True)
"""

ENDS = {
    "AsyncLLM, two workers": (0, "llm = AsyncLLM(MODEL, tensor_parallel_size=2, **OPTIONS)\nend()"),
    "an exit status, and a waiting thread": (
        3,
        """
        llm = LLM(MODEL, max_num_seqs=1, **OPTIONS)
        def generate():
            llm.generate(["1 + 2 ="] * 100, LONG, use_tqdm=False)
        threading.Thread(target=generate, daemon=True).start()
        while not llm.num_unfinished_requests:
            time.sleep(0.01)
        end()
        sys.exit(3)
        """,
    ),
    "a waiting event loop": (
        0,
        """
        llm = AsyncLLM(MODEL, max_num_seqs=1, **OPTIONS)
        async def generate():
            async for _ in llm.generate("1 + 2 =", LONG):
                pass
        async def generate_all():
            await asyncio.gather(*(generate() for _ in range(100)))
        threading.Thread(target=lambda: asyncio.run(generate_all()), daemon=True).start()
        while not llm.num_unfinished_requests:
            time.sleep(0.01)
        end()
        """,
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_exit_with_an_engine_alive_is_quick_and_silent(name):
    status, code = ENDS[name]
    assert said_at_exit(code, status) == ""


def test_an_exit_by_an_exception_prints_that_alone(address):
    """While a thread asks again and again; on a cluster that was joined."""
    code = """
    llm = LLM(MODEL, **OPTIONS)
    def generate():
        while True:
            llm.generate("1 + 2 =", SamplingParams(max_tokens=5), use_tqdm=False)
    threading.Thread(target=generate, daemon=True).start()
    end()
    raise ValueError('mine')
    """
    said = said_at_exit(code, 1, address=address)
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("ValueError: mine\n")
    assert said.count("Traceback") == 1


@pytest.mark.parametrize("mark", ["raylet/raylet", "_dp0"])
def test_an_exit_while_a_thread_starts_an_engine_is_quick_and_silent(mark):
    """However far it has come: the program ends as soon as a process of this name is there."""
    code = """
    threading.Thread(target=lambda: LLM(MODEL, tensor_parallel_size=2, **OPTIONS), daemon=True).start()
    sys.stdin.readline()
    end()
    """
    assert said_at_exit(code, 0, wait_for_process=mark) == ""


def said_at_exit(code: str, status: int, wait_for_process: str | None = None, address: str = "local") -> str:
    """What the program of this code prints once it is at its end, which it has to come to soon, leaving nothing."""
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(code)]
    environment = {"RAY_ADDRESS": address}
    with shared_memory.nothing_stays(), Program(command, has_input=True, environment=environment) as program:
        if wait_for_process is not None:
            program.wait_for_process(wait_for_process)
            program.end_input()
        program.wait_for("is at its end")
        assert program.wait_for_exit(LIMIT_S) == status, program.output
        program.wait_until_nothing_is_left(LIMIT_S)
    return program.output.partition("is at its end\n")[2]
