"""Grammars are compiled while their requests wait, and only those that somebody waits for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from waiting import LONG_S, eventually

from raycore.demo import demo_model_path
from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.parts.constraints.grammar.native import NativeCompiler
from raycore.parts.constraints.grammar.prepared import PreparedGrammars
from raycore.structured_outputs import StructuredOutputsParams


@pytest.fixture
def grammars() -> PreparedGrammars:
    return PreparedGrammars(GrammarCompiler(demo_model_path(), 320, [0]))


def finish(grammars: PreparedGrammars) -> None:
    eventually(lambda: not grammars.prepare({}))


def test_grammars_of_dropped_requests_are_not_compiled(
    grammars: PreparedGrammars, monkeypatch: pytest.MonkeyPatch
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
    grammars.prepare(asked, [])
    for _ in range(4):  # as many as there are threads
        assert num_begun.acquire(timeout=LONG_S)
    assert grammars.prepare({}, [0, 6, 7]) == [1, 2, 3, 4, 5]
    # another one asks for the constraint of one that leaves, one has left and comes again
    assert grammars.prepare({9: asked[5], 7: asked[7]}, [5]) == [1, 2, 3, 4, 9, 7]
    may_compile.set()
    finish(grammars)
    assert sorted(compiled) == [f"{seq_id}[0-9]" for seq_id in (0, 1, 2, 3, 4, 5, 7)]


def test_a_grammar_that_cannot_be_compiled_counts_as_prepared(grammars: PreparedGrammars) -> None:
    asked = {1: StructuredOutputsParams(regex="[0-9]{3}"), 2: StructuredOutputsParams(regex="(")}
    assert set(grammars.prepare(asked, [])) <= {1, 2}
    finish(grammars)
    assert grammars.prepare({3: asked[1]}, []) == [], "it is known"
    with pytest.raises(InvalidRequest, match="unclosed group"):
        grammars._compiler.matcher(asked[2])
