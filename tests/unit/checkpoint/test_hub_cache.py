"""Checkpoints are found by their names on the hub, without a network."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from raycore.checkpoint.hub_cache import find_directory
from raycore.config import resolve
from raycore.demo import DEMO_MODEL_DIR
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.server.options import server_options

NAME, COMMIT, OTHER = "some-org/Demo-1.5", "a" * 40, "b" * 40
DEMO = str(DEMO_MODEL_DIR)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with two commits of the demo model: main, and one without a name."""
    repository = tmp_path / "hub" / "models--some-org--Demo-1.5"
    for commit in (COMMIT, OTHER):
        shutil.copytree(DEMO_MODEL_DIR, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def snapshot(cache: Path, commit: str = COMMIT) -> Path:
    return cache / "models--some-org--Demo-1.5" / "snapshots" / commit


def test_a_model_name_resolves_to_its_snapshot_in_the_hub_cache(cache: Path) -> None:
    assert find_directory(NAME, cache=str(cache)) == snapshot(cache)
    assert find_directory(NAME, revision=OTHER, cache=str(cache)) == snapshot(cache, OTHER)
    options = {"download_dir": str(cache)}
    config = resolve(NAME, **options)
    assert (config.model.model, config.model.tokenizer) == (str(snapshot(cache)), str(snapshot(cache)))
    assert resolve(NAME, revision=OTHER, **options).model.model == str(snapshot(cache, OTHER))
    config = resolve(DEMO, tokenizer=NAME, tokenizer_revision="main", **options)
    assert (config.model.model, config.model.tokenizer) == (DEMO, str(snapshot(cache)))
    assert server_options(NAME, {}).served_model_names == (NAME,)


def test_the_hub_cache_is_that_of_the_environment_variables(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    assert find_directory(NAME) == snapshot(cache)


def test_the_hub_cache_defaults_to_the_home_directory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(cache.parent))
    assert find_directory(NAME, cache="~/hub") == snapshot(cache)


def test_a_local_directory_comes_before_the_hub_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert find_directory(NAME, cache=str(cache)) == Path(NAME)
    assert find_directory("~") == Path.home()
    wrong: dict[str, dict[str, Any]] = {
        "revision='main'": {"revision": "main"},
        "tokenizer_revision='v1'": {"tokenizer": DEMO, "tokenizer_revision": "v1"},
    }
    for given, options in wrong.items():
        with pytest.raises(InvalidConfig, match=f"^{given} is for names on the hub, and .* isn't one"):
            resolve(DEMO, **options)
    with pytest.raises(InvalidConfig, match="tokenizer_revision='v1' needs tokenizer"):
        resolve(DEMO, tokenizer_revision="v1")


def test_a_model_that_the_hub_cache_lacks_is_refused_with_the_download_command(cache: Path) -> None:
    with pytest.raises(InvalidCheckpoint) as raised:
        find_directory("org/model", cache=str(cache))
    for part in (
        "model='org/model' isn't",
        str(cache),
        "`hf download org/model --cache-dir ",
        "org/model --local-dir DIR",
    ):
        assert part in str(raised.value)
    with pytest.raises(InvalidCheckpoint, match=rf"at revision 'v2'.*hf download {NAME} --revision v2 "):
        find_directory(NAME, revision="v2", cache=str(cache))
    (snapshot(cache) / "config.json").unlink()  # only some other files were downloaded
    with pytest.raises(InvalidCheckpoint, match=f"hf download {NAME}"):
        find_directory(NAME, cache=str(cache))


def test_a_directory_with_one_gguf_file_and_no_other_weights_is_that_file(tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_0.gguf"
    file.touch()
    for name in ("mmproj-F16.gguf", "imatrix_unsloth.gguf", "m-imatrix.gguf"):  # these aren't models
        (tmp_path / name).touch()
    assert find_directory(str(tmp_path)) == file
    (tmp_path / "config.json").touch()  # repositories of GGUF files often have it
    assert find_directory(str(tmp_path)) == file
    assert find_directory(str(tmp_path), "tokenizer.json") == file
    (tmp_path / "tokenizer.json").touch()
    assert find_directory(str(tmp_path), "tokenizer.json") == tmp_path
    (tmp_path / "model.safetensors").touch()
    assert find_directory(str(tmp_path)) == tmp_path


def test_a_directory_with_several_gguf_files_is_refused_unless_they_are_one_model(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.gguf").touch()
    assert find_directory(str(tmp_path)) == tmp_path / "model-00001-of-00002.gguf"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(
        InvalidCheckpoint, match=r"has 2 GGUF files: give the path of one of model-00001-of-00002.gguf, o"
    ):
        find_directory(str(tmp_path))
