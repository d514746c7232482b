"""`LLM.get_or_create`: a call that is repeated, changed, refused, that fails, and that finds an engine which has."""

from __future__ import annotations

import os
import signal

import pytest
from number_formats import DTYPE
from waiting import LONG_S

from raycore import LLM, EngineDeadError, InvalidConfig, PlacementShortage, SamplingParams
from raycore.demo import demo_model_path
from raycore.node.processes import is_running

GREEDY = SamplingParams(temperature=0, max_tokens=8)
MODEL = demo_model_path()
LIMITS = {"num_threads": 1, "dtype": DTYPE, "standby_delay_s": None}


@pytest.fixture
def four_cpus(ray_cluster):
    """What is left of the cluster: too little for two engines of two workers each."""
    ray = ray_cluster
    rest = ray.util.placement_group([{"CPU": ray.available_resources()["CPU"] - 4}])
    assert rest.wait(LONG_S)
    yield
    ray.util.remove_placement_group(rest)


def answer(llm: LLM) -> str:
    return llm.generate("27 + 58 =", GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.mark.usefixtures("four_cpus")
def test_get_or_create_reuses_an_engine_with_equal_options_and_replaces_one_with_others(caplog):
    first = LLM.get_or_create(MODEL, tensor_parallel_size=2, **LIMITS)
    first.sleep(2)
    assert LLM.get_or_create(MODEL, tensor_parallel_size=2, data_parallel_size=1, **LIMITS) is first
    assert "is asleep: requests wait until wake_up()" in caplog.text
    pids = [pid for info in first.engine_infos for pid in (info.pid, *info.worker_pids)]

    second = LLM.get_or_create(MODEL, tensor_parallel_size=2, max_num_seqs=8, **LIMITS)
    assert second is not first
    assert not any(map(is_running, pids))
    assert answer(second) == " 85"
    with pytest.raises(EngineDeadError, match=r"replaced it with another one \(max_num_seqs=8, was 256\)"):
        answer(first)
    assert "max_num_seqs=8, was 256" in repr(first)

    with pytest.raises(InvalidConfig, match="tensor_parallel_size=3"):
        LLM.get_or_create(MODEL, tensor_parallel_size=3, **LIMITS)
    assert answer(second) == " 85"

    named = {"engine_name": "other", "max_rank_restarts": 0, **LIMITS}
    other = LLM.get_or_create(MODEL, **named)
    assert (answer(other), answer(second)) == (" 85", " 85")

    assert "no engine is running now" not in caplog.text
    too_much = {"tensor_parallel_size": 2, "data_parallel_size": 8, **LIMITS}
    with pytest.raises(PlacementShortage):
        LLM.get_or_create(MODEL, **too_much)
    assert "no engine is running now" in caplog.text
    assert "data_parallel_size=8, was 1" in repr(second)
    caplog.clear()
    with pytest.raises(PlacementShortage):
        LLM.get_or_create(MODEL, **too_much)
    assert "no engine is running now" not in caplog.text

    os.kill(other.engine_infos[0].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        other.wait_for_completion_or_failure(LONG_S)
    with LLM.get_or_create(MODEL, **named) as fresh:
        assert fresh is not other
        assert answer(fresh) == " 85"
        assert other.ranks == []
