"""Settings of config.json, turned one after the other in the small checkpoint of their family.

Each changes the tokens, so the comparisons with transformers would fail if raycore didn't read it. What it then
generates is what transformers' model predicts, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from equality import generate
from families import FAMILIES, make_checkpoint, predicted, prompts

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.worker.rank import RankIdentity

PROMPTS = prompts()[3:5]


def tokens(path: Path) -> list[list[int]]:
    config = resolve(path, dtype="float32", num_threads=1, max_num_seqs=8)
    executor = InlineExecutor(config, RankIdentity(0, 1))
    found = generate(EngineCore(config, executor), PROMPTS)
    executor.shutdown()
    return found


def turn(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a switch of a toy, as `Toy.switches` has it."""
    for each, own in zip(key.split(", "), value, strict=True) if ", " in key else [(key, value)]:
        fields = config
        *outer, last = each.split(".")
        for name in outer:
            fields = fields[name]
        assert fields.get(last) != own, f"{each} is {own} already"
        fields[last] = own


@pytest.mark.parametrize("family", [family for family, toy in FAMILIES.items() if toy.switches])
def test_every_switch_changes_the_tokens_as_in_transformers(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    config_file = path / "config.json"
    config, unturned = config_file.read_text(), tokens(path)
    unnoticed, different = list[str](), list[str]()
    for key, value in FAMILIES[family].switches.items():
        fields = json.loads(config)
        turn(fields, key, value)
        config_file.write_text(json.dumps(fields))
        found = tokens(path)
        if found == unturned:
            unnoticed.append(key)
        if predicted(path, PROMPTS, found) != found:
            different.append(key)
    assert (unnoticed, different) == ([], [])
