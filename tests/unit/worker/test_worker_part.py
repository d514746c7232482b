"""Every part of a worker keeps the contract: its hooks, its calls by name, and what sleep, waking and ending leave."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import cache_of
from test_worker import ALONE, MOE, SHAPE, first_token, start

from raycore.config import resolve
from raycore.errors import InvalidInput
from raycore.messages import StepPlan
from raycore.rpc.worker_methods import call_method
from raycore.worker.core import WorkerCore
from raycore.worker.part import WorkerPart, called_by_name, calls_of, has_parts
from raycore.worker.worker import PARTS, Worker

HOOKS = {name for name, each in vars(WorkerPart).items() if inspect.isfunction(each) and not name.startswith("_")}
NAMES = """
init_device load_model get_kv_cache_spec determine_available_memory initialize_cache warm_up dtype_name computation
execute_model sample_tokens sleep wake_up check_health shutdown take_draft_token_ids step_times gpu_id tell_peers
load_progress get_model apply_model model_runner vllm_config model_config device local_rank config rank
profile prepare_grammars prepare_adapters drop_adapters get_kv_connector_handshake_metadata
reload_weights num_weight_changes lacks_weights save_sharded_state weights_checksum
load_weights start_weight_update finish_weight_update cancel_weight_update reload_from
init_weight_transfer_engine update_weights shutdown_weight_transfer_engine
export_weights import_weights release_exported_weights memory_need regroup accompany_warm_up
"""
"""What engines, users' subclasses, extensions and `collective_rpc` find in a worker."""
NEEDED: dict[str, dict[str, Any]] = {
    "AdapterReader": {"enable_lora": True},
    "WorkerTransfers": {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
    "ExpertRegrouping": {"enable_expert_parallel": True},
    "RoutedExpertsOfWorker": {"enable_return_routed_experts": True},
    "PoolsHidden": {"runner": "pooling"},
    "EncodesOnly": {
        "hf_overrides": {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "rope_parameters": {"mrope_section": [2, 1, 1]},
            "vision_config": {
                "depth": 1,
                "num_heads": 2,
                "hidden_size": 16,
                "out_hidden_size": SHAPE["hidden_size"],
                "fullatt_block_indexes": [],
            },
        },
        "ec_transfer_config": {"ec_connector": "ECStoreConnector", "ec_role": "ec_producer"},
    },
}
"""By part: what an engine has to be started with for it. The others are parts of every worker."""
UNSAMPLED = ("PoolsHidden", "EncodesOnly")
"""Those of models that have no tokens to compare."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | MOE))
    return str(tmp_path)


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.kind) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("part", PARTS)
def test_hooks_have_the_contracts_names_and_parameters(part: type[WorkerPart]) -> None:
    own = {name for name, each in vars(part).items() if inspect.isfunction(each) and not name.startswith("_")}
    for name in own & HOOKS:
        assert parameters(getattr(part, name)) == parameters(getattr(WorkerPart, name)), name
    assert own & HOOKS or calls_of(part), "it does something"


@pytest.mark.parametrize("part", PARTS)
def test_calls_by_name_are_the_workers_with_the_parts_docstrings_and_parameters(part: type[WorkerPart]) -> None:
    for name in calls_of(part):
        found, own = inspect.getattr_static(Worker, name), vars(part)[name]
        assert name in NAMES.split(), "names are listed"
        assert name not in HOOKS
        assert found.__doc__ == own.__doc__
        assert found.__doc__
        if not isinstance(own, property):
            assert parameters(found) == parameters(own)
            assert found.__name__ == name


def test_workers_have_all_names_that_others_call() -> None:
    missing = [name for name in NAMES.split() if not hasattr(Worker, name)]
    assert missing == []


@pytest.mark.parametrize("part", PARTS)
def test_only_those_engines_have_a_part_that_need_it(part: type[WorkerPart], checkpoint: str) -> None:
    options = NEEDED.get(part.__name__, {})
    plain, other = resolve(checkpoint, load_format="dummy"), resolve(checkpoint, load_format="dummy", **options)
    assert part.is_needed(other)
    assert part.is_needed(plain) == (not options) == (not part.option)


def test_a_call_of_a_part_that_the_engine_lacks_names_the_option(checkpoint: str) -> None:
    worker = start(checkpoint)
    with pytest.raises(InvalidInput, match=r"prepare_adapters\(\) needs an engine with enable_lora=True"):
        call_method(worker, "prepare_adapters", [{}], {})
    with pytest.raises(InvalidInput, match="doesn't take these arguments: missing a required argument: 'weights'"):
        call_method(worker, "load_weights", [], {})
    worker.shutdown()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_may_be_ended_twice(part: type[WorkerPart], checkpoint: str) -> None:
    config = resolve(checkpoint, load_format="dummy", **NEEDED.get(part.__name__, {}))
    made = part(WorkerCore(config, ALONE))
    made.shut_down()
    made.shut_down()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("options", [{}, *(NEEDED[each] for each in NEEDED if each not in UNSAMPLED)])
def test_weights_are_as_before_after_sleep(checkpoint: str, options: dict[str, Any], level: int) -> None:
    worker = start(checkpoint, **options)
    worker.initialize_cache(cache_of(worker, 4))
    token, checksum, num_changes = first_token(worker), worker.weights_checksum(), worker.num_weight_changes
    for _ in range(2):
        worker.sleep(level)
        worker.wake_up(["weights"])
        worker.initialize_cache(cache_of(worker, 4))
        assert (first_token(worker), worker.weights_checksum()) == (token, checksum)
    assert (worker.num_weight_changes == num_changes) == (level == 1)
    worker.shutdown()
    worker.shutdown()


def test_no_part_does_anything_in_a_plain_engines_step(checkpoint: str) -> None:
    worker = start(checkpoint)
    worker.initialize_cache(cache_of(worker, 4))
    hooks = worker._core.hooks
    assert (hooks.begin, hooks.end, hooks.around_attention, hooks.acts_in_layers) == ((), (), (), ())
    name = "model.norm.weight"
    worker.load_weights([(name, torch.ones(SHAPE["hidden_size"]))])
    assert len(hooks.begin) == 1, "what has come is applied before the next step"
    first_token(worker)
    assert hooks.begin == ()
    worker.shutdown()


class Noting(WorkerPart):
    def __init__(self, core: WorkerCore) -> None:
        super().__init__(core)
        self.steps: list[int] = []

    def begin(self, plan: StepPlan) -> None:
        self.steps.append(plan.step)

    @called_by_name
    def steps_so_far(self, prefix: str = "") -> list[str]:
        """The steps."""
        return [f"{prefix}{step}" for step in self.steps]

    @property
    @called_by_name
    def last_step(self) -> int:
        """The last one."""
        return self.steps[-1]


def test_a_part_is_a_class_and_a_line(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hooks and calls are found, also beside a hook that ends in a step, and by subclasses."""
    monkeypatch.setattr("raycore.worker.worker.PARTS", (*PARTS, Noting))

    @has_parts([Noting])
    class Extended(Worker):
        pass

    class Subclass(Extended):
        def steps_so_far(self, prefix: str = "") -> list[str]:
            return ["more", *super().steps_so_far(prefix)]  # pyright: ignore

    worker = Subclass(resolve(checkpoint, load_format="dummy", num_threads=1), ALONE)
    worker.init_device()
    worker.load_model()
    worker.initialize_cache(cache_of(worker, 4))
    worker.load_weights([("model.norm.weight", torch.ones(SHAPE["hidden_size"]))])
    worker.warm_up()
    first_token(worker)
    assert call_method(worker, "steps_so_far", ["step "], {}) == ["more", "step 0", "step 1"]
    assert worker.last_step == 1
    assert Extended.last_step.__doc__ == "The last one."
    worker.shutdown()
