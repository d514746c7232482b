"""raycore in a notebook's kernel, which starts a Ray of its own: the example, the stop button, cells that run again."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

import nbformat
import pytest
import shared_memory
from fork_server import SOCKET_VARIABLE
from nbclient.exceptions import CellExecutionError
from notebook_kernel import Kernel, html_of, running_kernel, text_of
from waiting import eventually

ROOT = Path(__file__).parents[2]
EXAMPLE = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)

pytestmark = pytest.mark.timeout(300)
"""The first test waits for the whole example."""

MARK = f"RAYCORE_TEST_{uuid.uuid4().hex}"
"""A variable that every process has which the kernel has started."""


def marked_processes() -> list[str]:
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if MARK.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended meanwhile
    return found


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    home = tmp_path_factory.mktemp("notebook")
    environment = os.environ | {
        "RAY_ADDRESS": "local",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "IPYTHONDIR": str(home),  # nobody's own startup files
        MARK: "1",
    }
    environment.pop(SOCKET_VARIABLE, None)
    shared_before = shared_memory.files()
    with running_kernel(str(home), environment) as kernel:
        yield kernel
    eventually(lambda: not marked_processes(), marked_processes)
    assert shared_memory.abandoned_since(shared_before) == []


@pytest.fixture(scope="module")
def example(kernel):
    """The example's code cells, run."""
    return [kernel.run(cell.source) for cell in EXAMPLE.cells if cell.cell_type == "code"]


def cell_with(cells, source: str):
    (found,) = [cell for cell in cells if source in cell.source]
    return found


def rows_of(html: str) -> list[list[str]]:
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    return [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in rows if row]


def test_the_example_notebook_is_stored_without_outputs():
    nbformat.validate(EXAMPLE)
    for cell in EXAMPLE.cells:
        assert cell.cell_type != "code" or (cell.outputs, cell.execution_count) == ([], None)


def test_the_example_notebook_prints_only_progress_bars_to_stderr(example):
    for cell in example:
        for output in cell.outputs:
            assert output.output_type != "error"
            if output.get("name") == "stderr":
                assert re.fullmatch(r"(\s*Generating: +\d+%\|[^\n]*)*\s*", output.text), output.text


def test_a_notebook_shows_an_engine_as_a_table_of_its_ranks(example):
    html = html_of(cell_with(example, "llm = LLM.get_or_create"))
    ((rank, state, _, _, pid, gpus, running, *_),) = rows_of(html)
    assert (rank, state, gpus, running) == ("dp0", "● serving", "-", "0")
    assert int(pid) > 0
    assert "1 of 1 ranks serving" in html


def test_generate_in_a_notebook_shows_a_bar_and_gives_right_results(example):
    cell = cell_with(example, "= llm.generate")
    assert "100%" in text_of(cell)
    assert "50/50" in text_of(cell)
    assert "10 + 58 = 68\n" in text_of(cell)


def test_echo_in_a_notebook_prints_streamed_text(example):
    assert text_of(cell_with(example, "echo(llm.stream(")) == " 85\n"
    # one line for each update, which has all tokens since the last one
    assert text_of(cell_with(example, "for output in llm.stream(")).splitlines()[-1].endswith(" 344")


def test_scaling_in_a_notebook_adds_ranks_and_shows_them(example):
    assert [row[:2] for row in rows_of(html_of(cell_with(example, "llm.scale(2)")))] == [
        ["dp0", "● serving"],
        ["dp1", "● serving"],
    ]


def test_get_or_create_in_a_notebook_reuses_or_replaces_the_engine(example):
    assert text_of(cell_with(example, "is llm")) == "True"
    assert "was LLM" in html_of(next(cell for cell in example if cell.source == "llm"))
    assert "85" in text_of(cell_with(example, "await echo("))
    assert "the engine was shut down" in html_of(cell_with(example, "async_llm.shutdown()"))


ENGINE = """
from raycore import LLM, AsyncLLM, SamplingParams
from raycore.demo import demo_model_path
from raycore.notebook import echo
llm = LLM.get_or_create(demo_model_path(), num_threads=1)
endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
"""
ASYNC_ENGINE = ENGINE.replace("LLM.get", "AsyncLLM.get")


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    "source",
    [
        "print('go'); llm.generate(['1 + 2 ='] * 64, endless)",
        "while True: echo(llm.stream('1 + 2 =', endless))",
        "while True:\n    for output in llm.stream('1 + 2 =', endless): print('go')",
    ],
)
def test_the_stop_button_ends_a_cell_and_its_requests(kernel: Kernel, source):
    kernel.run(ENGINE)
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        kernel.run(source, interrupted_after="go" if "go" in source else "2")
    assert text_of(kernel.run("(llm.num_unfinished_requests, llm.ranks[0].num_running)")) == "(0, 0)"
    assert text_of(kernel.run("llm.generate('27 + 58 =', use_tqdm=False)[0].outputs[0].text")) == "' 85'"


@pytest.mark.usefixtures("example")
def test_the_stop_button_ends_the_requests_that_a_cell_awaits(kernel: Kernel):
    kernel.run(ASYNC_ENGINE)
    with pytest.raises(CellExecutionError):
        kernel.run("while True: await echo(llm.generate('1 + 2 =', endless))", interrupted_after="2")
    assert text_of(kernel.run("(llm.num_unfinished_requests, llm.ranks[0].num_running)")) == "(0, 0)"
    kernel.run("await echo(llm.generate('27 + 58 =', SamplingParams(temperature=0, max_tokens=8)))")


@pytest.mark.usefixtures("example")
def test_a_cell_that_shuts_ray_down_ends_the_engine_first_and_the_next_cell_may_start_another(kernel: Kernel):
    kernel.run(ASYNC_ENGINE)
    cell = kernel.run("import ray; ray.shutdown(); llm")
    assert "the engine was shut down" in html_of(cell)
    assert not [output for output in cell.outputs if output.get("name") == "stderr"]
    kernel.run(ENGINE)
    assert "1 of 1 ranks serving" in text_of(kernel.run("llm"))


def quickstart() -> list[tuple[str, str | None]]:
    """The cells of the quickstart, and what it says that they show."""
    text = (ROOT / "docs" / "quickstart-notebook.md").read_text()
    return re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, re.DOTALL)


@pytest.mark.usefixtures("example")
def test_the_notebook_quickstarts_cells_give_the_documented_outputs(kernel: Kernel):
    cells = quickstart()
    assert len(cells) >= 6
    for source, shown in cells:
        cell = kernel.run(source)
        if shown:
            assert text_of(cell, with_stderr=False).strip("\n") == shown.strip("\n"), source
    assert "the engine was shut down" in html_of(cell)
