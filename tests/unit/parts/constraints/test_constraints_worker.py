"""Grammars are compiled while their requests wait, and only those that somebody waits for."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from waiting import LONG_S, eventually

from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig, InvalidRequest
from raycore.parts.constraints.grammar.native import NativeCompiler
from raycore.parts.constraints.worker import GrammarPreparation
from raycore.structured_outputs import StructuredOutputsParams
from raycore.worker.core import WorkerCore
from raycore.worker.rank import WorkerRank


def prepared(**options: Any) -> GrammarPreparation:
    rank = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1)
    return GrammarPreparation(WorkerCore(resolve(demo_model_path(), **options), rank))


@pytest.fixture
def grammars() -> GrammarPreparation:
    return prepared()


def finish(grammars: GrammarPreparation) -> None:
    eventually(lambda: not grammars.prepare_grammars({}))


def test_grammars_of_dropped_requests_are_not_compiled(
    grammars: GrammarPreparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_compile, num_begun, compiled = threading.Event(), threading.Semaphore(0), []
    compile_native = NativeCompiler.compile

    def compile_later(compiler: NativeCompiler, asked: StructuredOutputsParams) -> Any:
        compiled.append(asked.regex)
        num_begun.release()
        assert may_compile.wait(LONG_S)
        return compile_native(compiler, asked)

    monkeypatch.setattr(NativeCompiler, "compile", compile_later)
    asked = {seq_id: StructuredOutputsParams(regex=f"{seq_id}[0-9]") for seq_id in range(8)}
    grammars.prepare_grammars(asked, [])
    for _ in range(4):  # as many as there are threads
        assert num_begun.acquire(timeout=LONG_S)
    assert grammars.prepare_grammars({}, [0, 6, 7]) == [1, 2, 3, 4, 5]
    # another one asks for the constraint of one that leaves, one has left and comes again
    assert grammars.prepare_grammars({9: asked[5], 7: asked[7]}, [5]) == [1, 2, 3, 4, 9, 7]
    may_compile.set()
    finish(grammars)
    assert sorted(compiled) == [f"{seq_id}[0-9]" for seq_id in (0, 1, 2, 3, 4, 5, 7)]


def test_a_grammar_that_cannot_be_compiled_counts_as_prepared(grammars: GrammarPreparation) -> None:
    asked = {1: StructuredOutputsParams(regex="[0-9]{3}"), 2: StructuredOutputsParams(regex="(")}
    assert set(grammars.prepare_grammars(asked, [])) <= {1, 2}
    finish(grammars)
    assert grammars.prepare_grammars({3: asked[1]}, []) == [], "it is known"
    with pytest.raises(InvalidRequest, match="unclosed group"):
        grammars.core.grammars.matcher(asked[2])


def test_a_failed_load_for_prepare_structured_outputs_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared().warmed_up()  # nobody has asked for it
    prepared(prepare_structured_outputs=True).warmed_up()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    other = prepared(prepare_structured_outputs=True)
    with pytest.raises(InvalidConfig, match=r'prepare_structured_outputs=True: .*pip install "raycore\[structured\]"'):
        other.warmed_up()
