"""An engine computes a prompt, and another one goes on: with raycore's connector, and with one as users write them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import make_checkpoint
from layer_connector import LayerConnector
from msgspec.msgpack import decode
from msgspec.structs import replace
from waiting import eventually

from raycore.checkpoint.weight_files import read_header
from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

LIMITS: dict[str, Any] = {"num_threads": 1, "block_size": 8, "max_model_len": 200, "num_gpu_blocks_override": 40}
PARAMS = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True)
PROMPT = [7 + index * index % 83 for index in range(101)]
NUM_READ = 96
SEQ_IDS = iter(range(10**6))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama3", tmp_path_factory.mktemp("llama3"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    core = make_core(checkpoint)
    tokens = Sequence(core, PARAMS).finish().tokens
    core.shutdown()
    return tokens


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef")
    return str(path)


@pytest.fixture
def engines(checkpoint: Path, secret_file: str) -> Iterator[tuple[EngineCore, EngineCore]]:
    """One that computes prompts, and one that goes on."""
    made = (
        make_core(checkpoint, handing("kv_producer", secret_file)),
        make_core(checkpoint, handing("kv_consumer", secret_file)),
    )
    yield made
    for core in made:
        core.shutdown()


def handing(role: str, secret_file: str) -> dict[str, Any]:
    extra = {"secret_file": secret_file, "min_fetch_tokens": 8, "lease_s": 600.0}
    return {"kv_connector": "DisaggregationConnector", "kv_role": role, "kv_connector_extra_config": extra}


def make_core(path: Path, transfer: dict[str, Any] | None = None) -> EngineCore:
    config = resolve(path, dtype="float32", kv_transfer_config=transfer, **LIMITS)
    return EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))


class Sequence:
    """A request of one engine."""

    def __init__(self, core: EngineCore, params: SamplingParams, told: dict[str, Any] | None = None) -> None:
        self._core = core
        self.seq_id = next(SEQ_IDS)
        self.tokens: list[int] = []
        self.num_cached = -1
        self.told: dict[str, Any] | None = None
        self._is_over = False
        params = params if told is None else replace(params, extra_args={"kv_transfer_params": told})
        core.submit(EngineRequest(self.seq_id, str(self.seq_id), PROMPT, params, seed=5))

    def finish(self) -> Sequence:
        while not self._is_over:
            outputs = self._core.step()
            self._core.scheduler.check_integrity()
            if outputs is None:
                continue
            self.tokens += outputs.token_ids.tolist()
            self.num_cached = dict(outputs.started).get(self.seq_id, self.num_cached)
            self._is_over = any(end.seq_id == self.seq_id for end in outputs.finished)
            for _, report in outputs.reports:
                self.told = decode(report.data)
        return self


def compute(core: EngineCore) -> dict[str, Any]:
    """Have an engine compute the prompt. Returns what the other one is to be told."""
    told = Sequence(core, replace(PARAMS, max_tokens=1), {"do_remote_decode": True}).finish().told
    assert told is not None
    for _ in range(3):  # until its workers know
        core.step()
    return told


def has_no_work(core: EngineCore) -> bool:
    core.step()
    core.scheduler.check_integrity()
    return not core.has_work()


def test_blocks_are_read_and_kept_no_longer(engines: tuple[EngineCore, EngineCore], expected: list[int]) -> None:
    first, second = engines
    told = compute(first)
    assert first.has_work()  # the blocks are kept
    found = Sequence(second, PARAMS, told).finish()
    assert (found.tokens, found.num_cached, found.told) == (expected, NUM_READ, None)
    eventually(lambda: has_no_work(first))
    # the same again: the second one has all now, and the first one still knows the lease's name
    assert Sequence(second, PARAMS, told).finish().tokens == expected


def test_blocks_of_a_request_that_is_aborted_are_kept_no_longer(engines: tuple[EngineCore, EngineCore]) -> None:
    first, second = engines
    told = compute(first)
    sequence = Sequence(second, PARAMS, told)
    second.abort([sequence.seq_id])
    second.step()
    eventually(lambda: has_no_work(first))


def test_a_dead_engine_costs_a_computation(engines: tuple[EngineCore, EngineCore], expected: list[int]) -> None:
    first, second = engines
    told = compute(first)
    first.shutdown()
    assert Sequence(second, PARAMS, told).finish().tokens == expected


@pytest.mark.parametrize("is_changed", [False, True], ids=["copied", "changed"])
def test_what_other_weights_have_computed_is_not_read(
    checkpoint: Path,
    secret_file: str,
    expected: list[int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_changed: bool,
) -> None:
    """A copy of the files counts as the same weights, wherever it is and however old."""
    shutil.copytree(checkpoint, tmp_path / "other", copy_function=shutil.copyfile)
    if is_changed:
        (file,) = (tmp_path / "other").glob("*.safetensors")
        norm = next(each for name, each in read_header(file).items() if name.endswith("norm.weight"))
        with file.open("r+b") as opened:
            opened.seek(norm.start)
            opened.write(b"1")
    first = make_core(tmp_path / "other", handing("kv_producer", secret_file))
    second = make_core(checkpoint, handing("kv_consumer", secret_file))
    with caplog.at_level(logging.WARNING):
        found = Sequence(second, PARAMS, compute(first)).finish()
    assert (found.tokens, found.num_cached) == (expected, 0 if is_changed else NUM_READ)
    assert ("its weights, or the options with which they are read, are others" in caplog.text) == is_changed
    first.shutdown()
    second.shutdown()


def test_a_ticket_of_an_unknown_engine_costs_a_computation(
    engines: tuple[EngineCore, EngineCore], expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Clients refuse it. Theirs may be another secret than the engine's, where each node has a file of its own."""
    with caplog.at_level(logging.WARNING):
        found = Sequence(engines[1], PARAMS, {"do_remote_prefill": True, "remote_ticket": "forged"}).finish()
    assert (found.tokens, found.num_cached) == (expected, 0)
    assert "remote_ticket is none" in caplog.text


def test_a_users_connector_hands_over(checkpoint: Path, expected: list[int]) -> None:
    LayerConnector.kept.clear()
    settings = {
        "kv_connector": "handing_connector.HandingConnector",
        "kv_connector_extra_config": {"greeting": "hello"},
    }
    first, second = make_core(checkpoint, settings), make_core(checkpoint, settings)
    told = compute(first)
    assert told == {"do_remote_prefill": True, "remote_num_tokens": NUM_READ}
    found = Sequence(second, PARAMS, told).finish()
    assert (found.tokens, found.num_cached) == (expected, NUM_READ)
    assert Sequence(first, PARAMS).finish().told is None
    first.shutdown()
    second.shutdown()
