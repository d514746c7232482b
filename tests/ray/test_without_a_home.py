"""A program whose user has no home directory, as in many containers."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os, subprocess, sys
from raycore import LLM
from raycore.demo import demo_model_path
from raycore.ray_api import cluster_address

with LLM(demo_model_path(), engine_name="homeless", use_tqdm_on_load=False) as llm:
    print(llm.generate("27 + 58 =", use_tqdm=False)[0].outputs[0].text.split()[0])
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        os.environ.pop(name, None)  # as in another shell of the same user
    status = [sys.executable, "-m", "raycore", "status", "--address", cluster_address()]
    print(subprocess.run(status, capture_output=True, text=True, timeout=60).stdout)
"""


def test_an_engine_starts_without_a_home_and_its_status_can_be_asked(tmp_path):
    (tmp_path / "home").write_text("not a folder")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path / "home" / "of nobody"), "RAY_ADDRESS": "local"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    first, *rest = ran.stdout.splitlines()
    assert first == "85"
    assert rest[0].startswith("engine homeless: 1 of 1 ranks serving"), ran.stderr
