"""What is kept of results is found only with the weights that have computed it, however these have changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from layer_connector import LayerConnector
from safetensors.torch import load_file, save_file
from test_offloading_engine import NUM_CACHED, PARAMS, PROMPT, make_core, run
from waiting import eventually

from raycore.activity import RUNNING, Activity
from raycore.engine.core import EngineCore
from raycore.messages import EngineRequest
from raycore.parts.transfers.connectors.offload.files import BlockFiles
from raycore.parts.transfers.connectors.offload.worker import OffloadWorker
from raycore.parts.transfers.worker import WorkerTransfers
from raycore.sampling_params import SamplingParams

ALL_ASLEEP = Activity(True, 2, ("kv_cache", "weights"))
HOST = {"cpu_bytes_to_use": 8 << 20}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint("llama3", tmp_path / "model")


def other_tensors(path: Path) -> list[tuple[str, torch.Tensor]]:
    return [(name, each * 1.5) for name, each in load_file(path / "model.safetensors").items()]


def write_others(path: Path, to: Path) -> Path:
    to.mkdir(exist_ok=True)
    tensors = dict(other_tensors(path))
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def call(core: EngineCore, name: str, *args: Any) -> Any:
    return core.utilities.functions[name](*args)


def update(core: EngineCore, path: Path, number: int = 1, key: str = "trained") -> None:
    call(core, "update_weights", "start_weight_update")
    call(core, "update_weights", "load_weights", (tuple(other_tensors(path)),))
    call(core, "update_weights", "finish_weight_update")
    call(core, "take_weights", number, "name", True, key)


def reload(core: EngineCore, path: Path) -> None:
    call(core, "update_weights", "reload_from", (str(path),))
    call(core, "take_weights", 1, "name", True, "")


def load_without_an_update(core: EngineCore, path: Path) -> None:
    call(core, "collective_rpc", "load_weights", None, (other_tensors(path),))


def wake_with_others(core: EngineCore, path: Path) -> None:
    core.pause()
    core.set_activity(ALL_ASLEEP)
    before = (path / "model.safetensors").stat()
    save_file(dict(other_tensors(path)), path / "model.safetensors", {"format": "pt"})
    # the same name, size and time
    os.utime(path / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    core.set_activity(RUNNING)


CHANGES: list[Callable[[EngineCore, Path], None]] = [update, load_without_an_update, wake_with_others]


def computed(core: EngineCore, prompt: list[int] = PROMPT) -> list[int]:
    """The tokens of an engine that finds nothing, once everything is stored."""
    tokens, num_cached, _ = run(core, prompt)
    assert num_cached == 0
    eventually(lambda: core.executor.collective_rpc(has_written) == [True])
    return tokens


def has_written(worker: Any) -> bool:
    writer = worker._parts[WorkerTransfers].connector._writer
    return writer is None or writer._num_waiting_bytes == 0


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("extra", [HOST, {"path": ""}], ids=["host", "files"])
def test_an_engine_finds_nothing_of_older_weights_and_all_of_its_own(
    checkpoint: Path, tmp_path: Path, change: Callable[[EngineCore, Path], None], extra: dict[str, Any]
) -> None:
    kept = {**extra, "path": str(tmp_path / "kept")} if "path" in extra else extra
    core = make_core(checkpoint, kept)
    first = computed(core)
    change(core, checkpoint)
    second = computed(core)
    assert second != first
    assert core.scheduler.reset_prefix_cache()
    assert run(core)[:2] == (second, NUM_CACHED)
    core.shutdown()


@pytest.mark.parametrize("change", CHANGES)
def test_another_engine_finds_nothing_of_weights_that_it_has_not(
    checkpoint: Path, tmp_path: Path, change: Callable[[EngineCore, Path], None]
) -> None:
    extra = {"path": str(tmp_path / "kept")}
    other = make_core(checkpoint, extra)
    core = make_core(checkpoint, extra)
    change(core, checkpoint)
    changed = computed(core)
    plain = computed(other)
    assert plain != changed
    assert core.scheduler.reset_prefix_cache()
    assert other.scheduler.reset_prefix_cache()
    assert run(core)[:2] == (changed, NUM_CACHED)
    assert run(other)[:2] == (plain, NUM_CACHED)
    core.shutdown()
    other.shutdown()


def test_weights_of_files_are_the_same_for_all_who_read_them_and_what_is_stored_stays(
    checkpoint: Path, tmp_path: Path
) -> None:
    extra = {"path": str(tmp_path / "kept")}
    others = write_others(checkpoint, tmp_path / "others")
    core = make_core(checkpoint, extra)
    first = computed(core)
    reload(core, others)
    second = computed(core)
    core.shutdown()
    core = make_core(others, extra)
    assert run(core)[:2] == (second, NUM_CACHED)
    reload(core, checkpoint)
    assert run(core)[:2] == (first, NUM_CACHED)
    core.shutdown()


def test_ranks_that_got_the_same_update_find_what_the_others_have_stored(checkpoint: Path, tmp_path: Path) -> None:
    cores = [make_core(checkpoint, {"path": str(tmp_path / "kept")}) for _ in range(3)]
    for core, key in zip(cores, ("a", "a", "b"), strict=True):
        update(core, checkpoint, key=key)
    tokens = computed(cores[0])
    for core, num_cached in zip(cores[1:], (NUM_CACHED, 0), strict=True):
        assert run(core)[:2] == (tokens, num_cached)
    for core in cores:
        core.shutdown()


@pytest.mark.parametrize("fails", [False, True])
def test_between_the_first_tensor_and_the_end_of_an_update_nobody_shares(
    checkpoint: Path, tmp_path: Path, fails: bool
) -> None:
    core = make_core(checkpoint, {"path": str(tmp_path / "kept")})
    computed(core)
    call(core, "update_weights", "start_weight_update")
    tensors = other_tensors(checkpoint)
    if fails:
        tensors.append(("unknown", tensors[0][1]))
        with pytest.raises(Exception, match="unknown"):
            call(core, "update_weights", "load_weights", (tuple(tensors),))
        call(core, "update_weights", "cancel_weight_update")
        assert run(core)[1] == NUM_CACHED, "nothing has changed"
    else:
        call(core, "update_weights", "load_weights", (tuple(tensors),))
        computed(core)
    core.shutdown()


def test_each_bucket_of_an_update_calls_the_workers_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(checkpoint)
    called: list[Any] = []
    plain = core.executor.collective_rpc

    def counted(method: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(method)
        return plain(method, *args, **kwargs)

    monkeypatch.setattr(core.executor, "collective_rpc", counted)
    call(core, "update_weights", "start_weight_update")
    called.clear()
    tensors = other_tensors(checkpoint)
    for tensor in tensors:
        call(core, "update_weights", "load_weights", ((tensor,),))
    assert len(called) == len(tensors)
    core.shutdown()


def test_an_engine_that_changed_nothing_still_finds_all(checkpoint: Path, tmp_path: Path) -> None:
    core = make_core(checkpoint, {"path": str(tmp_path / "kept")})
    tokens = computed(core)
    call(core, "collective_rpc", "weights_checksum")
    call(core, "take_weights", 0, "renamed", False, "")
    core.pause()
    core.set_activity(ALL_ASLEEP)
    core.set_activity(RUNNING)
    assert run(core)[:2] == (tokens, NUM_CACHED)
    core.shutdown()


def test_a_request_that_runs_while_weights_change_stores_nothing_as_of_the_weights_before(
    checkpoint: Path, tmp_path: Path
) -> None:
    extra = {"path": str(tmp_path / "kept")}
    core = make_core(checkpoint, extra)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    core.submit(EngineRequest(10**7, "runs", PROMPT, params, seed=5))
    tokens: list[int] = []
    while core.has_work():
        outputs = core.step()
        tokens += [] if outputs is None else outputs.token_ids.tolist()
        if len(tokens) == 10:
            load_without_an_update(core, checkpoint)
    core.shutdown()
    core = make_core(checkpoint)
    expected = run(core, [*PROMPT, *tokens])[0]
    core.shutdown()
    core = make_core(checkpoint, extra)
    found, num_cached, _ = run(core, [*PROMPT, *tokens])
    assert found == expected
    assert NUM_CACHED <= num_cached <= len(PROMPT) + 10
    core.shutdown()


class HeldFiles(BlockFiles):
    """Files whose reads and writes wait for each other's permission."""

    may_go = threading.Event()

    def write(self, digest, data):
        self.may_go.wait(30)
        return super().write(digest, data)

    def read(self, digest, pages):
        self.may_go.wait(30)
        return super().read(digest, pages)


