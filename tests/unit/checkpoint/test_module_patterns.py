"""Patterns of modules' names match what PEFT matches, and never take long."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycore.checkpoint.module_patterns import InvalidPattern, ModuleValues

NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 11, 21)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
]
PIECES = ["q_proj", "self_attn", "model", "layers", "1", "0", "k", "_", r"\.", ".", ".*", r"\d", "[0-9]", "[^.]"]
PIECES += ["(", "(?:", "|", ")", "*", "+", "?", "??", "{1,2}", "{2}", "{0,}", "^", "$"]


def is_match(pattern: str, name: str) -> bool:
    return ModuleValues({pattern: True}, False).of(name)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("q_proj", ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
        ("model.layers.0.self_attn.q_proj", ["model.layers.0.self_attn.q_proj"]),
        ("0.self_attn.q_proj", ["model.layers.0.self_attn.q_proj"]),
        ("proj", []),
        ("model.layers.0", []),
        ("q.proj", ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
        (r"^model\.layers\.(0|7)\..*", [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.up_proj")]),
        (r"layers\.[1-9]\d*\.mlp\.(up|down)_proj", ["model.layers.1.mlp.up_proj"]),
        ("^layers.*", []),
        ("", []),
    ],
)
def test_a_pattern_matches_the_end_of_a_name_from_a_dot_on(pattern: str, matched: list[str]) -> None:
    names = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")]
    assert [name for name in names if is_match(pattern, name)] == matched


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.sampled_from(NAMES))
def test_accepted_patterns_match_as_in_pythons_re(pattern: str, name: str) -> None:
    try:
        found = is_match(pattern, name)
    except InvalidPattern:
        return
    assert found == bool(re.match(rf"(.*\.)?({pattern})$", name))


def test_the_first_matching_pattern_gives_a_modules_value() -> None:
    values = ModuleValues({r"layers\.1\..*": 1, "q_proj": 2, "model.layers.1.self_attn.q_proj": 3}, 0)
    assert values.of("model.layers.1.self_attn.q_proj") == 1
    assert values.of("model.layers.0.self_attn.q_proj") == 2
    assert values.of("model.layers.0.self_attn.k_proj") == 0


@pytest.mark.parametrize(
    "pattern",
    ["(?=q)", "(?i)q", r"(q)\1", "(q+)+", "(q", "q)", "[q", "[z-a]", "*", "q**", "q{3,2}", "\\", r"\bq", "(" * 1000],
)
def test_unsupported_pattern_syntax_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern, match="a regular expression of"):
        ModuleValues({pattern: 1}, 0)


def test_too_many_or_too_long_patterns_are_refused() -> None:
    with pytest.raises(InvalidPattern, match="at most 1024 patterns"):
        ModuleValues({f"p{number}": 1 for number in range(1025)}, 0)
    with pytest.raises(InvalidPattern, match="at most 1024 characters together"):
        ModuleValues({f"p{number}.*": 1 for number in range(300)}, 0)


@pytest.mark.parametrize("pattern", [".*" * 500 + "!", "(.|.)" * 200 + "!", "(.*|.*|.*)?" * 90 + "!", "(a?){9}"])
def test_no_pattern_takes_long_to_match(pattern: str) -> None:
    start = time.thread_time()  # of this thread only, because other processes need the cores, too
    with suppress(InvalidPattern):
        assert not is_match(pattern, NAMES[-1])
    assert time.thread_time() - start < 0.5
