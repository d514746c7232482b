"""Mistakes that are refused before anything starts: one line, which names the value and the remedy."""

from __future__ import annotations

import asyncio
import io
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from mistakes.files import write_files
from mistakes.table import COMMANDS, PROGRAMS, Mistake

from raycore import LLM, AsyncLLM, EngineArgs, LoRARequest, SamplingParams
from raycore.beam_search import BeamSearchParams
from raycore.cli.main import main
from raycore.cluster.manager import CoreEngineActorManager
from raycore.data import ProcessorConfig, build_processor
from raycore.demo import demo_model_path
from raycore.serve import build_openai_app

NAMES: dict[str, Any] = {
    **{each.__name__: each for each in (LLM, AsyncLLM, EngineArgs, LoRARequest, SamplingParams, BeamSearchParams)},
    **{each.__name__: each for each in (ProcessorConfig, build_processor, build_openai_app)},
    "MODEL": demo_model_path(),
    "asyncio": asyncio,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of mistakes."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    return folder


@pytest.fixture(autouse=True)
def nothing_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(CoreEngineActorManager, "start", start)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO())


@pytest.mark.parametrize("mistake", COMMANDS, ids=lambda mistake: mistake.does)
def test_a_command_says_in_one_line_what_to_do(mistake: Mistake, capfd: pytest.CaptureFixture[str]):
    try:
        status = main(shlex.split(mistake.does))
    except SystemExit as end:  # of the parser
        status = end.code
    printed = capfd.readouterr()
    lines = [line for line in printed.err.splitlines() if not re.match(r"INFO ", line)]
    assert status in (1, 2)
    assert printed.out == ""
    assert len(lines) == 1
    assert re.match("raycore( [a-z-]+)?: ", lines[0])
    assert re.search(mistake.says, lines[0])


@pytest.mark.parametrize("mistake", PROGRAMS, ids=lambda mistake: mistake.does)
def test_a_program_gets_an_error_of_one_line(mistake: Mistake):
    with pytest.raises(ValueError, match=mistake.says) as caught:
        eval(mistake.does, NAMES)
    assert "\n" not in str(caught.value)
