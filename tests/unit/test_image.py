"""The image's Dockerfile, what it pins, and what `docker run` of it starts."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from raycore.cli.main import build_parser
from raycore.server.endpoints import Endpoint
from raycore.server.listen_options import ListenOptions

ROOT = Path(__file__).parents[2]
DOCKERFILE = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
ENTRY_POINT = ROOT / "image/entrypoint.sh"
PROJECT: dict[str, Any] = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(
    (ROOT / "pyproject.toml").read_text()
)["project"]
PINNED = dict(
    line.split("==")
    for line in (ROOT / "image/constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage, as pairs of a word and the rest."""
    found: list[list[tuple[str, str]]] = []
    for line in filter(None, DOCKERFILE.splitlines()):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            found.append([])
        if found:
            found[-1].append((instruction, rest.strip()))
    return found


def of(stage: list[tuple[str, str]], wanted: str) -> list[str]:
    return [rest for instruction, rest in stage if instruction == wanted]


def apt_packages(stage: list[tuple[str, str]]) -> set[str]:
    text = " ".join(of(stage, "RUN"))
    return {name for found in re.findall(r"apt-get install (.*?) &&", text) for name in found.split() if name[0] != "-"}


def test_the_compiler_is_in_the_stage_that_builds_and_not_in_the_image():
    build, image = stages()
    assert apt_packages(build) == {"g++"}
    assert apt_packages(image) == {"tini", "wget"}
    assert "pip wheel" in of(build, "RUN")[-1]
    assert [rest for rest in of(image, "COPY") if rest.startswith("--from=")] == ["--from=build /wheels /wheels"]
    assert not any("/src" in rest for rest in of(image, "COPY"))


def test_everything_that_is_copied_exists_and_the_package_is_whole():
    sources = {name for stage in stages() for rest in of(stage, "COPY") for name in rest.split()[:-1]} - {"/wheels"}
    sources = {name for name in sources if not name.startswith("--")}
    assert [name for name in sources if not (ROOT / name).exists()] == []
    files = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "setup.py", "build_backend"}
    assert files | {"raycore", "placement"} <= sources


def test_the_image_runs_as_a_user_that_is_not_root():
    _, image = stages()
    assert of(image, "USER") == ["ray"]
    words = [instruction for instruction, _ in image]
    assert "RUN" not in words[words.index("USER") :]


# ---- pinned packages


def requirements(extras: list[str]) -> list[Requirement]:
    """What raycore with these extras asks for on the image's Python, extras of its own included."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    found: list[Requirement] = []
    for each in map(Requirement, lines):
        if each.name == "raycore":
            found += requirements(sorted(each.extras))
        else:
            found.append(each)
    return found


def test_each_package_that_the_image_installs_is_pinned_within_what_the_project_admits():
    _, image = stages()
    (extras,) = re.findall(r"raycore-\*\.whl\)\[([\w,-]+)\]", " ".join(of(image, "RUN")))
    needed = [each for each in requirements(extras.split(",")) if each.name != "ray"]
    assert {"fastapi", "torch", "llguidance"} <= {each.name for each in needed}
    wrong = [str(each) for each in needed if not each.specifier.contains(PINNED.get(each.name, "0"))]
    assert wrong == [], "write the constraints anew: image/write_constraints.py"
    installs = [rest for rest in of(image, "RUN") if "pip install" in rest]
    assert len(installs) == 2
    assert all("--constraint /opt/raycore/constraints.txt" in rest for rest in installs)


def test_pins_are_single_versions_of_other_packages():
    assert len(PINNED) > 50
    assert [name for name, version in PINNED.items() if str(Version(version)) != version] == []
    assert {"ray", "raycore"}.isdisjoint(PINNED), "the Dockerfile's argument says which Ray"
    assert list(PINNED) == sorted(PINNED)


# ---- docker run


@pytest.fixture
def runs(tmp_path: Path):
    """What the entry point executes with these arguments, where there are a raycore and another program."""
    for name in ("raycore", "ray"):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        (tmp_path / name).chmod(0o755)

    def runs(*arguments: str) -> list[str]:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        ended = subprocess.run(
            ["sh", ENTRY_POINT, *arguments], env=env, capture_output=True, text=True, timeout=30, check=True
        )
        return ended.stdout.splitlines()

    return runs


SERVES = ["raycore", "serve", "--host", "0.0.0.0"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], SERVES),
        (["/models/a", "-dp", "2"], [*SERVES, "/models/a", "-dp", "2"]),
        (["org/name", "--served-model-name", "a b"], [*SERVES, "org/name", "--served-model-name", "a b"]),
        (["--api-key", "k"], [*SERVES, "--api-key", "k"]),
        (["serve", "/models/a"], [*SERVES, "/models/a"]),
        (["serve", "--host", "127.0.0.1"], [*SERVES, "--host", "127.0.0.1"]),
        (["generate", "27 + 58 ="], ["raycore", "generate", "27 + 58 ="]),
        (["ray", "start", "--head"], ["ray", "start", "--head"]),
        (["echo", "$HOME"], ["$HOME"]),
    ],
)
def test_what_docker_run_starts(runs, arguments, expected):
    assert runs(*arguments) == expected


def test_a_model_that_exists_is_served(runs, tmp_path):
    directory, file = tmp_path / "my model", tmp_path / "model.gguf"
    directory.mkdir()
    file.touch(0o777)  # as volumes of some systems show all files
    for model in map(str, (directory, file)):
        assert runs(model, "-dp", "2") == [*SERVES, model, "-dp", "2"]


def test_each_command_of_raycore_is_run_as_such(runs):
    (commands,) = [action.choices for action in build_parser().actions if action.choices and "serve" in action.choices]
    for name in commands:
        assert runs(name, "x") == ([*SERVES, "x"] if name == "serve" else ["raycore", name, "x"])


def test_the_last_host_counts():
    args = build_parser().parse_args([*SERVES[1:], "/models/a", "--host", "127.0.0.1"])
    assert vars(args)["listen.host"] == "127.0.0.1"


def test_the_entry_point_and_the_health_check_are_what_is_copied_and_served():
    _, image = stages()
    (entry_point,) = of(image, "ENTRYPOINT")
    assert json.loads(entry_point) == ["tini", "--", "/opt/raycore/entrypoint.sh"]
    assert f"{ENTRY_POINT.relative_to(ROOT)} /opt/raycore/entrypoint.sh" in of(image, "COPY")
    assert os.access(ENTRY_POINT, os.X_OK)
    port = ListenOptions().port
    assert of(image, "EXPOSE") == [str(port)]
    (check,) = of(image, "HEALTHCHECK")
    assert json.loads(check.partition(" CMD ")[2])[-1] == f"http://127.0.0.1:{port}{Endpoint.HEALTH.path}"
