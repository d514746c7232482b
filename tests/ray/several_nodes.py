"""A program on a cluster of several nodes: ranks on each, one that spans two, nodes that are drained and that crash.

Run by `test_multi_node.py`, with the dtype as its argument. The head node, the program's own, has no CPUs: everything
else is elsewhere.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import ray
from ray.cluster_utils import Cluster
from waiting import eventually

from placement.topology import read_cluster
from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path, held_out_problems

LIMITS = {"num_threads": 1, "max_model_len": 512, "dtype": sys.argv[1], "use_tqdm_on_load": False}
PROBLEMS = list(held_out_problems(2, 60))
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
RAY_OPTIONS = {"object_store_memory": 80 << 20, "include_dashboard": False}


def check(llm: LLM, params: SamplingParams = SHORT) -> None:
    """The sums come out right, after whatever has happened."""
    outputs = llm.generate([prompt for prompt, _ in PROBLEMS], params, use_tqdm=False)
    right = sum(
        output.outputs[0].text.startswith(answer) and len(output.outputs[0].token_ids) == params.max_tokens
        for output, (_, answer) in zip(outputs, PROBLEMS, strict=True)
    )
    assert right >= len(PROBLEMS) - 1, right


def node_of(llm: LLM, dp_rank: int) -> str:
    return next(info.node_id for info in llm.engine_infos if info.dp_rank == dp_rank)


def wait_until_moved(llm: LLM, dp_rank: int, old_node: str) -> None:
    def has_moved() -> bool:
        infos = {info.dp_rank: info.node_id for info in llm.engine_infos}
        return dp_rank in llm.clients.links() and infos.get(dp_rank, old_node) != old_node

    eventually(has_moved, "the rank isn't replaced")


def disturbed_by(llm: LLM, event) -> None:
    """Check while `event` happens."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            check(llm, LONG)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.5)
    event()
    thread.join(100)
    assert not thread.is_alive()
    assert not failures, failures


def wait_until_free() -> None:
    """Wait until Ray shows all CPUs as free. It takes up to a second to show those that an engine has released."""
    eventually(
        lambda: all(node.available.get("CPU") == node.total.get("CPU") for node in read_cluster().nodes),
        "an engine's CPUs aren't released",
    )


def drain(cluster: Cluster, node_id: str) -> None:
    """What an autoscaler does before it takes a node away."""
    options = {
        "--address": cluster.address,
        "--node-id": node_id,
        "--reason": "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message": "a test",
        "--deadline-remaining-seconds": "300",
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *itertools.chain(*options.items())]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=RAY_OPTIONS | {"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=2, **RAY_OPTIONS) for _ in range(3)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

    # two workers and the engine, on two nodes: their channel crosses nodes, and so do sums and hidden states
    for shape, workers_on in (({"tensor_parallel_size": 2}, [2, 2]), ({"pipeline_parallel_size": 3}, [2, 2, 1])):
        wait_until_free()
        with LLM(demo_model_path(), placement_strategy="span", **shape, **LIMITS) as llm:
            (rank,) = llm.ranks
            assert len(rank.node_ids) == 2
            assert llm.collective_rpc(lambda worker: worker.rank.num_local_workers) == workers_on
            check(llm)
    print("a rank spans nodes", flush=True)

    options = LIMITS | {"data_parallel_size": 2, "executor_backend": "ray", "placement_strategy": "strict"}
    with LLM(demo_model_path(), drain_timeout_s=0.2, **options) as llm:
        assert node_of(llm, 0) != node_of(llm, 1)

        going = node_of(llm, 1)
        disturbed_by(llm, lambda: drain(cluster, going))
        wait_until_moved(llm, 1, going)
        check(llm)
        print("a rank leaves a node that is drained", flush=True)

        nodes.append(cluster.add_node(num_cpus=2, **RAY_OPTIONS))
        lost = node_of(llm, 0)
        crashing = next(node for node in nodes if node.node_id == lost)
        disturbed_by(llm, lambda: cluster.remove_node(crashing, allow_graceful=False))
        wait_until_moved(llm, 0, lost)
        check(llm)
        print("a rank on a node that crashes is replaced", flush=True)

    wait_until_free()
    options = LIMITS | {"data_parallel_size": 2, "placement_strategy": "strict", "standby_delay_s": None}
    with LLM(demo_model_path(), **options) as llm:
        stays, lost = node_of(llm, 0), node_of(llm, 1)
        assert stays != lost
        crashing = next(node for node in nodes if node.node_id == lost)
        cluster.remove_node(crashing, allow_graceful=False)
        wait_until_moved(llm, 1, lost)
        assert node_of(llm, 1) == stays  # there is no other node
        nodes.append(cluster.add_node(num_cpus=2, **RAY_OPTIONS))
        os.kill(next(info.pid for info in llm.engine_infos if info.dp_rank == 1), signal.SIGKILL)
        wait_until_moved(llm, 1, stays)
        assert node_of(llm, 1) == nodes[-1].node_id
        check(llm)
        print("a rank moves to a node that has joined", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
