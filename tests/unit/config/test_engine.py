"""What follows from a whole configuration, and how it travels."""

import msgspec
import pytest

from raycore.config import EngineConfig, changes, resolve
from raycore.demo import DEMO_MODEL_DIR
from raycore.errors import InvalidConfig
from raycore.same_copy import seal

MODEL = str(DEMO_MODEL_DIR)


class MyWorker:
    pass


def test_pipeline_stages_have_the_chosen_layers_and_one_more_step_in_flight() -> None:
    config = resolve(MODEL, pipeline_parallel_size=2, tensor_parallel_size=2, async_scheduling=False)
    assert (config.parallel.world_size, config.executor.backend, config.max_steps_in_flight) == (4, "ray", 2)
    assert [len(stage.layers) for stage in config.stages()] == [2, 2]
    for layers in ("1,3", [1, 3]):
        config = resolve(MODEL, pipeline_parallel_size=2, pipeline_layers=layers)
        assert [len(stage.layers) for stage in config.stages()] == [1, 3]
    assert resolve(MODEL, pipeline_parallel_size=4).max_steps_in_flight == 5


def test_an_engine_config_is_frozen_and_equal_in_every_process() -> None:
    config = resolve(MODEL, tensor_parallel_size=2, worker_cls=MyWorker)
    assert EngineConfig.decode(config.encode()) == config
    with pytest.raises(AttributeError):
        config.device = "cuda"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(msgspec.ValidationError):
        EngineConfig.decode(seal(msgspec.msgpack.encode({"device": "cpu"})))


def test_changed_options_are_named_with_both_values() -> None:
    first = resolve(MODEL, max_num_seqs=8)
    assert changes(first, resolve(MODEL, max_num_seqs=8, seed=0)) == []
    assert changes(first, resolve(MODEL, max_num_seqs=9, data_parallel_size=2, dtype="float32")) == [
        "dtype='float32', was 'auto'",
        "max_num_seqs=9, was 8",
        "data_parallel_size=2, was 1",
    ]


@pytest.mark.parametrize(
    ("options", "num_steps"),
    [
        ({}, 1),
        ({"device": "cuda"}, 2),
        ({"device": "cuda", "async_scheduling": False}, 1),
        ({"async_scheduling": True}, 2),
        ({"max_concurrent_batches": 3}, 3),
        ({"max_concurrent_batches": 3, "async_scheduling": True}, 3),
        ({"device": "cuda", "max_concurrent_batches": 1}, 1),
    ],
)
def test_the_number_of_steps_in_flight_follows_the_options(options, num_steps):
    assert resolve(MODEL, **options).max_steps_in_flight == num_steps


def test_an_engine_with_drafts_has_one_step_in_flight_for_each_stage():
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    assert resolve(MODEL, device="cuda", **drafts).max_steps_in_flight == 1
    config = resolve(MODEL, pipeline_parallel_size=2, **drafts)
    assert (config.max_steps_in_flight, config.tells_tokens, config.workers_draft) == (2, True, False)
    config = resolve(MODEL, pipeline_parallel_size=2, async_scheduling=True, **drafts)
    assert (config.max_steps_in_flight, config.tells_tokens, config.workers_draft) == (3, False, True)
    assert resolve(MODEL, async_scheduling=False, max_concurrent_batches=1, **drafts).max_steps_in_flight == 1


def test_a_draft_model_of_several_stages_needs_steps_in_flight_for_its_drafts():
    options = {"pipeline_parallel_size": 2, "speculative_config": {"model": MODEL, "num_speculative_tokens": 3}}
    config = resolve(MODEL, async_scheduling=True, **options)
    assert (config.workers_draft, config.drafts_ahead) == (True, True)
    with pytest.raises(InvalidConfig, match="'draft_model' needs async_scheduling=True"):
        resolve(MODEL, **options)
    config = resolve(MODEL, async_scheduling=True, speculative_config=options["speculative_config"])
    assert (config.workers_draft, config.drafts_ahead) == (True, False)


@pytest.mark.parametrize("asked", [{"async_scheduling": True}, {"max_concurrent_batches": 2}])
def test_workers_draft_if_several_steps_of_a_stage_are_in_flight(asked):
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    config = resolve(MODEL, **asked, **drafts)
    assert (config.max_steps_in_flight, config.workers_draft, config.tells_tokens) == (2, True, False)
    assert not resolve(MODEL, **asked).workers_draft
