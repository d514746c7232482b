"""A class has a name of its own, so that a name says which class is meant wherever it stands."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]

OTHERS = re.compile(
    r"raycore/compat/"  # vLLM's names
    r"|raycore/server/(.+/)?(protocol|response_models)\.py"  # bodies, named as in OpenAI's and others' descriptions
)
"""Files whose classes are named by others."""


def test_public_names_of_classes_are_unique():
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "raycore").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not OTHERS.match(name):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
