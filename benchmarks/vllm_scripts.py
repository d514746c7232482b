"""Runs the scripts for vLLM in tests/compat_scripts: on raycore as vllm, with imports of raycore, and with vLLM.

Each script runs in a fresh process, and checks what it gets. The exit status is 1 if one fails on raycore.

    python benchmarks/vllm_scripts.py [--only NAME ...] [--peer-python PEER/bin/python]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import PEER_ENVIRONMENT, table
from safetensors.numpy import save_file

from raycore.compat.rewriting import rewritten
from raycore.demo import demo_model_path
from raycore.errors import InvalidInput

SCRIPTS = Path(__file__).parents[1] / "tests" / "compat_scripts"
HELPERS = {"servers"}
"""What scripts import, and is no script itself."""
NOT_ON_THE_PEER = {
    "bench_latency": "its prompts have token ids up to 9999, and the bundled model has 320 tokens",
    "server_reasoning": "the parser wants its tags in the vocabulary, and the bundled model's tokenizer has none",
    "sleep": "sleep mode isn't supported on CPUs there",
    "lora": "in one batch, two adapters have the same output there, although alone they don't",
}
"""Scripts that the peer's build for CPUs can't run, with the reasons, which the table shows."""
AS_VLLM, CHANGED, PEER = "as vllm", "changed import", "vLLM"


class Outcome(NamedTuple):
    """How a run ended."""

    problem: str | None
    """The end of what it printed; None if it succeeded."""
    seconds: float

    def __str__(self) -> str:
        return f"{'ok' if self.problem is None else 'failed'} {self.seconds:.1f} s"


def names() -> list[str]:
    """The scripts' names."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in HELPERS)


def main() -> int:
    """Run the scripts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names(), metavar="NAME", help="these scripts alone")
    parser.add_argument("--peer-python", metavar="PATH", help="the interpreter that has vLLM")
    parser.add_argument("--without", nargs="+", default=[], choices=(AS_VLLM, CHANGED), metavar="FORM")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for each run")
    args = parser.parse_args()
    forms = [form for form in (AS_VLLM, CHANGED) if form not in args.without]
    rows: list[list[str]] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = files(Path(folder))
        for name in args.only or names():
            found: dict[str, Outcome | str] = {}
            for form in forms:
                found[form] = outcome = run(name, form, environment, Path(folder), args.timeout_s)
                problems += [] if outcome.problem is None else [f"{name}, {form}:\n{outcome.problem}"]
            if args.peer_python is not None and name in NOT_ON_THE_PEER:
                found[PEER] = f"not run: {NOT_ON_THE_PEER[name]}"
            elif args.peer_python is not None:
                peer = run(name, PEER, environment, Path(folder), args.timeout_s, args.peer_python)
                found[PEER] = peer
                if peer.problem is not None:
                    print(f"{name}, {PEER}:\n{peer.problem}\n", file=sys.stderr)
            rows.append([name, *map(str, found.values())])
            print(*rows[-1], file=sys.stderr, flush=True)
    print(table([["script", *forms, *([PEER] if args.peer_python else [])], *rows]))
    print("\n\n".join(problems))
    return 1 if problems else 0


def files(folder: Path) -> dict[str, str]:
    """Write what the scripts need. Returns the variables that say where it is."""
    for seed in (1, 2):
        write_adapter(folder / f"adapter_{seed}", seed)
    adapters = {f"ADAPTER_{seed}": str(folder / f"adapter_{seed}") for seed in (1, 2)}
    return {"MODEL": demo_model_path(), **adapters}


def write_adapter(path: Path, seed: int, rank: int = 4) -> None:
    """A LoRA adapter for the bundled model, with random weights, as PEFT writes it."""
    spec = json.loads((Path(demo_model_path()) / "config.json").read_text())
    size = spec["hidden_size"]
    random = np.random.default_rng(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{side}.weight": random.normal(
            0, 0.2, (rank, size) if side == "A" else (size, rank)
        ).astype(np.float32)
        for layer in range(spec["num_hidden_layers"])
        for module in ("q_proj", "v_proj")
        for side in "AB"
    }
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": None,
    }
    (path / "adapter_config.json").write_text(json.dumps(config))


def run(
    name: str, form: str, environment: Mapping[str, str], folder: Path, timeout_s: float, peer_python: str = ""
) -> Outcome:
    """Run a script in one of its forms. `folder`: for files of the run."""
    begin_s = time.monotonic()
    try:
        command = _command(name, form, folder, peer_python)
    except InvalidInput as error:
        return Outcome(str(error), 0.0)
    python = peer_python or sys.executable
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    variables = {**os.environ, **environment, "PATH": path, **(PEER_ENVIRONMENT if form == PEER else {})}
    problem = _problem(command, variables, timeout_s)
    return Outcome(problem, time.monotonic() - begin_s)


def _command(name: str, form: str, folder: Path, peer_python: str) -> list[str]:
    if form == PEER:
        return [peer_python, str(SCRIPTS / f"{name}.py")]
    if form == AS_VLLM:
        return [sys.executable, "-m", "raycore.compat.vllm", str(SCRIPTS / f"{name}.py")]
    changed = folder / "changed"
    changed.mkdir(exist_ok=True)
    for each in (name, *HELPERS):
        text = (SCRIPTS / f"{each}.py").read_text(encoding="utf-8")
        (changed / f"{each}.py").write_text(rewritten(text), encoding="utf-8")
    return [sys.executable, str(changed / f"{name}.py")]


def _problem(command: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> str | None:
    """Run a command with all that it starts. Returns the end of its output if it fails or takes too long."""
    with tempfile.TemporaryFile() as sink:
        process = subprocess.Popen(command, env=variables, stdout=sink, stderr=sink, start_new_session=True)
        try:
            status: int | str = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = f"none after {timeout_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        sink.seek(0)
        output = sink.read().decode(errors="replace")
    return None if status == 0 else f"status {status}\n{output[-1500:]}"


if __name__ == "__main__":
    sys.exit(main())
