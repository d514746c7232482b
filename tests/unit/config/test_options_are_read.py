"""No option is taken without effect: something reads each of them."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

import raycore
from raycore.config import ENGINE_OPTIONS
from raycore.options.declared import Option, option, options_of
from raycore.server.listen_options import LISTEN_OPTIONS
from raycore.server.options import SERVER_OPTIONS

SOURCES = sorted(Path(raycore.__file__).parent.rglob("*.py"))
CHOSEN = "chosen"
"""`resolve` has the options that the user gave in a dict of this name."""


def reads(path: Path) -> Iterator[str]:
    """The names of all attributes that a file reads, and of options that it looks up among the chosen ones."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{CHOSEN}.get":
            yield ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ""
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == CHOSEN:
            yield ast.literal_eval(node.slice) if isinstance(node.slice, ast.Constant) else ""


def unread(options: Iterable[Option]) -> set[str]:
    read = {name for path in SOURCES for name in reads(path)}
    return {each.name for each in options if each.field not in read}


def test_every_option_is_read() -> None:
    assert unread([*ENGINE_OPTIONS.values(), *SERVER_OPTIONS.values(), *LISTEN_OPTIONS.values()]) == set()


def test_the_check_finds_an_option_that_nothing_reads() -> None:
    class Part(msgspec.Struct):
        num_wheels_of_the_wagon: Annotated[int, option("Wheels.")] = 4
        block_size: Annotated[int, option("Tokens in a block.")] = 16

    assert unread(options_of(Part, "")) == {"num_wheels_of_the_wagon"}
