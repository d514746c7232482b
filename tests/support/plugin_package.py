"""Writes a package with plugins of every kind, and installs it in a directory for PYTHONPATH."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ENTRY_POINTS = """\
[raycore.general_plugins]
marks = wagon.general:mark
[raycore.model_plugins]
WagonForCausalLM = wagon.model:WAGON
[raycore.worker_plugins]
wagon = wagon.worker:WagonWorker
[raycore.scheduler_plugins]
wagon = wagon.scheduler:WagonScheduler
[raycore.tool_parser_plugins]
wagon = wagon.parsers:WagonToolParser
[raycore.reasoning_parser_plugins]
wagon = wagon.parsers:WagonReasoningParser
[raycore.logits_processor_plugins]
wagon = wagon.processors:WagonProcessor
"""

MODULES = {
    "general": """\
import os, pathlib

def mark():
    with open(pathlib.Path(__file__).parent / f"{os.getpid()}.mark", "a") as file:
        file.write("called\\n")
""",
    "model": """\
from raycore.models.family import Family

def convert(config):
    return config | {"num_hidden_layers": config["wagon_layers"], "hidden_size": config["wagon_width"]}

WAGON = Family(convert_config=convert, decoder="wagon.decoder.WagonDecoder")
""",
    "decoder": """\
from raycore.decoder.decoder import Decoder

class WagonDecoder(Decoder):
    num_steps = 0

    def forward(self, *args, **kwargs):
        self.num_steps += 1
        return super().forward(*args, **kwargs)
""",
    "worker": """\
from raycore.worker.worker import Worker

class WagonWorker(Worker):
    def decoder_steps(self):
        return type(self._core.model.network).__name__, self._core.model.network.num_steps
""",
    "scheduler": """\
import os, pathlib

from raycore.scheduler.scheduler import Scheduler

class WagonScheduler(Scheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        (pathlib.Path(__file__).parent / f"{os.getpid()}.scheduler").touch()
""",
    "parsers": """\
from raycore.server.parsers.reasoning import ReasoningParser
from raycore.server.parsers.tool_calls.json_calls import HermesParser

class WagonReasoningParser(ReasoningParser):
    opening, closing = "<wagon>", "</wagon>"

class WagonToolParser(HermesParser):
    pass
""",
    "processors": """\
from raycore.sampling.logits_processors import AdapterLogitsProcessor

class WagonProcessor(AdapterLogitsProcessor):
    @classmethod
    def validate_params(cls, sampling_params):
        wheel = (sampling_params.extra_args or {}).get("wheel", 0)
        if not isinstance(wheel, int):
            raise ValueError(f"wheel={wheel!r} isn't a token id")

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        wheel = (params.extra_args or {}).get("wheel")

        def turn(output_ids, logits):
            logits[wheel + len(output_ids)] = 1000.0
            return logits

        return None if wheel is None else turn
""",
}


def install(directory: Path, entry_points: str = ENTRY_POINTS, **modules: str) -> Path:
    """Install the package `wagon` with these entry points, without pip. `modules` replace or add modules. Returns
    `directory`.
    """
    info = directory / "wagon-1.0.dist-info"
    info.mkdir(parents=True)
    _write(directory / "wagon", MODULES | modules)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wagon\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    return directory


def install_by_pip(
    directory: Path, name: str = "wagon", entry_points: str = ENTRY_POINTS, modules: Mapping[str, str] = MODULES
) -> Path:
    """Have pip build a package from its pyproject.toml, and install it. Returns `directory`."""
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder, name), modules)
        Path(folder, "pyproject.toml").write_text(_pyproject(name, entry_points))
        flags = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(directory)]
        subprocess.run([sys.executable, "-m", "pip", "install", *flags, folder], check=True, timeout=60)
    return directory


def marks(directory: Path) -> dict[int, int]:
    """How often each process has called the general plugin of the package in `directory`, by pid."""
    return {int(path.stem): len(path.read_text().splitlines()) for path in (directory / "wagon").glob("*.mark")}


def scheduler_pids(directory: Path) -> list[int]:
    """The processes that have made the scheduler of the package in `directory`."""
    return [int(path.stem) for path in (directory / "wagon").glob("*.scheduler")]


def _write(package: Path, modules: Mapping[str, str]) -> None:
    package.mkdir()
    for name, text in {"__init__": "", **modules}.items():
        (package / f"{name}.py").write_text(text)


def _pyproject(package: str, entry_points: str) -> str:
    lines = ["[build-system]", 'requires = ["setuptools"]', 'build-backend = "setuptools.build_meta"']
    lines += ["[project]", f'name = "{package}"', 'version = "1.0"']
    for line in entry_points.splitlines():
        name, _, path = line.partition(" = ")
        lines.append(f'{name} = "{path}"' if path else f'[project.entry-points."{line.strip("[]")}"]')
    return "\n".join(lines)
