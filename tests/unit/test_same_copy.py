"""Two copies of raycore are found out, and a worker imports the driver's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

from raycore.config import EngineConfig, resolve
from raycore.demo import demo_model_path
from raycore.errors import ControlError, InitializationError
from raycore.ray_api import FromDriversCopy, actor_class, checked, endpoint
from raycore.same_copy import difference, own_copy, seal, unseal
from raycore.worker.rank import RankIdentity

ROOT = Path(__file__).parents[2]
REFUSED = """
import pickle, sys
greeter, identity = pickle.load(sys.stdin.buffer)
import raycore
try:
    greeter("configuration", identity).greet()
except raycore.InitializationError as error:
    print(error)
"""
OURS = ("/ours", "1.0", "aaaaaaaa11", "files")


class Greeter:
    @endpoint()
    def greet(self) -> str:
        return "hello"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with another copy of raycore, as small as can be, and a module of a user's."""
    for name in ("raycore/__init__.py", "raycore/same_copy.py", "raycore/errors.py", "placement/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "placement/errors.py").write_text("class PlacementShortage(Exception): ...\n")
    (tmp_path / "of_a_user.py").write_text("")
    return tmp_path


def pickled_actor() -> bytes:
    """An actor's class as Ray pickles it, and an argument of its constructor."""
    metadata = actor_class(Greeter).__ray_metadata__  # pyright: ignore[reportAttributeAccessIssue]
    return cloudpickle.dumps((metadata.modified_class, checked(RankIdentity(3, 1))))


def python(code: str, path: Path, pickled: bytes = b"") -> str:
    """What a process prints whose `sys.path` begins with `path`. Its standard input is `pickled`."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=pickled,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT / "tests/unit")])},
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
        cwd="/",
    )
    return run.stdout.decode()


def copy_in(path: Path) -> list[str]:
    return json.loads(
        python("import json; from raycore.same_copy import own_copy; print(json.dumps(own_copy()))", path)
    )


@pytest.mark.parametrize(
    ("theirs", "what"),
    [
        (("/theirs", "1.1", "bbbbbbbb22", "other files"), "versions"),
        (("/theirs", "1.1", "aaaaaaaa11", "files"), "versions"),
        (("/theirs", "1.1", "", "other files"), "versions"),
        (("/theirs", "1.0", "bbbbbbbb22", "other files"), "contents"),
    ],
)
def test_another_version_or_source_is_described_with_both_folders_and_versions(theirs, what):
    told = difference(theirs, OURS, "the driver", "a worker")
    assert told is not None
    assert f"different {what} " in told
    sources = theirs[2][:8] or "unknown"
    assert f"the driver imported raycore {theirs[1]} (sources {sources}) from /theirs" in told
    assert "a worker imported raycore 1.0 (sources aaaaaaaa) from /ours" in told
    assert "\n" not in told


@pytest.mark.parametrize("digest", [OURS[2], ""], ids=["the same sources", "unknown sources"])
def test_the_same_version_and_sources_may_lie_anywhere(digest):
    assert difference(("/theirs", "1.0", digest, "other files"), OURS, "the driver", "a worker") is None


def test_the_same_sources_are_recognized_wherever_they_lie(other, tmp_path_factory):
    second = tmp_path_factory.mktemp("second")
    shutil.copytree(other, second, dirs_exist_ok=True)
    (second / "raycore/__pycache__").mkdir(exist_ok=True)
    (second / "raycore/__pycache__/left.py").write_text("of an older version")
    folder, version, digest, _ = copy_in(other)
    assert copy_in(second)[:3] == [str(second), version, digest]
    assert folder == str(other)
    assert version == own_copy()[1]
    (second / "placement/errors.py").write_text("")
    assert copy_in(second)[2] not in (digest, "")


def test_a_copy_in_an_archive_has_a_version_only(other, tmp_path):
    archive = Path(shutil.make_archive(str(tmp_path / "archive"), "zip", other))
    assert copy_in(archive)[:3] == [str(archive), own_copy()[1], ""]


def test_a_worker_imports_the_drivers_copy_and_a_users_modules_as_before(other):
    """Even if another copy comes first on its path, as Ray arranges it for a clone or a `working_dir`."""
    (other / "raycore/__init__.py").write_text("raise ImportError('the other copy')")
    code = """
import pickle, sys, ray
path = sys.path.copy()
greeter, identity = pickle.load(sys.stdin.buffer)
import of_a_user, placement, raycore
assert sys.path == path
print(raycore.__file__, placement.__file__, of_a_user.__file__, greeter().greet(), identity.dp_rank)
"""
    expected = [ROOT / "raycore/__init__.py", ROOT / "placement/__init__.py", other / "of_a_user.py", "hello", "3"]
    assert python(code, other, pickled_actor()).split() == list(map(str, expected))


def test_a_class_that_rays_libraries_pickle_has_the_drivers_copy_imported(other):
    class Replica(FromDriversCopy):
        def imported(self) -> str:
            import raycore

            return raycore.__file__

    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)().imported())"
    assert python(code, other, cloudpickle.dumps(Replica)).strip() == str(ROOT / "raycore/__init__.py")
    (other / "placement/errors.py").write_text("class PlacementShortage(Exception): 'another'")
    code = f"""
import raycore
try:
    {code}
except ImportError as error:
    print(error)
"""
    assert "different contents" in python(code, other, cloudpickle.dumps(Replica))


def test_a_worker_on_a_node_without_the_drivers_folder_refuses_another_copy(other, monkeypatch):
    elsewhere = ("/nowhere", own_copy()[1], own_copy()[2], "other files")
    monkeypatch.setattr("raycore.same_copy._own", elsewhere)
    told = python(REFUSED, other, pickled_actor())
    assert "different contents" in told
    assert f"the driver imported raycore {elsewhere[1]} (sources {elsewhere[2][:8]}) from /nowhere," in told
    assert f" imported raycore {elsewhere[1]} (sources {copy_in(other)[2][:8]}) from {other}." in told
    assert "before the engine started" not in told


def test_a_worker_that_has_imported_another_copy_refuses(other):
    """It doesn't look at the arguments: their classes may have other fields, or may not exist."""
    front = other / "raycore/__init__.py"
    front.write_text(front.read_text().replace(f'"{own_copy()[1]}"', '"9.9"'))
    told = python(f"import raycore\n{REFUSED}", other, pickled_actor())
    assert "different versions" in told
    assert f"the driver imported raycore {own_copy()[1]} (sources {own_copy()[2][:8]}) from {ROOT}," in told
    assert f"before the engine started, imported raycore 9.9 (sources {copy_in(other)[2][:8]}) from {other}." in told


def test_a_sealed_message_is_read_by_the_same_copy_only():
    sealed = seal(b"line 1\nline 2")
    assert unseal(sealed, "the driver", ControlError) == b"line 1\nline 2"
    other = sealed.replace(f'"{own_copy()[1]}"'.encode(), b'"9.9"')
    with pytest.raises(ControlError, match=r"different versions .* the driver imported raycore 9\.9 "):
        unseal(other, "the driver", ControlError)
    with pytest.raises(ControlError, match="the driver imported raycore of another version"):
        unseal(b"\x85\xa4name\n", "the driver", ControlError)


@pytest.mark.parametrize("index", [1, 2], ids=["version", "content"])
def test_a_configuration_of_another_copy_is_refused(index):
    encoded = resolve(demo_model_path()).encode()
    line, _, message = encoded.partition(b"\n")
    theirs = json.loads(line)
    theirs[index] = "8.8"
    with pytest.raises(InitializationError, match=r"two copies of raycore .* 8\.8"):
        EngineConfig.decode(json.dumps(theirs).encode() + b"\n" + message)
