"""Whole experts over the workers of all engines: greedy tokens equal transformers' own, whoever has work and when.

The engines' parts are put together by hand here: executors with real worker processes, cores, and lockstep loops.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from families import NUM_NEW_TOKENS, make_checkpoint, prompts, reference

from raycore.config import resolve
from raycore.engine.core import EngineCore, run_loop
from raycore.engine.lockstep import run_lockstep_loop
from raycore.engine.mailbox import Mailbox, StartWave, Submit
from raycore.engine.waves import Waves
from raycore.executor.ray_executor import RayExecutor
from raycore.messages import HANDLE_CLIENT_SHIFT, EngineRequest, OutputBatch
from raycore.sampling_params import SamplingParams

DEADLINE_S = 60.0
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
# keeps all rows of the prompt through the last layer, where others keep one
WITH_PROMPT_LOGPROBS = msgspec.structs.replace(GREEDY, prompt_logprobs=1)


class Engines:
    """Engines in lockstep, their loops in threads of this process, their workers in processes of their own."""

    def __init__(self, ray, config):
        parallel = config.parallel
        size, world_size = parallel.data_parallel_size, parallel.world_size
        self.ray = ray
        self.groups = [ray.util.placement_group([{"CPU": 1}] * world_size) for _ in range(size)]
        executors = [RayExecutor(config, rank, group, size * world_size) for rank, group in enumerate(self.groups)]
        meeting = executors[0].ep_meeting() if parallel.is_lockstep else None
        for executor in executors:
            executor.ep_init = meeting
        self.pool = ThreadPoolExecutor(size)
        self.clients = ThreadPoolExecutor(16)
        self.cores = list(self.pool.map(lambda executor: EngineCore(config, executor), executors))
        self.mailboxes = [Mailbox() for _ in range(size)]
        self.waves = [Waves(parallel.dp_sync_interval) for _ in range(size)]
        self.loops = [self.pool.submit(self._run, rank) for rank in range(size)]
        self.num_clients = 0

    def _run(self, rank: int) -> None:
        core, mailbox = self.cores[rank], self.mailboxes[rank]
        try:
            if core.config.parallel.is_lockstep:
                run_lockstep_loop(core, mailbox, self.waves[rank], lambda wave: self._tell_peers(rank, wave))
            else:
                run_loop(core, mailbox)
        finally:
            mailbox.close()

    def _tell_peers(self, rank: int, wave: int) -> None:
        for peer, mailbox in enumerate(self.mailboxes):
            if peer != rank:
                threading.Timer(0.002, mailbox.put, [StartWave(wave)]).start()

    def generate(self, rank: int, prompt: list[int], params: SamplingParams = GREEDY) -> Future[list[int]]:
        self.num_clients += 1
        return self.clients.submit(self._generate, rank, self.num_clients << HANDLE_CLIENT_SHIFT, prompt, params)

    def _generate(self, rank: int, handle: int, prompt: list[int], params: SamplingParams) -> list[int]:
        self.mailboxes[rank].put(Submit([EngineRequest(handle, str(handle), prompt, params, seed=0)]))
        tokens: list[int] = []
        for data in self.mailboxes[rank].outputs(handle >> HANDLE_CLIENT_SHIFT):
            batch = msgspec.msgpack.decode(data, type=OutputBatch)
            tokens += np.frombuffer(batch.token_ids, np.int32).tolist()
            if batch.finished:
                return tokens
        raise AssertionError("the engine stopped")

    def close(self) -> None:
        for mailbox in self.mailboxes:
            mailbox.stop()
        try:
            for loop in self.loops:
                loop.result(DEADLINE_S)
        finally:
            for core in self.cores:
                core.shutdown()
            for group in self.groups:
                self.ray.util.remove_placement_group(group)
            self.clients.shutdown(wait=False)
            self.pool.shutdown(wait=False)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def checkpoint(request, tmp_path_factory):
    path = make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoints"))
    return path, reference(path)


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (2, 2)])
def test_tokens_are_the_references_whoever_has_work(ray_cluster, checkpoint, dp, tp):
    path, expected = checkpoint
    config = resolve(
        str(path),
        dtype="float32",
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        enable_expert_parallel=True,
        dp_sync_interval=dp,
        executor_backend="ray",
        num_threads=1,
        max_num_seqs=8,
        block_size=8,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=12,
    )
    engines = Engines(ray_cluster, config)
    try:
        rng = random.Random(dp)
        for only in (0, dp - 1, None, None):  # one engine has work, then the other, then both, unevenly
            for params in (GREEDY, WITH_PROMPT_LOGPROBS):
                ranks = [rng.randrange(dp) if only is None else only for _ in expected]
                asked = zip(ranks, prompts(), strict=True)
                waiting = [engines.generate(rank, prompt, params) for rank, prompt in asked]
                assert [future.result(DEADLINE_S) for future in waiting] == expected
        for core in engines.cores:
            core.scheduler.check_integrity()
    finally:
        engines.close()
    assert len({waves.num_completed for waves in engines.waves}) == 1
    assert not any(waves.is_running for waves in engines.waves)
    assert bool(engines.waves[0].num_completed) == (dp > 1)
