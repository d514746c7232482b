"""A worker's networks are built of weights, give them up, and get them back."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
from test_setup import make

from raycore.models.feed_forward import DenseSpec
from raycore.models.layer_part import LayerPart
from raycore.models.mixers.attention import AttentionHeads
from raycore.parts.adapters.layers import Adapters
from raycore.parts.drafts.worker import NO_DRAFTING
from raycore.worker.groups import WorkerGroups
from raycore.worker.rank import WorkerRank
from raycore.worker.setup import WorkerSetup
from raycore.worker.weight_store import read_weights
from raycore.worker.worker_model import WorkerModel


def build(setup: WorkerSetup) -> WorkerModel:
    model = WorkerModel(setup, WorkerGroups())
    model.build(setup, read_weights(setup, setup.share))
    return model


def test_a_model_has_a_drafter_and_adapters_only_if_the_options_ask_for_them(tmp_path: Path) -> None:
    model = build(make(tmp_path))
    assert (model.drafting, model.adapters) == (NO_DRAFTING, None)
    assert model.network.stage.layers == range(2)
    assert isinstance(build(make(tmp_path, enable_lora=True)).adapters, Adapters)


def test_a_model_asleep_at_level_2_has_no_weights(tmp_path: Path) -> None:
    setup = make(tmp_path, enable_lora=True)
    model = build(setup)
    assert model.adapters is not None
    decoder = weakref.ref(model.network)
    model.sleep(1, setup.device)
    assert model.wake_up(), "on a CPU, weights stay"
    assert decoder() is not None
    model.sleep(2, setup.device)
    assert decoder() is None
    assert not model.wake_up()
    with pytest.raises(AssertionError, match="load_model"):
        _ = model.network


@pytest.mark.parametrize(("batch_invariant", "backend"), [(True, "torch"), (False, "torch"), (True, "auto")])
def test_the_number_of_threads_is_fixed_if_batch_invariant_results_depend_on_it(
    tmp_path: Path, batch_invariant: bool, backend: str
) -> None:
    setup = make(tmp_path, batch_invariant=batch_invariant, attention_backend=backend)
    model = build(setup)
    depends = setup.backend.depends_on_threads or setup.backend.operations().depends_on_threads
    assert model.threads.is_fixed == (batch_invariant and depends)


@pytest.mark.parametrize("kind", [DenseSpec, AttentionHeads])
def test_any_part_of_a_layer_may_depend_on_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[LayerPart]
) -> None:
    monkeypatch.setattr(kind, "depends_on_threads", True)
    assert build(make(tmp_path, batch_invariant=True)).threads.is_fixed
    assert not build(make(tmp_path)).threads.is_fixed


def test_a_warning_tells_that_tiles_depend_on_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("raycore.worker.worker_model.check_tiles", lambda *_: False)
    build(make(tmp_path))
    assert not caplog.messages
    build(make(tmp_path, batch_invariant=True))
    assert "so tokens are computed one at a time, which is slow" in caplog.text


def test_only_the_reporting_worker_has_a_draft_model_that_is_not_split(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    make(tmp_path / "draft")
    speculative = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}
    for tp_rank, drafts in ((0, True), (1, False)):
        rank = WorkerRank(0, tp_rank, 2, tp_rank, 2)
        setup = make(tmp_path, rank, tensor_parallel_size=2, speculative_config=speculative)
        assert (WorkerModel(setup, WorkerGroups()).drafting is not NO_DRAFTING) == drafts
