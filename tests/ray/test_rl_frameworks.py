"""The calls of verl, OpenRLHF, SkyRL and NeMo-RL, in their order: new weights give the new checkpoint's tokens."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import rollout_workers
import torch
from cpu_worker import CpuWorker
from families import make_checkpoint
from job_cluster import eventually, free_ports
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycore import LLM, SamplingParams
from raycore.node.listeners import listen
from raycore.parts.weights.transfer.trainer import join_weight_group, send_weights_distributed

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(200)]

WAIT_S = 90
PROMPT = list(range(3, 12))
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 200,
    "num_threads": 1,
    "standby_delay_s": None,
    "enable_prefix_caching": True,
    "seed": 1,
    "device": "cpu",
}
FRAMEWORKS: dict[str, Any] = {"enforce_eager": True, "trust_remote_code": True, "enable_sleep_mode": True}


class Checkpoints:
    """The weights before and after a step of training, and what they answer to PROMPT."""

    def __init__(self, directory: Path) -> None:
        self.first = make_checkpoint("llama3", directory)
        second = directory / "second"
        second.mkdir()
        for file in self.first.iterdir():
            (second / file.name).write_bytes(file.read_bytes())
        torch.manual_seed(1)
        old = load_file(self.first / "model.safetensors")
        self.tensors: dict[str, Tensor] = {name: each + torch.randn_like(each) * 0.2 for name, each in old.items()}
        save_file(self.tensors, second / "model.safetensors", {"format": "pt"})
        self.before, self.after = (self._answers(path) for path in (self.first, second))
        assert self.before != self.after

    def _answers(self, path: Path) -> list[int]:
        with LLM(str(path), **OPTIONS) as llm:
            return list(llm.generate({"prompt_token_ids": PROMPT}, LONG)[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def step(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def get(*refs: Any) -> Any:
    found = ray.get(list(refs), timeout=WAIT_S)
    return found[0] if len(refs) == 1 else found


def joined(actor_call: Any, num_workers: int) -> Any:
    """The trainer's group. `actor_call` has workers join it."""
    listener = listen("127.0.0.1")
    call = actor_call("127.0.0.1", listener.getsockname()[1], 1, num_workers + 1)
    group = join_weight_group("127.0.0.1", listener, num_workers + 1, WAIT_S)
    get(call)
    return group


def test_openrlhf_updates_one_tensor_after_the_other_in_two_workers(step: Checkpoints) -> None:
    group = placement_group([{"GPU": 1, "CPU": 1}] * 2, strategy="PACK")
    get(group.ready())
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    actor = rollout_workers.OpenRLHFActor.options(scheduling_strategy=strategy).remote(
        [1, 0],
        0.2,
        model=str(step.first),
        worker_extension_cls="rollout_workers.Broadcasts",
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        gpu_memory_utilization=0.5,
        logprobs_mode="processed_logprobs",
        max_logprobs=1,
        **FRAMEWORKS,
        **OPTIONS | {"device": "cuda", "worker_cls": CpuWorker, "kv_cache_memory_bytes": 1 << 24},
    )

    def update() -> None:
        for name, tensor in step.tensors.items():
            call = actor.call.remote("collective_rpc", "update_weight", args=(name, tensor.dtype, tuple(tensor.shape)))
            trainers.broadcast(tensor)
            get(call)

    get(actor.call.remote("sleep", level=1))
    trainers = joined(lambda *args: actor.call.remote("collective_rpc", "init_process_group", args=args), 2)
    get(actor.wake_up.remote())
    output = get(actor.generate.remote(PROMPT, GREEDY)).outputs[0]
    assert list(output.token_ids) == step.before[:NUM_TOKENS]
    assert all(each[token].logprob <= 0 for token, each in zip(output.token_ids, output.logprobs, strict=True))

    # colocated: the cache sleeps while weights come
    get(actor.call.remote("sleep", level=1), actor.call.remote("reset_prefix_cache"))
    get(actor.wake_up.remote(("weights",)))
    update()
    get(actor.wake_up.remote(("kv_cache",)))
    assert list(get(actor.generate.remote(PROMPT, GREEDY)).outputs[0].token_ids) == step.after[:NUM_TOKENS]

    # partial rollouts: requests wait while weights come, here the same again
    get(actor.call.remote("pause_generation", mode="keep"))
    call = actor.generate.remote(PROMPT, LONG)
    eventually(lambda: get(actor.get_num_unfinished_requests.remote()) == 1)
    update()
    assert not ray.wait([call], timeout=0.2)[0]
    get(actor.call.remote("resume_generation"))
    assert list(get(call).outputs[0].token_ids) == step.after
    trainers.close()
    ray.kill(actor)
    remove_placement_group(group)


