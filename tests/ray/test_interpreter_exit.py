"""A program may end without shutting its engine down: it takes no time, says nothing, and keeps its exit status."""

from __future__ import annotations

import sys
import textwrap

import pytest
import shared_memory
from programs import Program

pytestmark = pytest.mark.timeout(300)

LIMIT_S = 45.0
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
    "two workers, an exit status, and a waiting thread": (
        3,
        """
        llm = LLM(MODEL, tensor_parallel_size=2, max_num_seqs=1, **OPTIONS)
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
def test_an_exit_with_an_engine_alive_is_quick_and_silent(name, address):
    status, code = ENDS[name]
    joins = name == "a waiting event loop"  # the other starts a Ray, and ends it
    assert said_at_exit(code, status, address=address if joins else "local") == ""


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


FORKS = {
    "an exit": "sys.exit(7)",
    "an exception": "raise SystemExit(7) from ValueError('mine')",
    "a garbage collection": "del llm; running_engine._kept.clear(); gc.collect(); sys.exit(7)",
    "the end of a with block": "with llm: sys.exit(7)",
    "a use": """
        try:
            llm.generate("1 + 2 =")
        except ControlError as error:
            assert "engines-in-actors.md" in str(error), error
            sys.exit(7)
        """,
    "get_or_create": """
        try:
            LLM.get_or_create(MODEL, **OPTIONS)
        except ControlError as error:
            sys.exit(7)
        """,
    "another engine": """
        try:
            LLM(MODEL, **OPTIONS)
        except InitializationError as error:
            assert "was forked from a program with an engine" in str(error), error
            sys.exit(7)
        """,
    "SIGTERM": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); os.kill(os.getpid(), signal.SIGTERM)",
}


def test_a_forked_child_ends_by_itself_and_leaves_the_engine_alone():
    """Each child ends with its own status, while Ray's and raycore's threads run in the parent alone."""
    children = "".join(
        f"""
        child = os.fork()
        if child == 0:
            {textwrap.indent(textwrap.dedent(code).strip(), " " * 12).strip()}
            os._exit(1)
        ended[{name!r}] = wait_for(child)
        """
        for name, code in FORKS.items()
    )
    code = f"""
        import gc, multiprocessing, os, signal
        from raycore import running_engine
        from raycore.errors import ControlError, InitializationError

        llm = LLM.get_or_create(MODEL, **OPTIONS)
        ended = {{}}

        def wait_for(child):
            deadline_s = time.monotonic() + {LIMIT_S}
            while time.monotonic() < deadline_s:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.05)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "it hangs"
        {children}
        forked = multiprocessing.get_context("fork").Process(target=sys.exit, args=(7,))
        forked.start()
        forked.join({LIMIT_S})
        ended["multiprocessing"] = forked.exitcode
        wrong = {{name: status for name, status in ended.items() if status != 7}}
        assert not wrong, wrong
        assert llm.generate("27 + 58 =", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text.strip() == "85"
        end()
    """
    assert said_at_exit(code, 0) == ""


def test_an_engine_that_is_sent_to_a_task_is_refused_in_one_line(address):
    code = """
        import ray
        from raycore.errors import InvalidInput
        llm = LLM(MODEL, **OPTIONS)

        @ray.remote(num_cpus=0)
        def task(engine=None):
            return llm if engine is None else engine

        for send in (lambda: task.remote(llm), lambda: task.remote([llm]), task.remote, lambda: ray.put(llm)):
            try:
                send()
                raise AssertionError("it was sent")
            except InvalidInput as error:
                assert "engines-in-actors.md" in str(error) and "\\n" not in str(error), error
        end()
    """
    assert said_at_exit(code, 0, address=address) == ""
