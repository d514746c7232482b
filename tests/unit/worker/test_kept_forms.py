"""Workers share blocks and embeddings only with workers that make the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_setup import ALONE, SHAPE, make
from vision_checkpoints import QWEN3, make_vision_checkpoint

from raycore.cache_layout import CacheGroup, CacheLayout, CacheLimits
from raycore.checkpoint.model_spec import load_model_spec
from raycore.messages import Computation
from raycore.worker import kept_forms
from raycore.worker import setup as worker_setup
from raycore.worker.kept_forms import embeddings_of
from raycore.worker.setup import WorkerSetup

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "long_factor": [2.0] * 4,
    "short_factor": [1.0] * 4,
}


ONE = CacheLayout((CacheGroup("full", (0, 1)),), CacheLimits(16, 64, 64))
TWO = CacheLayout((CacheGroup("full", (0,)), CacheGroup("window", (1,), 8)), CacheLimits(16, 64, 64))


def layout_of(setup: WorkerSetup, cache: CacheLayout = ONE) -> str:
    return kept_forms.layout_of(setup, cache)


def setups(path: Path) -> dict[str, WorkerSetup]:
    plain: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch", "max_model_len": 64}
    second = msgspec.structs.replace(ALONE, tp_size=2)
    return {
        "plain": make(path, **plain),
        "dtype": make(path, **plain | {"dtype": "bfloat16"}),
        "model": make(path, shape=SHAPE | {"rms_norm_eps": 0.25}, **plain),
        "block size": make(path, block_size=32, **plain),
        "division": make(path, second, tensor_parallel_size=2, **plain),
    }


def test_blocks_are_others_if_numbers_models_or_divisions_are(tmp_path: Path) -> None:
    found = {name: layout_of(each) for name, each in setups(tmp_path).items()}
    found["groups of layers"] = layout_of(setups(tmp_path)["plain"], TWO)
    assert len(set(found.values())) == len(found), found
    assert layout_of(make(tmp_path, dtype="float32", attention_backend="torch", max_model_len=48)) == found["plain"]


def test_the_rotation_that_is_in_force_counts(tmp_path: Path) -> None:
    shape = SHAPE | {"rope_parameters": LONGROPE, "max_position_embeddings": 256}
    short, long, longer = (
        layout_of(make(tmp_path, shape=shape, dtype="float32", max_model_len=length)) for length in (64, 65, 128)
    )
    assert short != long
    assert long == longer


@pytest.mark.parametrize("form", [layout_of, embeddings_of])
def test_what_computes_counts_where_bits_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    setup = make(tmp_path, dtype="float32", attention_backend="torch")
    model = msgspec.structs.replace(setup.config.model, batch_invariant=True)
    exact = replace(setup, config=msgspec.structs.replace(setup.config, model=model))
    before = form(setup), form(exact)
    monkeypatch.setattr(worker_setup.WorkerSetup, "computation", Computation("native (other)"))
    assert form(setup) == before[0]
    assert form(exact) != before[1]


def test_how_ranks_divide_an_encoder_counts_where_bits_do(tmp_path: Path) -> None:
    vision = load_model_spec(make_vision_checkpoint(QWEN3, tmp_path / "images")).vision
    assert vision is not None

    def name(tp_size: int, *, batch_invariant: bool) -> str:
        rank = msgspec.structs.replace(ALONE, tp_size=tp_size)
        setup = make(tmp_path, rank, tensor_parallel_size=tp_size, dtype="float32", attention_backend="torch")
        spec = msgspec.structs.replace(setup.config.model.spec, vision=vision)
        model = msgspec.structs.replace(setup.config.model, batch_invariant=batch_invariant, spec=spec)
        return embeddings_of(replace(setup, config=msgspec.structs.replace(setup.config, model=model)))

    assert name(1, batch_invariant=False) == name(2, batch_invariant=False)
    assert name(1, batch_invariant=True) != name(2, batch_invariant=True)
    assert "tensor_parallel_size 2" in name(2, batch_invariant=True)
