"""Which device an engine gets. The cluster declares 4 GPUs, the machine has none that this torch sees."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path

import pytest
import torch
from cpu_worker import CpuWorker
from engine_probe import standby_pids
from ray.util import placement_group_table
from waiting import eventually

from placement.errors import PlacementShortage
from raycore import LLM, SamplingParams
from raycore.cli.main import main
from raycore.demo import demo_model_path
from raycore.errors import InitializationError

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU"),
]
LIMITS = {"max_model_len": 128, "num_threads": 1, "kv_cache_memory_bytes": 1 << 24, "standby_delay_s": None}


def test_device_auto_takes_the_cpu_if_the_gpus_cannot_be_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(demo_model_path(), data_parallel_size=2, **LIMITS) as llm:
        assert [info.gpu_ids for info in llm.engine_infos] == [[], []]
        assert llm.config.device == "auto"
        assert llm.generate("A", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    (warning,) = [record.getMessage() for record in caplog.records if "GPU" in record.getMessage()]
    assert "has 4 GPUs" in warning
    assert "device='cuda'" in warning


def test_device_cpu_on_a_node_with_gpus_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(demo_model_path(), device="cpu", **LIMITS):
        assert not [record for record in caplog.records if "GPU" in record.getMessage()]


def test_get_or_create_takes_device_auto_for_the_default() -> None:
    first = LLM.get_or_create(demo_model_path(), **LIMITS)
    try:
        assert LLM.get_or_create(demo_model_path(), device="auto", **LIMITS) is first
    finally:
        first.shutdown()


@pytest.mark.parametrize("shape", [{"tensor_parallel_size": 8}, {"data_parallel_size": 5}])
def test_too_few_gpus_are_a_shortage_at_once(tmp_path: Path, shape: dict[str, int]) -> None:
    description = json.loads((Path(demo_model_path()) / "config.json").read_text())
    eight_heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(description | eight_heads))
    with pytest.raises(PlacementShortage, match="GPU"):
        LLM(
            str(tmp_path),
            demo_model_path(),
            device="cuda",
            load_format="dummy",
            placement_timeout_s=1e6,
            **shape,
            **LIMITS,
        )


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_every_worker_sees_its_own_gpu(tp: int, pp: int) -> None:
    num_ranks = 4 // (tp * pp)
    shape = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": num_ranks}
    with LLM(demo_model_path(), worker_cls=CpuWorker, device="cuda", **shape, **LIMITS) as llm:
        assert llm.config.max_steps_in_flight == pp + 1
        seen = [info.gpu_ids for info in llm.engine_infos]
        assert [len(ids) for ids in seen] == [tp * pp] * num_ranks
        assert sorted(gpu for ids in seen for gpu in ids) == ["0", "1", "2", "3"]
        groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        assert sum(bundle.get("GPU", 0.0) for group in groups for bundle in group["bundles"].values()) == 4.0
        outputs = llm.generate(["27 + 58 ="] * 8, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        assert {output.outputs[0].text for output in outputs} == {" 85"}


def test_workers_with_fractional_gpus_share_a_gpu() -> None:
    shape = {"data_parallel_size": 8, "gpus_per_worker": 0.5, "device": "cuda"}
    with LLM(demo_model_path(), worker_cls=CpuWorker, **shape, **LIMITS) as llm:
        seen = sorted(gpu for info in llm.engine_infos for gpu in info.gpu_ids)
        assert seen == ["0", "0", "1", "1", "2", "2", "3", "3"]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_a_standby_takes_over_the_gpus_of_a_dead_rank(tp: int, pp: int) -> None:
    shape = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": 2, "device": "cuda"}
    with LLM(demo_model_path(), worker_cls=CpuWorker, **shape, **LIMITS | {"standby_delay_s": 0.0}) as llm:
        waiting = eventually(lambda: standby_pids(llm), "there is no standby")
        victim = llm.engine_infos[1]
        os.kill(victim.pid, signal.SIGKILL)
        heir = eventually(
            lambda: next((i for i in llm.engine_infos if i.dp_rank == 1 and i.pid != victim.pid), None),
            "the rank doesn't come back",
        )
        assert heir.pid in waiting
        assert heir.gpu_ids == victim.gpu_ids
        outputs = llm.generate(["27 + 58 ="] * 8, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        assert {output.outputs[0].text for output in outputs} == {" 85"}


@pytest.mark.parametrize("shape", [{}, {"executor_backend": "ray"}])
def test_a_gpu_that_cannot_be_used_fails_the_start_with_the_reason(shape: dict[str, str]) -> None:
    with pytest.raises(InitializationError) as error_info:
        LLM(demo_model_path(), device="cuda", **shape, **LIMITS)
    first_line = str(error_info.value).splitlines()[0]
    assert "device='cuda', but torch" in first_line
    assert "sees no GPU" in first_line


def test_the_device_flag_reaches_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--device", "cuda", "--max-tokens", "1", "A"]) != 0
    assert "sees no GPU" in capsys.readouterr().err
