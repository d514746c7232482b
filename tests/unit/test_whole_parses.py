"""What a collection of garbage runs doesn't make `ast.parse` fail, in versions of Python whose fault it is."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator

import pytest
from whole_parses import HAS_FAULT

SOURCE = "a(b(c))"


@pytest.fixture
def _collections_that_parse() -> Iterator[None]:
    """Each time that an object is made."""

    def parse_another(phase: str, info: object) -> None:
        compile("x", "another", "exec", ast.PyCF_ONLY_AST)

    before = gc.get_threshold()
    gc.callbacks.append(parse_another)
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(parse_another)


@pytest.mark.usefixtures("_collections_that_parse")
def test_a_tree_is_built_whole() -> None:
    assert ast.unparse(ast.parse(SOURCE)) == SOURCE
    assert gc.isenabled()


@pytest.mark.skipif(not HAS_FAULT, reason="this Python has not the fault")
@pytest.mark.usefixtures("_collections_that_parse")
def test_without_the_plugin_it_is_not() -> None:
    with pytest.raises(SystemError, match="recursion depth mismatch"):
        compile(SOURCE, "source", "exec", ast.PyCF_ONLY_AST)
