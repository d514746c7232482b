"""Nobody but mixers asks of which kind a mixer is, and nobody but feed-forward parts of which kind such a part is."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3] / "raycore"


class Part(NamedTuple):
    """A part of a layer, of which there are several kinds."""

    home: re.Pattern[str]
    """Where kinds are declared. What computes them is made for one kind, and needs not ask either."""
    fields: str
    """Those of a model's spec that only such places read."""
    kinds: re.Pattern[str]
    """Their classes, and those of their weights."""


PARTS = {
    "mixers": Part(
        re.compile(r"models/mixers/"),
        "latent|state",
        re.compile(
            r"(Attention|Latent)(Heads|Weights|Mixer)|(Beside|Delta|Kda|Lightning|Mamba[12]|ShortConv)(Spec|Weights|Mixer|Layer)"
            r"|StateSpec|StateMixer|NoMixer|NullMixer"
        ),
    ),
    "feed-forward parts": Part(
        re.compile(r"models/feed_forward\.py|parts/experts/"),
        "moe|dense",
        re.compile(r"(Dense|Scaled|Xielu|Sparse|No|Null)(Spec|FeedForward)|MoeSpec|(Mlp|Xielu|Moe)Weights"),
    ),
}


def questions(path: Path, part: Part) -> list[str]:
    """Where a file asks a model or an object for its kind of a part."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Call, ast.MatchClass)) else ""
        asks_model = isinstance(node, ast.Attribute) and re.fullmatch(rf"(.*\.)?(spec|model)\.({part.fields})", text)
        asks_class = text.startswith(("isinstance(", "issubclass(")) and part.kinds.search(text.partition(",")[2])
        if asks_model or asks_class or (isinstance(node, ast.MatchClass) and part.kinds.search(text)):
            found.append(f"{path.name}:{getattr(node, 'lineno', 0)}: {text}")
    return found


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_nobody_else_asks_for_the_kind_of_a_part(part: Part) -> None:
    files = [path for path in ROOT.rglob("*.py") if not part.home.match(path.relative_to(ROOT).as_posix())]
    assert [each for path in sorted(files) for each in questions(path, part)] == []


@pytest.mark.parametrize(
    ("part", "question"),
    [
        ("mixers", "if spec.latent is None: ..."),
        ("mixers", "x = config.model.spec.state.layers"),
        ("mixers", "isinstance(layer.mixer, AttentionWeights | LatentWeights)"),
        ("mixers", "isinstance(own, DeltaSpec)"),
        ("mixers", "match mixer:\n    case Mamba2Spec(): ..."),
        ("feed-forward parts", "if spec.moe is not None: ..."),
        ("feed-forward parts", "x = self.config.model.spec.moe.sparse_layers"),
        ("feed-forward parts", "isinstance(layer.feed_forward, MlpWeights)"),
        ("feed-forward parts", "isinstance(each, SparseFeedForward)"),
    ],
)
def test_a_question_is_found(part: str, question: str, tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(question)
    assert questions(tmp_path / "asking.py", PARTS[part]) != []
