"""A worker's runner has the cache that it was given, and the parts that its stage needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_setup import make
from test_worker_model import build

from raycore.cache_layout import KVCacheConfig
from raycore.parts.drafts.runner.drafter import NO_DRAFTER, Drafter
from raycore.parts.drafts.worker import NO_DRAFTING
from raycore.runner.heads import NextStage
from raycore.runner.runner import ModelRunner
from raycore.runner.sampling_head import SamplingHead
from raycore.runner.sources import StageBefore, Tokens
from raycore.runner.step_parts import AdaptedRows
from raycore.worker.cache_specs import expected_layout
from raycore.worker.core import WorkerCore
from raycore.worker.memory_sizes import MemorySizes
from raycore.worker.rank import WorkerRank
from raycore.worker.runner_factory import make_runner
from raycore.worker.setup import WorkerSetup
from raycore.worker.worker_model import WorkerModel


class FakeLink:
    """Connects nothing."""


def runner_of(setup: WorkerSetup, num_blocks: int = 3) -> ModelRunner:
    return make_it(setup, build(setup), num_blocks)


def make_it(setup: WorkerSetup, model: WorkerModel, num_blocks: int) -> ModelRunner:
    core = WorkerCore(setup.config, setup.rank)
    core.take(setup)
    core.model = model
    core.groups.source = core.groups.sink = FakeLink()  # pyright: ignore[reportAttributeAccessIssue]
    return make_runner(core, KVCacheConfig(num_blocks, expected_layout(setup)))


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_the_cache_takes_the_memory_that_was_computed_for_its_blocks(tmp_path: Path, num_blocks: int) -> None:
    setup = make(tmp_path, attention_backend="torch")
    kv = runner_of(setup, num_blocks)._attention._kv
    assert sum(blocks.nbytes for blocks in kv.blocks) == num_blocks * MemorySizes(setup, NO_DRAFTING).block


def test_a_stage_sends_its_hidden_states_on_or_samples_from_them(tmp_path: Path) -> None:
    for pp_rank, source, head in ((0, Tokens, NextStage), (1, StageBefore, SamplingHead)):
        rank = WorkerRank(0, 0, 1, 0, 2, pp_rank=pp_rank, pp_size=2)
        runner = runner_of(make(tmp_path, rank, pipeline_parallel_size=2))
        assert (type(runner._source), type(runner._head)) == (source, head)


def test_the_runner_has_the_drafter_and_adapters_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    make(tmp_path / "draft")
    plain = runner_of(make(tmp_path))
    assert plain._drafting is NO_DRAFTER
    assert (plain._begin, plain._begin_forward, plain._taps, plain._end_forward, plain._received) == (
        (),
        (),
        (),
        (),
        (),
    )
    speculative = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    assert isinstance(runner_of(make(tmp_path, speculative_config=speculative))._drafting, Drafter)
    setup = make(tmp_path, enable_lora=True)
    model = build(setup)
    assert model.adapters is not None
    runner = make_it(setup, model, 1)
    assert [each._adapter_rows for each in runner._own_parts if isinstance(each, AdaptedRows)] == [model.adapters.rows]
