"""Scripts for vLLM run on raycore, as `vllm` and with imports of raycore. A benchmark runs all of them."""

from __future__ import annotations

import asyncio
import gc
import inspect
import runpy

import pytest
import vllm_scripts

import raycore.compat.vllm  # noqa: F401  # from here on, `vllm` is raycore's
from raycore.compat.rewriting import rewritten

AS_VLLM, CHANGED = "as vllm", "changed"


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    return vllm_scripts.files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, AS_VLLM) for name in ("stop", "async_deltas", "lora", "sleep", "weight_update")),
        *((name, AS_VLLM) for name in ("structured_outputs", "embed", "flat_logprobs", "prompt_embeds")),
        *((name, AS_VLLM) for name in ("sharded_state", "server_in_python", "stat_loggers", "streaming_input")),
        *((name, AS_VLLM) for name in ("trace_replay",)),
        *((name, CHANGED) for name in ("engine_args", "prefix_caching", "classify", "token_ids", "async_engine")),
    ],
)
def test_a_script_gets_what_it_expects(ray_cluster, variables, monkeypatch, tmp_path, name, form):
    path = vllm_scripts.SCRIPTS / f"{name}.py"
    if form == CHANGED:
        path = tmp_path / path.name
        path.write_text(rewritten((vllm_scripts.SCRIPTS / path.name).read_text()))
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    main = runpy.run_path(str(path))["main"]
    if inspect.iscoroutinefunction(main):
        asyncio.run(main())
    else:
        main()
    gc.collect()  # ends the engine, which a script leaves to the end of its process
