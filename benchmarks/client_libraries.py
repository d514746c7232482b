"""Runs what client libraries do with a server against raycore, and vLLM, and prints a table.

The libraries are openai, anthropic, litellm, langchain-openai, instructor, dspy, outlines and lm-eval. They are in an
environment of their own. There are four models: one whose chat template renders tools as Hermes' does, one whose
template ignores tools, CHECKPOINT as it is, and one of embeddings. The first has CHECKPOINT's weights, and the second
and the last have the bundled model's. With `--peer-python`, vLLM's benchmark client is a library, too. With
`--with-peer`, the cases are also run against vLLM's server, which takes a minute or more to start for each model. The
exit status is 1 if a case fails with raycore.

    python -m venv LIBRARIES
    LIBRARIES/bin/pip install openai anthropic litellm langchain-openai instructor dspy outlines
    LIBRARIES/bin/pip install "lm-eval[api]" transformers
    python benchmarks/client_libraries.py CHECKPOINT --libraries-python LIBRARIES/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from client_cases.cases import CHAT, EMBEDS, MARK, PLAIN, TOOLS
from common import PEER_ENVIRONMENT, table
from openai_scenarios import Api
from openai_servers import KEY, TOOL_FLAGS, raycore_server, vllm_server

from raycore import AsyncLLM
from raycore.demo import demo_model_path

HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    '{% for call in message.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that renders tools and calls in the form of Hermes' models, as short as can be."""
COMPACT = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
"""Otherwise small models now and then fill JSON with white space until they have no tokens left."""
OPTIONS = {
    TOOLS: {"max_model_len": 4000, **COMPACT},
    PLAIN: {"max_model_len": 1000, **COMPACT},
    CHAT: {"max_model_len": 4000, **COMPACT},
    EMBEDS: {"max_model_len": 1000, "runner": "pooling"},
}
"""The engine's options, by kind of model."""
BENCHES = {
    "completions": ["--backend", "openai", "--endpoint", "/v1/completions"],
    "chat": ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"],
}
"""Runs of vLLM's benchmark client."""
CASES_TIMEOUT_S = 1200.0

Row = tuple[str, str, str]
"""Library, case, kind of model."""


def main() -> int:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a small chat model")
    parser.add_argument("--libraries-python", required=True, metavar="PATH", help="the interpreter with the libraries")
    parser.add_argument("--peer-python", metavar="PATH", help="the interpreter with vLLM, for its benchmark client")
    parser.add_argument("--with-peer", action="store_true", help="run vLLM's server, too")
    parser.add_argument("--kinds", nargs="+", choices=OPTIONS, default=[*OPTIONS], help="kinds of models, default: all")
    parser.add_argument("--start-timeout-s", type=float, default=600.0, help="for vLLM's server")
    args = parser.parse_args()
    if args.with_peer and not args.peer_python:
        parser.error("--with-peer needs --peer-python")
    ours: dict[Row, str] = {}
    theirs: dict[Row, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds:
            model = prepared(kind, args.checkpoint, Path(folder))
            ours |= ask_raycore(kind, model, args.libraries_python, args.peer_python)
            if args.with_peer:
                options = OPTIONS[kind] | (TOOL_FLAGS if kind != EMBEDS else {})
                with vllm_server(args.peer_python, args.start_timeout_s, model=model, options=options) as api:
                    theirs |= results(kind, api, model, args.libraries_python, args.peer_python)
    return shown(ours, theirs)


def prepared(kind: str, checkpoint: str, folder: Path) -> str:
    """The directory of a kind of model."""
    if kind == CHAT:
        return checkpoint
    if kind != TOOLS:
        return demo_model_path()
    copy = folder / "hermes"
    shutil.copytree(checkpoint, copy)
    settings = copy / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": HERMES}))
    return str(copy)


def ask_raycore(kind: str, model: str, libraries: str, peer: str | None) -> dict[Row, str]:
    """The results of the cases for a kind of model, with raycore."""
    engine = AsyncLLM(model, dtype="float32", **OPTIONS[kind])
    try:
        with raycore_server(engine) as api:
            return results(kind, api, model, libraries, peer)
    finally:
        engine.shutdown()


def results(kind: str, api: Api, model: str, libraries: str, peer: str | None) -> dict[Row, str]:
    """The results of the cases for a kind of model, with a running server."""
    arguments = ["-m", "client_cases", kind, api.root, api.model, KEY, model]
    output = run([libraries, *arguments])
    found: dict[Row, str] = {}
    for line in output.splitlines():
        if line.startswith(MARK):
            library, name, result, _ = json.loads(line.removeprefix(MARK))
            found[library, name, kind] = result
    if not found:
        found["all", "start", kind] = f"the cases didn't run: {output[-300:]!r}"
    if peer is not None and kind == CHAT:
        for name, flags in BENCHES.items():
            found["vllm bench serve", name, kind] = bench(api, model, peer, flags)
    return found


def bench(api: Api, model: str, peer: str, flags: Sequence[str]) -> str:
    """The result of a run of vLLM's benchmark client."""
    command = [peer, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url", api.root, *flags]
    command += ["--model", api.model, "--tokenizer", model, "--dataset-name", "random", "--num-prompts", "4"]
    command += ["--random-input-len", "20", "--random-output-len", "8"]
    output = run(command, {**PEER_ENVIRONMENT, "OPENAI_API_KEY": KEY})
    lines = [line.split() for line in output.splitlines() if line.startswith("Successful requests:")]
    return "ok" if lines and lines[0][-1] == "4" else f"not all requests succeeded: {output[-300:]!r}"


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """What a command prints. If it takes too long, what it has printed until then."""
    folder = str(Path(__file__).parent)
    settings = {**os.environ, "PYTHONPATH": folder, **(environment or {})}
    try:
        done = subprocess.run(
            command,
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=CASES_TIMEOUT_S,
            check=False,
        )
        return done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace")


def shown(ours: dict[Row, str], theirs: dict[Row, str]) -> int:
    """Print the table. Returns the exit status."""
    rows: list[Sequence[object]] = [("library", "case", "model", "raycore", *(["vLLM"] if theirs else []))]
    for row, result in ours.items():
        cells = [_short(each) for each in (result, *([theirs.get(row, "-")] if theirs else []))]
        rows.append((*row, *cells))
    print(table(rows))
    for row, result in ours.items():
        if result != "ok":
            print(f"\n{', '.join(row)}: {result}")
    for name, found in (("raycore", ours), ("vLLM", theirs)):
        if found:
            print(f"\n{name}: {sum(each == 'ok' for each in found.values())} of {len(found)} cases")
    return int(any(not each.startswith(("ok", "missing")) for each in ours.values()))


def _short(result: str) -> str:
    return result.partition(":")[0]


if __name__ == "__main__":
    raise SystemExit(main())
