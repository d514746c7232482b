"""Changes the imports of a script for vLLM, and the commands that it starts, to raycore's."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import raycore
from raycore.compat.names import COMMANDS, NAMES, SUBCOMMANDS, WHOLE, reason
from raycore.errors import InvalidInput


class _Edit(NamedTuple):
    """A part of the source, by lines from 1 on and bytes from 0 on, and what replaces it."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def rewritten(source: str) -> str:
    """The source of a script that does with raycore what the given one does with vLLM.

    Names come from `raycore` itself if it exports them, and otherwise from where raycore has them.

    Raises:
        InvalidInput: the script imports something that raycore doesn't have. The message says why.
        SyntaxError: it isn't Python.
    """
    lines = source.encode().splitlines(keepends=True)
    for edit in sorted(_edits(ast.parse(source)), reverse=True):
        (first, begin), (last, end) = edit.start, edit.end
        kept = lines[first - 1][:begin], lines[last - 1][end:]
        lines[first - 1 : last] = [kept[0] + edit.text.encode() + kept[1]]
    return b"".join(lines).decode()


def _edits(tree: ast.Module) -> Iterator[_Edit]:
    for node in ast.walk(tree):
        text = None
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _inner(node.module or "") is not None:
            text = f"\n{' ' * node.col_offset}".join(_from_imports(node))
        elif isinstance(node, ast.Import) and any(_inner(alias.name) is not None for alias in node.names):
            text = f"import {', '.join(map(_imported, node.names))}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (_inner(node.value) or "") in COMMANDS:
            text = repr(f"raycore.compat.{node.value}").replace("'", '"')
        elif isinstance(node, ast.List | ast.Tuple) and node.elts and _is_command(node.elts):
            node, text = node.elts[0], '"raycore"'
        if text is not None:
            assert isinstance(node, ast.stmt | ast.expr)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            yield _Edit((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text)


def _inner(module: str) -> str | None:
    """A module's name without the leading `vllm.`; None for other modules than vLLM's."""
    return "" if module == "vllm" else module[5:] if module.startswith("vllm.") else None


def _is_command(words: Sequence[ast.expr]) -> bool:
    """Whether a list begins as a call of the command `vllm` does."""
    if not isinstance(words[0], ast.Constant) or words[0].value != "vllm" or len(words) < 2:
        return False
    second = words[1]
    return isinstance(second, ast.Starred) or (isinstance(second, ast.Constant) and second.value in SUBCOMMANDS)


def _from_imports(node: ast.ImportFrom) -> Iterator[str]:
    module = _inner(node.module or "")
    assert module is not None
    for alias in node.names:
        home, _, attribute = _home(module, alias.name).partition(":")
        name = attribute or alias.name
        bound = alias.asname or alias.name
        yield f"from {home} import {name}" + (f" as {bound}" if bound != name else "")


def _home(module: str, name: str) -> str:
    if name in raycore.__all__ and name in NAMES.get(module, {}):
        return "raycore"
    found = NAMES.get(module, {}).get(name)
    inner = f"{module}.{name}".lstrip(".")
    if found is None and inner in WHOLE:
        package, _, attribute = WHOLE[inner].rpartition(".")
        return f"{package}:{attribute}"
    if found is None:
        raise InvalidInput(f"raycore has no vllm.{inner}: {reason(inner)}")
    return found


def _imported(alias: ast.alias) -> str:
    if _inner(alias.name) is None:
        return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
    if alias.asname is not None:
        return f"raycore.compat.{alias.name} as {alias.asname}"
    package = "raycore.compat.vllm as vllm"
    return package if alias.name == "vllm" else f"{package}, raycore.compat.{alias.name}"