def test_reads_and_writes_under_way_are_of_the_weights_before(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OffloadWorker, "files_class", HeldFiles)
    HeldFiles.may_go.set()
    extra = {"path": str(tmp_path / "kept")}
    core = make_core(checkpoint, extra)
    first = computed(core)
    core.shutdown()

    HeldFiles.may_go.clear()
    core = make_core(checkpoint, extra)
    core.submit(EngineRequest(10**7, "waits", PROMPT, PARAMS, seed=5))
    for _ in range(3):
        core.step()
    assert core.scheduler.load().kv_fetches.in_progress == 1
    update(core, checkpoint)
    HeldFiles.may_go.set()
    tokens: list[int] = []
    while core.has_work():
        outputs = core.step()
        tokens += [] if outputs is None else outputs.token_ids.tolist()
    assert core.scheduler.reset_prefix_cache()
    eventually(lambda: core.executor.collective_rpc(has_written) == [True])
    assert run(core)[:2] == (tokens, NUM_CACHED)
    assert tokens != first
    # what waits to be written when the weights change is known by those before
    HeldFiles.may_go.clear()
    prompt = [5, *PROMPT[1:]]
    before = run(core, prompt)[0]
    call(core, "take_weights", 2, "name", True, "another")
    HeldFiles.may_go.set()
    core.shutdown()
    core = make_core(checkpoint, extra)
    update(core, checkpoint, key="another")
    assert run(core, prompt)[:2] == (before, 0), "the numbers are the same, but not the key"
    core.shutdown()


def test_a_users_own_connector_finds_nothing_of_other_weights(checkpoint: Path) -> None:
    LayerConnector.kept.clear()
    settings = {
        "kv_connector": "LayerConnector",
        "kv_connector_module_path": "layer_connector",
        "kv_connector_extra_config": {"greeting": "hello"},
    }
    core = make_core(checkpoint, kv_transfer_config=settings)
    first = run(core)[0]
    update(core, checkpoint)
    second, num_cached, _ = run(core)
    assert (second != first, num_cached) == (True, 0)
    core.scheduler.reset_prefix_cache()
    assert run(core)[:2] == (second, NUM_CACHED)
    core.shutdown()
