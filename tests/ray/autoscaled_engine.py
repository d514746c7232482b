"""A program on a cluster that begins without a node for ranks: an engine has them come.

Run by `test_autoscaler.py`, with the dtype as its argument.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import ray
from job_cluster import eventually

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path
from raycore.errors import PlacementShortage

OPTIONS = {
    "max_model_len": 256,
    "dtype": sys.argv[1],
    "num_threads": 1,
    "standby_delay_s": None,
    "use_tqdm_on_load": False,
}


def check(llm: LLM) -> None:
    """Every rank gives the right sum."""
    outputs = llm.generate(["27 + 58 ="] * 8, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [" 85"] * 8


def nodes_of(llm: LLM) -> dict[int, str]:
    return {info.dp_rank: info.node_id for info in llm.engine_infos}


def crash(node_id: str) -> None:
    """End a node's daemon, whose own processes follow."""
    (socket,) = [node["RayletSocketName"].encode() for node in ray.nodes() if node["NodeID"] == node_id]
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # not a process, or it has ended
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"/raylet") and any(word.endswith(b"=" + socket) for word in words):
                os.kill(int(entry.name), signal.SIGKILL)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    with pytest.raises(PlacementShortage, match="wait_for_nodes_s"):
        LLM(demo_model_path(), **OPTIONS)
    with LLM(demo_model_path(), data_parallel_size=2, wait_for_nodes_s=120, **OPTIONS) as llm:
        first = nodes_of(llm)
        assert len(set(first.values())) == 2
        check(llm)
        print("an engine has its nodes come", flush=True)
        crash(first[1])
        eventually(lambda: nodes_of(llm).get(1, first[1]) != first[1])
        assert nodes_of(llm)[0] == first[0]
        check(llm)
        print("a rank whose node has crashed has another one come", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
