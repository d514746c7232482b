"""Packages that extras bring: what raycore imports is declared, and each door names the extra that is missing."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from missing_packages import without_packages

from raycore.errors import InvalidConfig, InvalidRequest, MissingPackage
from raycore.extras import EXTRAS, missing_package, needing

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(
    (ROOT / "pyproject.toml").read_text()
)["project"]
OPTIONAL: dict[str, list[str]] = PROJECT["optional-dependencies"]

NOT_IMPORTED = {"notebook", "test", "dev"}
"""Extras for those who use or develop raycore. It imports nothing of them."""
WITH_TORCH = {"triton"}
"""torch's builds for GPUs bring it, and nothing else imports it."""
PEERS = {
    *("vllm", "litellm", "langchain_core", "langchain_openai", "instructor", "dspy", "outlines", "lm_eval"),
    *("fastembed", "hypothesis_jsonschema", "matplotlib"),
}
"""What benchmarks are compared with, and what examples do without: their pages say how to install it."""

OWN = {"simulation"}
"""What benchmarks take from this project's tests."""

ALL_MODULES = sorted({module for modules in EXTRAS.values() for module in modules})

DOORS = {
    "serve": ("", "serve", 'command("serve", "--port", "0")'),
    "run-batch": ("", "serve", 'command("run-batch", "-i", "in.jsonl", "-o", "out.jsonl")'),
    "traces": ("", "serve", 'command("serve", "--port", "0", "--otlp-traces-endpoint", "http://localhost:4317")'),
    "build_app": ("", "serve", "from raycore.server import build_app"),
    "build_openai_app": ("", "ray-serve", "from raycore.serve import build_openai_app"),
    "build_processor": (
        "ray[data]",
        "data",
        "from raycore.data import ProcessorConfig, build_processor; build_processor(ProcessorConfig(model_source='m'))",
    ),
    "images": (
        "pillow",
        "multimodal",
        "from raycore.parts.images.client.processor import ImageProcessor; ImageProcessor('m', None, {})",
    ),
    "image_of_vllm": (
        "pillow",
        "multimodal",
        "from raycore.compat.media import fetch_image; fetch_image('data:image/png;base64,AAAA')",
    ),
    "architecture": (
        "transformers",
        "transformers",
        "from raycore.checkpoint.model_spec import load_model_spec; load_model_spec(Path('unknown'), 'auto')",
    ),
    "fallback": ("transformers", "transformers", "from raycore.fallback.library import library; library('models')"),
    "structured": (
        "llguidance",
        "structured",
        "from raycore.parts.constraints.grammar.native import NativeCompiler; NativeCompiler('m', 8, [1]).load()",
    ),
    "prepared": (
        "llguidance",
        "structured",
        "from raycore.parts.constraints.grammar.gate import ConstraintGate; ConstraintGate('m', 8, [1]).prepare()",
    ),
    "kv_events": (
        "pyzmq",
        "kv-events",
        "from raycore.parts.transfers.config.kv_transfer import KVEventsConfig\n"
        "from raycore.parts.transfers.engine import KVEvents\n"
        "from types import SimpleNamespace\n"
        "on = KVEventsConfig(enable_kv_cache_events=True)\n"
        "KVEvents(SimpleNamespace(kv_events_config=on), 0, None)",
    ),
    "grpo": ("transformers", "train", "runpy.run_path(str(ROOT / 'examples/grpo.py'))"),
    "train_demo_model": ("transformers", "train", "runpy.run_path(str(ROOT / 'examples/train_demo_model.py'))"),
}
"""For each door: a package that is missing, the extra that brings it, and what a user does."""

PROGRAM = f"""\
import contextlib, io, json, runpy, sys
from pathlib import Path

ROOT = Path({str(ROOT)!r})

def command(*words):
    from raycore.cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        assert main(words) == 1
    raise RuntimeError(printed.getvalue().strip())

found = {{}}
for name, (_, _, code) in json.loads(sys.argv[1]).items():
    try:
        exec(code, dict(globals()))
        found[name] = "no error"
    except Exception as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def named(requirement: str) -> str:
    """The package of a requirement, with its extras."""
    match = re.match(r"[\w.-]+(\[[\w,-]+\])?", requirement)
    assert match
    return match[0]


def imported(package: str) -> dict[str, str]:
    """The modules of others that the files of a folder import, outside of what only type checkers see, and a file."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        pending: list[ast.AST] = [ast.parse(path.read_text())]
        while pending:
            node = pending.pop()
            names = []
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                pending += node.orelse
                continue
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                argument = node.args[0]
                names = [argument.value] if isinstance(argument, ast.Constant) else []
            found |= {name.partition(".")[0]: path.relative_to(ROOT).as_posix() for name in names}
            pending += ast.iter_child_nodes(node)
    ours = {"raycore", "placement"}
    if package in ("benchmarks", "examples"):
        beside = [path for folder in (package, "tests/support", "tests/ray") for path in (ROOT / folder).rglob("*")]
        ours |= {path.stem for path in beside if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))}
    return {name: path for name, path in found.items() if name not in ours | set(sys.stdlib_module_names)}


