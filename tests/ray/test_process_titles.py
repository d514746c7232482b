"""What `ps` and Ray's tools show of an engine's processes: the engine, and the role of each process in it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from engine_probe import control_pid, standby_pids, wait_until_reachable
from job_cluster import eventually
from number_formats import DTYPE

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


def titles_of_rank(llm: LLM) -> list[str]:
    (info,) = llm.engine_infos
    return [title(pid) for pid in (info.pid, *info.worker_pids)]


def test_processes_are_titled_with_engine_role_and_rank(ray_cluster):
    expected = [f"ray::raycore_titled_dp0{worker}" for worker in ("", "_tp0", "_tp1")]
    options = {"num_threads": 1, "dtype": DTYPE, "tensor_parallel_size": 2, "standby_delay_s": 0}
    with LLM(demo_model_path(), engine_name="titled", **options) as llm:
        assert titles_of_rank(llm) == expected
        llm.generate("27 + 58 =", SamplingParams(max_tokens=1), use_tqdm=False)
        assert titles_of_rank(llm) == expected, "calls don't change them"
        wait_until_reachable(llm)
        assert title(control_pid("titled")) == "ray::raycore_titled_control"

        standby = eventually(lambda: standby_pids(llm))
        assert sorted(map(title, standby)) == [
            f"ray::raycore_titled_standby{worker}" for worker in ("", "_tp0", "_tp1")
        ]
        old = llm.engine_infos[0].pid
        os.kill(old, signal.SIGKILL)
        eventually(lambda: llm.engine_infos and llm.engine_infos[0].pid in standby)
        assert titles_of_rank(llm) == expected


def test_a_random_name_is_shown_too(ray_cluster):
    with LLM(demo_model_path(), num_threads=1, dtype=DTYPE, standby_delay_s=None) as llm:
        assert titles_of_rank(llm)[0] == f"ray::raycore_{llm.name}_dp0"
