"""An engine on a local Ray that starts as plain `ray.init()` starts it."""

from __future__ import annotations

import sys

import pytest
from programs import START_S, Program

pytestmark = pytest.mark.timeout(300)

GENERATE = """
import os
from ray._private import worker
from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path

if __name__ == "__main__":
    with LLM(str(demo_model_path()), dtype="float32", num_threads=1, use_tqdm_on_load=False) as llm:
        (output,) = llm.generate("27 + 58 =", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        print("text:", output.outputs[0].text, flush=True)
        for name, (info,) in worker._global_node.all_processes.items():
            print("process:", name, "ours" if os.getsid(info.process.pid) == os.getsid(0) else "apart", flush=True)
"""


def test_an_engine_generates_on_a_plain_local_ray_with_all_of_rays_own_processes():
    with Program([sys.executable, "-c", GENERATE], environment={"RAYCORE_PLAIN_LOCAL_RAY": "1"}) as program:
        assert program.wait_for_exit(START_S) == 0, program.output
        lines = [line.split() for line in program.output.splitlines()]
        assert ["text:", "85"] in [line[:2] for line in lines], program.output
        processes = {line[1]: line[2] for line in lines if line[0] == "process:"}
        assert processes.keys() >= {"gcs_server", "monitor", "raylet"}
        assert set(processes.values()) == {"ours"}
        program.wait_until_nothing_is_left(START_S)