def modules_of(requirements: list[str]) -> set[str]:
    """The modules that the packages of requirements have, and those of the extras of raycore among them."""
    packages = {re.sub(r"[-_.]+", "-", named(each).partition("[")[0]).lower() for each in requirements}
    return {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if packages & {re.sub(r"[-_.]+", "-", each).lower() for each in distributions}
    }


def test_the_table_has_what_the_extras_bring():
    declared = {
        extra: {package for each in requirements if not (package := named(each)).startswith("raycore[")}
        for extra, requirements in OPTIONAL.items()
        if extra not in NOT_IMPORTED
    }
    assert {extra: set(modules.values()) for extra, modules in EXTRAS.items()} == declared


@pytest.mark.parametrize("package", ["raycore", "placement"])
def test_what_is_imported_is_declared(package: str):
    known = modules_of(PROJECT["dependencies"]) | {module.partition(".")[0] for module in ALL_MODULES} | WITH_TORCH
    assert {name: path for name, path in imported(package).items() if name not in known} == {}


@pytest.mark.parametrize("package", ["benchmarks", "examples"])
def test_what_programs_beside_raycore_import_is_declared(package: str):
    every = [*PROJECT["dependencies"], *(each for requirements in OPTIONAL.values() for each in requirements)]
    known = modules_of(every) | {module.partition(".")[0] for module in ALL_MODULES} | PEERS | OWN
    assert {name: path for name, path in imported(package).items() if name not in known} == {}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each door says where no extra is installed."""
    folder = tmp_path_factory.mktemp("doors")
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    (folder / "in.jsonl").write_text(json.dumps(line))
    (folder / "unknown").mkdir()
    (folder / "unknown/config.json").write_text('{"architectures": ["OPTForCausalLM"], "model_type": "opt"}')
    environment = without_packages(folder, ALL_MODULES)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(DOORS)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("door", DOORS)
def test_each_door_names_the_extra_that_is_missing(door: str, found: dict[str, str]):
    package, extra, _ = DOORS[door]
    assert found[door].endswith(f'isn\'t installed: pip install "raycore[{extra}]"')
    assert package in found[door]
    assert "\n" not in found[door]


def test_adapters_elsewhere_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from raycore.parts.adapters.serve import copy_folder  # it needs packages of other extras

    for module in ("pyarrow", "pyarrow.fs"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackage, match=r'needs the package pyarrow, .*: pip install "raycore\[data\]"'):
        copy_folder("s3://bucket/adapters/one", str(tmp_path))


@pytest.mark.parametrize("endpoint", ["http://localhost:4317", "http://localhost:4318/v1/traces"])
def test_traces_without_the_exporter(endpoint: str, tmp_path: Path):
    environment = without_packages(tmp_path, ["opentelemetry.exporter"])
    run = subprocess.run(
        [sys.executable, "-m", "raycore", "serve", "--port", "0", "--otlp-traces-endpoint", endpoint],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (run.returncode, run.stderr) == (
        1,
        "raycore: otlp_traces_endpoint needs the package opentelemetry-exporter-otlp, which isn't installed: "
        'pip install "raycore[otel]"\n',
    )


@pytest.mark.parametrize(
    ("module", "extra", "says"),
    [
        (
            "transformers.models",
            "multimodal",
            "package transformers, which isn't installed: pip install \"raycore[multi",
        ),
        ("opentelemetry.sdk.trace", "otel", "package opentelemetry-sdk,"),
        ("opentelemetry.exporter.otlp", "otel", "package opentelemetry-exporter-otlp,"),
        ("llguidance", "otel", 'package llguidance, which isn\'t installed: pip install "raycore[structured]"'),
        ("watchfiles", "ray-serve", 'package watchfiles, which isn\'t installed: pip install "raycore[ray-serve]"'),
    ],
)
def test_the_extra_is_the_doors_unless_another_one_brings_the_module(module: str, extra: str, says: str):
    assert says in missing_package("it needs", module, extra)


def test_other_errors_of_imports_stay_as_they_are():
    with pytest.raises(ModuleNotFoundError, match=r"raycore\.nothing"), needing("it needs", "serve"):
        importlib.import_module("raycore.nothing")
    with pytest.raises(ImportError, match="damaged"), needing("it needs", "serve"):
        raise ImportError("damaged")
    with pytest.raises(InvalidRequest, match="llguidance"), needing("it needs", "structured", InvalidRequest):
        raise ModuleNotFoundError("", name="llguidance")


def test_programs_can_catch_it_as_an_error_of_an_import():
    assert issubclass(MissingPackage, ImportError)
    assert issubclass(MissingPackage, InvalidConfig)