def test_verl_sends_buckets_while_all_workers_are_called(step: Checkpoints, tmp_path: Path) -> None:
    server = rollout_workers.VerlServer.remote(
        model=str(step.first),
        worker_extension_cls="rollout_workers.Buckets",
        distributed_executor_backend="mp",
        skip_tokenizer_init=False,
        override_generation_config={"temperature": 1.0, "top_p": 1.0, "max_new_tokens": NUM_TOKENS},
        hf_overrides={},
        compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"},
        enable_chunked_prefill=True,
        **FRAMEWORKS,
        **OPTIONS,
    )
    params = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    assert get(server.generate.remote(PROMPT, dict(params), "a"))[0] == step.before[:NUM_TOKENS]
    get(server.sleep.remote())
    assert get(server.is_sleeping.remote()), "the engine knows what its workers were told"
    get(server.collective_rpc.remote("wake_up", kwargs={"tags": ["weights"]}))
    address = str(tmp_path / "trainer.sock")
    with Listener(address, "AF_UNIX") as listener:
        call = server.collective_rpc.remote("update_weights_from_ipc", kwargs={"address": address})
        with listener.accept() as socket:
            pairs = [(name, tensor.numpy()) for name, tensor in step.tensors.items()]
            for bucket in (pairs[:5], pairs[5:]):
                socket.send(bucket)
                assert socket.poll(WAIT_S)
                assert socket.recv()
            socket.send(None)
            get(call)
    get(server.clear_kv_cache.remote())
    get(server.collective_rpc.remote("wake_up", kwargs={"tags": ["kv_cache"]}))
    assert not get(server.is_sleeping.remote())
    tokens, logprobs, reason = get(server.generate.remote(PROMPT, dict(params), "b"))
    assert (tokens, len(logprobs), reason) == (step.after[:NUM_TOKENS], NUM_TOKENS, "length")

    get(server.pause_generation.remote())  # else the request might be finished before it is aborted
    call = server.generate.remote(PROMPT, dict(params), "c")
    eventually(lambda: not get(server.wait_for_requests_to_drain.remote(0)))
    get(server.abort_request.remote("c"))
    assert get(call) == ([], [], "abort")
    assert get(server.wait_for_requests_to_drain.remote(WAIT_S))
    ray.kill(server)


