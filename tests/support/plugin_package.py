"""Writes a package with plugins of every kind, as pip would install it, to a directory for PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

ENTRY_POINTS = """\
[raycore.general_plugins]
marks = wagon.general:mark
[raycore.model_plugins]
WagonForCausalLM = wagon.model:ARCHITECTURE
[raycore.worker_plugins]
wagon = wagon.worker:WagonWorker
[raycore.scheduler_plugins]
wagon = wagon.scheduler:WagonScheduler
[raycore.tool_parser_plugins]
wagon = wagon.parsers:WagonToolParser
[raycore.reasoning_parser_plugins]
wagon = wagon.parsers:WagonReasoningParser
"""

MODULES = {
    "general": """\
import os, pathlib

def mark():
    with open(pathlib.Path(__file__).parent / f"{os.getpid()}.mark", "a") as file:
        file.write("called\\n")
""",
    "model": """\
from raycore.checkpoint.architectures import Architecture

def convert(config):
    return config | {"num_hidden_layers": config["wagon_layers"], "hidden_size": config["wagon_width"]}

ARCHITECTURE = Architecture(convert_config=convert, decoder="wagon.decoder.WagonDecoder")
""",
    "decoder": """\
from raycore.model.decoder import Decoder

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
        return type(self._decoder).__name__, self._decoder.num_steps
""",
    "scheduler": """\
from raycore.scheduler.scheduler import Scheduler

class WagonScheduler(Scheduler):
    def load(self):
        return super().load()
""",
    "parsers": """\
from raycore.server.parsers.reasoning import ReasoningParser
from raycore.server.parsers.tool_calls.json_calls import HermesParser

class WagonReasoningParser(ReasoningParser):
    opening, closing = "<wagon>", "</wagon>"

class WagonToolParser(HermesParser):
    pass
""",
}


def install(directory: Path, entry_points: str = ENTRY_POINTS, **modules: str) -> Path:
    """Install the package `wagon` with these entry points. `modules` replace or add modules. Returns `directory`."""
    package, info = directory / "wagon", directory / "wagon-1.0.dist-info"
    for folder in (package, info):
        folder.mkdir(parents=True)
    for name, text in {"__init__": "", **MODULES, **modules}.items():
        (package / f"{name}.py").write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wagon\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    return directory


def marks(directory: Path) -> dict[int, int]:
    """How often each process has called the general plugin of the package in `directory`, by pid."""
    return {int(path.stem): len(path.read_text().splitlines()) for path in (directory / "wagon").glob("*.mark")}
