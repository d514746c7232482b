"""Engines on a cluster whose workers find other copies of raycore than this program's before or instead of it.

Run by `test_copies_of_raycore.py`, with the folders of another version and of a copy without kernels as its arguments.
Prints a line for each engine: what its worker has imported, or why the engine didn't start.
"""

from __future__ import annotations

import contextlib
import os
import sys

import ray
from ray.cluster_utils import Cluster

import raycore
from raycore import LLM, InitializationError
from raycore.cluster.local_ray.replacements import CLUSTER_PROCESSES, replaced
from raycore.control import program
from raycore.demo import demo_model_path

MARK = "engine:"
"""Begins the lines that this prints. Ray prints others, if a node is slow."""
OPTIONS = {"num_threads": 1, "max_model_len": 128, "use_tqdm_on_load": False, "standby_delay_s": None}


def imported(worker: object) -> tuple[str, ...]:
    import placement
    import raycore

    return raycore.__file__, placement.__file__, type(worker).__module__


def start_engine(address: str, runtime_env: dict[str, object], **options: object) -> None:
    ray.init(address=address, runtime_env=runtime_env, log_to_driver=False, logging_level="ERROR")
    try:
        with LLM(demo_model_path(), **OPTIONS, **options) as llm:
            print(MARK, *llm.collective_rpc(imported)[0])
    except InitializationError as error:
        print(MARK, error)
    finally:
        ray.shutdown()


def main(other: str, without_kernels: str) -> None:
    program._DELAY_S = 3600.0  # nothing controls these engines, and the actor's process would import Ray and torch, too
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    with replaced(CLUSTER_PROCESSES), contextlib.ExitStack() as undo:
        cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        undo.callback(cluster.shutdown)
        home = os.getcwd()
        os.chdir(other)
        start_engine(cluster.address, {})
        os.chdir(home)
        start_engine(cluster.address, {"working_dir": other}, worker_cls="workers_of_a_user.Worker")
        start_engine(cluster.address, {"py_modules": [f"{other}/raycore", f"{other}/placement"]})
        # another node's image, whose processes import their copy as soon as they start
        os.environ["PYTHONPATH"] = without_kernels
        cluster.add_node(**node)
        start_engine(cluster.address, {}, data_parallel_size=2)


if __name__ == "__main__":
    print(MARK, raycore.__file__)
    main(*sys.argv[1:])
