"""The example of reinforcement learning goes on when a rank is killed, and gives the same rewards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
TIMEOUT_S = 200.0


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_rewards_are_the_same_with_and_without_a_killed_rank(address: str, tmp_path: Path) -> None:
    ways = {"undisturbed": [], "killed": ["--kill-rank-at", "1"]}
    programs = {
        name: subprocess.Popen(
            [sys.executable, str(EXAMPLE), "--steps", "3", "--plot", str(tmp_path / f"{name}.png"), *options],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RAY_ADDRESS": address},
        )
        for name, options in ways.items()
    }
    try:
        printed = {name: program.communicate(timeout=TIMEOUT_S)[0] for name, program in programs.items()}
    finally:
        for program in programs.values():
            program.kill()
    assert [program.returncode for program in programs.values()] == [0, 0], printed
    last = {name: re.search(r"step 2: reward [\d.]+, \d+% right", text) for name, text in printed.items()}
    assert all(last.values()), printed
    assert len({found[0] for found in last.values() if found}) == 1
    assert "\n0 ranks were replaced" in printed["undisturbed"]
    assert "\n1 ranks were replaced" in printed["killed"]
    assert all("plot: " in text or "   0 0.0" in text for text in printed.values()), "a picture, or text"
