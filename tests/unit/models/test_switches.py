"""Settings of config.json, turned one after the other: each changes the tokens of the small checkpoint of its family.

So the comparisons with transformers, whose tokens these are, would fail if raycore read one of them wrongly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from equality import generate
from families import FAMILIES, make_checkpoint, prompts

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
    """Set a key, which may be of an object in another one: `outer.inner`."""
    *outer, last = key.split(".")
    for each in outer:
        config = config[each]
    assert config.get(last) != value, f"{key} is {value} already"
    config[last] = value


@pytest.mark.parametrize("family", [family for family, toy in FAMILIES.items() if toy.switches])
def test_every_switch_changes_the_tokens(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    config_file = path / "config.json"
    config, expected = config_file.read_text(), tokens(path)
    unnoticed: list[str] = []
    for key, value in FAMILIES[family].switches.items():
        fields = json.loads(config)
        turn(fields, key, value)
        config_file.write_text(json.dumps(fields))
        if tokens(path) == expected:
            unnoticed.append(key)
    assert unnoticed == []
