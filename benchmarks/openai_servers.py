"""OpenAI-compatible servers of the bundled model: raycore's, in this process, and vLLM's.

The model generates, or its hidden states are embeddings, or the logits of two of its tokens make a score.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from common import PEER_ENVIRONMENT
from openai_scenarios import Api
from openai_scenarios.table import EMBEDS, GENERATES, SCORES

from raycore import AsyncLLM
from raycore.demo import demo_model_path
from raycore.server import ServerOptions, build_app
from raycore.server.process.listening import listen
from raycore.server.process.serving import HttpServer

NAME = "demo"
KEY = "key-of-the-benchmark"
MAX_MODEL_LEN = 1000
STOP_TIMEOUT_S = 30.0
LOOK_S = 0.5

MODELS: dict[str, dict[str, Any]] = {
    GENERATES: {},
    EMBEDS: {"runner": "pooling", "hf_overrides": {"is_matryoshka": True}},
    SCORES: {
        "runner": "pooling",
        "hf_overrides": {
            "architectures": ["LlamaForSequenceClassification"],
            "classifier_from_token": ["a", "b"],
            "method": "from_2_way_softmax",
        },
    },
}
"""What the model does, and the engine's options for that, which are vLLM's, too."""
TOOL_FLAGS: dict[str, Any] = {"enable_auto_tool_choice": None, "tool_call_parser": "hermes"}
"""What vLLM needs to be told before it takes tools. raycore finds it out."""
PEER_FLAGS: dict[str, dict[str, Any]] = {
    # otherwise the bundled model fills the JSON that a constraint demands with white space
    GENERATES: TOOL_FLAGS | {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
}
"""Further options of vLLM, by what the model does."""

_PEER_ENVIRONMENT = PEER_ENVIRONMENT | {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # otherwise it stores no responses
}


@contextmanager
def raycore_server(engine: AsyncLLM) -> Iterator[Api]:
    """raycore's server of `engine`, on a free port."""
    app = build_app(engine, ServerOptions((NAME,), api_keys=(KEY,), enable_admin_endpoints=True))
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(app, listener)
        server.start()
        api = Api(f"http://127.0.0.1:{listener.getsockname()[1]}", NAME, KEY, lambda: engine.num_unfinished_requests)
        try:
            yield api
        finally:
            api.close()
            server.stop()


@contextmanager
def vllm_server(
    python: str,
    start_timeout_s: float,
    of: str = GENERATES,
    model: str | None = None,
    options: dict[str, Any] | None = None,
) -> Iterator[Api]:
    """vLLM's server, run by the interpreter `python`. Raises RuntimeError with its log if it doesn't start.

    Args:
        of: one of `MODELS`.
        model: a checkpoint instead of the bundled one.
        options: further options. None: an option without a value.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {
        "--model": model or demo_model_path(),
        "--served-model-name": NAME,
        "--dtype": "float32",
        "--max-model-len": MAX_MODEL_LEN,
        "--port": port,
        "--host": "127.0.0.1",
        "--api-key": KEY,
        **{f"--{name.replace('_', '-')}": _as_text(value) for name, value in (MODELS[of] | (options or {})).items()},
    }
    arguments = [str(part) for option in flags.items() for part in option if part is not None]
    root = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [python, "-m", "vllm.entrypoints.openai.api_server", *arguments],
                env={**os.environ, **_PEER_ENVIRONMENT},
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait_until_healthy(root, process, log, start_timeout_s)
            api = Api(root, NAME, KEY, lambda: _num_in_vllm(root))
            try:
                yield api
            finally:
                api.close()
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _as_text(value: Any) -> str | None:
    return value if isinstance(value, str) or value is None else json.dumps(value)


def _wait_until_healthy(root: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(f"{root}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(LOOK_S)
    raise RuntimeError(f"vLLM's server didn't start within {timeout_s:g} s; its log ends:\n{log.read_text()[-3000:]}")


def _num_in_vllm(root: str) -> int:
    """Running and waiting requests, from the server's metrics."""
    metrics = httpx.get(f"{root}/metrics").text
    counts = re.findall(r"^vllm:num_requests_(?:running|waiting){[^}]*} (\S+)", metrics, re.MULTILINE)
    return int(sum(map(float, counts)))