def test_nemo_rl_broadcasts_what_it_has_described(step: Checkpoints) -> None:
    worker = rollout_workers.NemoRLWorker.remote(
        model=str(step.first),
        served_model_name=str(step.first),
        load_format="auto",
        skip_tokenizer_init=False,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enable_expert_parallel=False,
        gpu_memory_utilization=0.5,
        worker_extension_cls="rollout_workers.Broadcasts",
        disable_log_stats=False,
        hf_overrides={},
        distributed_executor_backend=None,
        **FRAMEWORKS,
        **OPTIONS,
    )
    trainers = joined(lambda *args: worker.collective_rpc.remote("init_process_group", *args), 1)
    described = {name: (tuple(each.shape), each.dtype) for name, each in step.tensors.items()}
    get(worker.collective_rpc.remote("prepare_refit_info", described))
    assert get(worker.collective_rpc.remote("max_model_len_of_worker")) == [OPTIONS["max_model_len"]]
    prompts = [PROMPT, PROMPT[:5]]
    assert get(worker.generate.remote(prompts, NUM_TOKENS))[0][0] == step.before[:NUM_TOKENS]
    get(worker.sleep.remote())
    get(worker.wake_up.remote(tags=["weights"]))
    call = worker.collective_rpc.remote("update_weights_from_collective")
    for tensor in step.tensors.values():
        trainers.broadcast(tensor)
    assert get(call) == [True]
    get(worker.wake_up.remote(tags=["kv_cache"]))
    (tokens, logprobs), other = get(worker.generate.remote(prompts, NUM_TOKENS))
    assert tokens == step.after[:NUM_TOKENS]
    assert len(logprobs) == len(other[0]) == NUM_TOKENS
    assert get(worker.generation_tokens.remote()) == 4 * NUM_TOKENS
    assert get(worker.shutdown.remote())
    trainers.close()
    ray.kill(worker)


def test_skyrl_calls_endpoints_and_a_rank_that_is_lost_comes_back_with_the_new_weights(step: Checkpoints) -> None:
    (port,) = free_ports(1)
    server = rollout_workers.SkyRLServer.remote()
    options = {"weight_transfer_config": {"backend": "nccl"}, "generation_config": "vllm", "mm_processor_cache_gb": 0}
    get(server.start.remote(port, "key", model=str(step.first), data_parallel_size=2, **options, **OPTIONS))
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, headers={"Authorization": "Bearer key"}
    ) as client:

        def post(path: str, body: dict[str, Any] | None = None, **query: Any) -> Any:
            response = client.post(path, json=body or {}, params=query)
            assert response.status_code == 200, response.text
            return response.json()

        def generate(num_tokens: int) -> list[int]:
            params = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": 1}
            body = {"model": "policy", "token_ids": PROMPT, "sampling_params": params}
            (choice,) = post("/inference/v1/generate", body)["choices"]
            assert len(choice["logprobs"]["content"]) == num_tokens
            return choice["token_ids"]

        assert client.get("/get_world_size").json()["world_size"] == 2
        assert generate(NUM_TOKENS) == step.before[:NUM_TOKENS]
        listener = listen("127.0.0.1")
        port = listener.getsockname()[1]
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3}
        call = threading.Thread(target=post, args=("/init_weight_transfer_engine", {"init_info": info}))
        call.start()
        trainers = join_weight_group("127.0.0.1", listener, 3, WAIT_S)
        call.join(WAIT_S)
        post("/pause", mode="keep", clear_cache="false")
        post("/start_weight_update")
        send_weights_distributed(
            trainers, lambda info: post("/update_weights", {"update_info": info}), step.tensors.items()
        )
        post("/finish_weight_update")
        post("/reset_prefix_cache", reset_running_requests="true")
        post("/resume")
        assert generate(NUM_TOKENS) == step.after[:NUM_TOKENS]
        assert len(post("/collective_rpc", {"method": "weights_checksum"})["results"]) == 2
        post("/sleep", level=1)
        post("/wake_up", tags=["weights"])
        post("/wake_up", tags=["kv_cache"])
        assert generate(NUM_TOKENS) == step.after[:NUM_TOKENS]
        with ThreadPoolExecutor(4) as pool:
            post("/pause", mode="keep")
            answers = pool.map(generate, [150] * 4)
            eventually(lambda: get(server.state.remote())[0] == 4)
            post("/resume")
            get(server.kill_a_rank.remote())
            assert [*answers] == [step.after] * 4
        eventually(lambda: get(server.state.remote())[1] == ["serving"] * 2, lambda: str(get(server.state.remote())))
        checksums = post("/collective_rpc", {"method": "weights_checksum"})["results"]
        assert len(checksums) == 2
        assert len(set(checksums)) == 1
        trainers.close()
    get(server.shutdown.remote())
    ray.kill(server)
