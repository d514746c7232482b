"""Scripts for vLLM with imports of raycore."""

from __future__ import annotations

import ast
from importlib import import_module

import pytest
import vllm_scripts

from raycore.compat import run
from raycore.compat.rewriting import rewritten
from raycore.errors import InvalidInput

BEFORE = '''\
"""A script — with a title."""
import os, vllm.envs
import vllm
from vllm import (LLM,
                  SamplingParams as Params)
from vllm import envs
from vllm.lora.request import LoRARequest
from numpy import array  # vllm

backends = ["vllm", "hf"]
subprocess.run(["vllm", "serve", "model"])
subprocess.run(["vllm", *flags])
command = ("-m", "vllm.entrypoints.openai.api_server")
if True:
    from vllm.config import KVTransferConfig, PoolerConfig; x = "é"
'''
AFTER = '''\
"""A script — with a title."""
import os, raycore.compat.vllm as vllm, raycore.compat.vllm.envs
import raycore.compat.vllm as vllm
from raycore import LLM
from raycore import SamplingParams as Params
from raycore.compat import environment as envs
from raycore import LoRARequest
from numpy import array  # vllm

backends = ["vllm", "hf"]
subprocess.run(["raycore", "serve", "model"])
subprocess.run(["raycore", *flags])
command = ("-m", "raycore.compat.vllm.entrypoints.openai.api_server")
if True:
    from raycore.compat.settings import KVTransferConfig
    from raycore import PoolerConfig; x = "é"
'''


def test_imports_and_commands_become_raycores():
    assert rewritten(BEFORE) == AFTER


def test_a_script_that_needs_what_raycore_lacks_is_an_error(tmp_path, capsys):
    with pytest.raises(InvalidInput, match=r"raycore has no vllm\.sampling_params\.GuidedDecodingParams: removed by"):
        rewritten("from vllm.sampling_params import GuidedDecodingParams")
    script = tmp_path / "script.py"
    script.write_text("from vllm import initialize_ray_cluster")
    assert run.main(["--rewrite", str(script)]) == 1
    assert f"{script}: raycore has no vllm.initialize_ray_cluster: an engine joins" in capsys.readouterr().err
    script.write_text("from vllm import LLM\n")
    assert run.main(["--rewrite", str(script)]) == 0
    assert capsys.readouterr().out == "from raycore import LLM\n"


@pytest.mark.parametrize("name", vllm_scripts.names())
def test_what_a_script_imports_is_there_in_both_forms(name):
    text = (vllm_scripts.SCRIPTS / f"{name}.py").read_text()
    changed = rewritten(text)
    assert "from vllm" not in changed
    for source in (text, changed):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("vllm", "raycore"):
                module = import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names)
