"""Nobody but mixers asks of which kind a mixer is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4] / "raycore"
MIXERS = re.compile(r"models/mixers/")
"""Where mixers are declared. What computes them is made for one kind, and needs not ask either."""
KINDS = re.compile(
    r"(Attention|Latent)(Heads|Weights|Mixer)|(Delta|Kda|Mamba2|ShortConv)(Spec|Weights|Mixer|Layer)|StateSpec|StateMixer"
)
"""Their classes, and those of their weights."""


def questions(path: Path) -> list[str]:
    """Where a file asks a model or an object for its kind of mixer."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Call, ast.MatchClass)) else ""
        asks_model = isinstance(node, ast.Attribute) and re.fullmatch(r"(.*\.)?(spec|model)\.(latent|state)", text)
        asks_class = text.startswith(("isinstance(", "issubclass(")) and KINDS.search(text.partition(",")[2])
        if asks_model or asks_class or (isinstance(node, ast.MatchClass) and KINDS.search(text)):
            found.append(f"{path.name}:{getattr(node, 'lineno', 0)}: {text}")
    return found


def test_nobody_else_asks_for_the_kind_of_a_mixer() -> None:
    files = [path for path in ROOT.rglob("*.py") if not MIXERS.match(path.relative_to(ROOT).as_posix())]
    assert [each for path in sorted(files) for each in questions(path)] == []


@pytest.mark.parametrize(
    "question",
    [
        "if spec.latent is None: ...",
        "x = config.model.spec.state.layers",
        "isinstance(layer.mixer, AttentionWeights | LatentWeights)",
        "isinstance(own, DeltaSpec)",
        "match mixer:\n    case Mamba2Spec(): ...",
    ],
)
def test_a_question_is_found(question: str, tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(question)
    assert questions(tmp_path / "asking.py") != []
