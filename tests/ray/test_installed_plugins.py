"""Plugins of an installed package, of every kind, through an engine with worker processes and a server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from asgi_client import Client
from number_formats import DTYPE
from plugin_package import install_by_pip, marks, scheduler_pids
from tool_templates import HERMES

from raycore import AsyncLLM, InvalidConfig, plugins
from raycore.demo import demo_model_path
from raycore.server import build_app
from raycore.server.options import server_options

OPTIONS: dict[str, Any] = {"num_threads": 1, "dtype": DTYPE, "standby_delay_s": None}
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def site(ray_cluster, site_directory: Path, monkeypatch: pytest.MonkeyPatch):
    """The directory of the installed package, which is removed after the test."""
    monkeypatch.setattr(plugins, "_process", plugins._Process([], set(), {}, set()))
    plugins._entry_points_on.cache_clear()  # other tests install other packages there
    monkeypatch.syspath_prepend(install_by_pip(site_directory))
    yield site_directory
    for path in site_directory.iterdir():
        shutil.rmtree(path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "wagon"]:
        del sys.modules[name]


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """The bundled model, as one of the plugin's architecture."""
    path = tmp_path / "model"
    shutil.copytree(demo_model_path(), path)
    config = json.loads((path / "config.json").read_text())
    config |= {"wagon_layers": config.pop("num_hidden_layers"), "wagon_width": config.pop("hidden_size")}
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["WagonForCausalLM"]}))
    return str(path)


def test_an_engine_uses_plugins_of_every_kind(site: Path, checkpoint: str):
    options = {"tensor_parallel_size": 2, "worker_cls": "wagon", "scheduler_cls": "wagon", **OPTIONS}
    engine = AsyncLLM(checkpoint, **options)

    def server(**options: str) -> Client:
        return Client(build_app(engine, server_options("m", options)))

    try:
        served = server(tool_call_parser="wagon", chat_template=HERMES)
        answer = served.complete(temperature=0, max_tokens=8)
        assert answer.json["choices"][0]["text"] == " 85"
        steps = asyncio.run(engine.collective_rpc("decoder_steps"))
        assert [name for name, _ in steps] == ["WagonDecoder"] * 2
        assert all(num_steps > 1 for _, num_steps in steps)
        (info,) = engine.engine_infos
        assert scheduler_pids(site) == [info.pid]
        assert marks(site) == dict.fromkeys([os.getpid(), info.pid, *info.worker_pids], 1)
        asked = [{"role": "user", "content": "What time is it?"}]
        (choice,) = served.chat(messages=asked, tools=TOOLS, tool_choice="required", max_tokens=200).json["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_time"]
        asked = [{"role": "user", "content": "What is 27 + 58?"}]
        (choice,) = server(reasoning_parser="wagon").chat(messages=asked, temperature=0, max_tokens=8).json["choices"]
        assert "85" in choice["message"]["reasoning"]  # which never ends, because the model doesn't know the tag
        assert not choice["message"]["content"]
        turned = served.complete(max_tokens=3, n=2, vllm_xargs={"wheel": 30}, return_token_ids=True, ignore_eos=True)
        assert [choice["token_ids"] for choice in turned.json["choices"]] == [[30, 31, 32]] * 2
        refused = served.complete(vllm_xargs={"wheel": "round"})
        assert (refused.status, "wheel='round' isn't a token id" in refused.json["error"]["message"]) == (400, True)
    finally:
        engine.shutdown()


def test_a_plugin_that_fails_in_a_worker_stops_the_start(site: Path):
    (site / "wagon" / "general.py").write_text(
        f"import os\ndef mark():\n    if os.getpid() != {os.getpid()}: raise OSError('no wheel')\n"
    )
    with pytest.raises(InvalidConfig, match=r"plugin 'marks' of raycore.general_plugins failed: OSError: no wheel"):
        AsyncLLM(demo_model_path(), **OPTIONS)
