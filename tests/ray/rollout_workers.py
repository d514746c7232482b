"""Rollout workers that make the calls of training frameworks: what frameworks' actors and workers' methods do.

`vllm` is raycore's, from the import in each constructor on: Ray sends these classes without their module.
"""

from __future__ import annotations

import asyncio
import os
import signal
from importlib import import_module
from multiprocessing.connection import Client
from typing import Any

import ray
import torch

from raycore.parts.weights.transfer.group import WeightGroup

TIMEOUT_S = 60


class Broadcasts:
    """Methods of workers, as in OpenRLHF and NeMo-RL: tensors come by broadcasts of a group with the trainer."""

    def init_process_group(self: Any, address: str, port: int, rank_offset: int, world_size: int) -> None:
        number = torch.tensor([int(self.rank)])
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)  # as torch's default group is of workers
        assert number.item() == torch.distributed.get_world_size() - 1
        rank = torch.distributed.get_rank() + rank_offset
        self.update_group = WeightGroup(address, port, rank, world_size, TIMEOUT_S, self.device)

    def update_weight(self: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        assert dtype == self.model_config.dtype
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self.update_group.broadcast(tensor)
        self.model_runner.model.load_weights(weights=[(name, tensor)])

    def prepare_refit_info(self: Any, described: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.described = described

    def update_weights_from_collective(self: Any) -> bool:
        for name, (shape, dtype) in self.described.items():
            self.update_weight(name, dtype, shape)
        return True

    def max_model_len_of_worker(self: Any) -> int:
        return self.model_runner.vllm_config.model_config.max_model_len

    def cleanup(self: Any) -> None:
        self.update_group.close()


class Buckets:
    """A method of workers, as in verl: buckets come over a socket of the node, from the trainer."""

    def update_weights_from_ipc(self: Any, address: str) -> None:
        with Client(address, "AF_UNIX") as socket:
            while bucket := socket.recv():
                self.model_runner.model.load_weights([(name, torch.from_numpy(each)) for name, each in bucket])
                socket.send(True)


@ray.remote(num_cpus=0)
class OpenRLHFActor:
    """Has an async engine in bundles that variables of the environment name."""

    async def __init__(self, bundle_indices: list[int], num_gpus: float, **kwargs: Any) -> None:
        import_module("raycore.compat.vllm")  # from here on, `vllm` is raycore's
        import vllm

        os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(num_gpus)
        os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, bundle_indices))
        os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_USE_V1": "1"}
        self.llm = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**kwargs))
        await self.llm.is_sleeping()

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.llm, name)(*args, **kwargs)

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        for tag in tags:
            await self.llm.wake_up(tags=[tag])

    async def generate(self, token_ids: list[int], sampling_params: Any) -> Any:
        from vllm.inputs import TokensPrompt
        from vllm.utils import random_uuid

        prompt = TokensPrompt(prompt_token_ids=token_ids)
        return [each async for each in self.llm.generate(prompt, sampling_params, request_id=random_uuid())][-1]

    def get_num_unfinished_requests(self) -> int:
        return self.llm.output_processor.get_num_unfinished_requests()


@ray.remote(num_cpus=0)
class VerlServer:
    """Has an async engine on what its actor holds, and calls workers by `collective_rpc`."""

    async def __init__(self, **kwargs: Any) -> None:
        import_module("raycore.compat.vllm")  # from here on, `vllm` is raycore's
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        context = UsageContext.OPENAI_API_SERVER
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**kwargs), usage_context=context)
        await self.engine.reset_mm_cache()

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> None:
        await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)

    async def generate(self, prompt_ids: list[int], params: dict[str, Any], request_id: str) -> tuple[Any, ...]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        outputs = self.engine.generate(
            prompt=TokensPrompt(prompt_token_ids=prompt_ids, multi_modal_data={}),
            sampling_params=SamplingParams(logprobs=0, repetition_penalty=1.0, **params),
            request_id=request_id,
            lora_request=None,
            priority=0,
        )
        (output,) = [each async for each in outputs][-1].outputs
        logprobs = [each[output.token_ids[i]].logprob for i, each in enumerate(output.logprobs or [])]
        return list(output.token_ids), logprobs, output.finish_reason

    async def sleep(self) -> None:
        await self.engine.wait_for_requests_to_drain()
        await self.engine.collective_rpc("sleep", kwargs={"level": 2})

    async def is_sleeping(self) -> bool:
        return await self.engine.is_sleeping()

    async def clear_kv_cache(self) -> None:
        await self.engine.reset_prefix_cache()

    async def pause_generation(self) -> None:
        await self.engine.pause_generation(mode="keep")

    async def abort_request(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def wait_for_requests_to_drain(self, drain_timeout: float) -> bool:
        try:
            await self.engine.wait_for_requests_to_drain(drain_timeout)
        except TimeoutError:
            return False
        return True


@ray.remote(num_cpus=0)
class NemoRLWorker:
    """Has a blocking engine."""

    def __init__(self, **kwargs: Any) -> None:
        import_module("raycore.compat.vllm")  # from here on, `vllm` is raycore's
        import vllm

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.llm = vllm.LLM(**kwargs)

    def collective_rpc(self, name: str, *args: Any) -> list[Any]:
        return self.llm.collective_rpc(name, args=args)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[float]]]:
        import vllm

        params = vllm.SamplingParams(
            temperature=0.0,
            top_p=1.0,
            top_k=1,
            max_tokens=max_tokens,
            logprobs=0,
            stop_token_ids=None,
            stop=None,
            include_stop_str_in_output=True,
            bad_words=None,
            ignore_eos=True,
        )
        given = [{"prompt_token_ids": each} for each in prompts]
        outputs = [each.outputs[0] for each in self.llm.generate(given, [params] * len(given), use_tqdm=False)]
        assert len(prompts[0]) + max_tokens <= self.llm.llm_engine.model_config.max_model_len
        return [
            (
                list(each.token_ids),
                [step[token].logprob for token, step in zip(each.token_ids, each.logprobs, strict=True)],
            )
            for each in outputs
        ]

    def sleep(self) -> None:
        self.llm.llm_engine.reset_prefix_cache()
        self.llm.sleep(level=1)

    def wake_up(self, **kwargs: Any) -> None:
        self.llm.wake_up(**kwargs)

    def generation_tokens(self) -> float:
        (metric,) = [each for each in self.llm.get_metrics() if each.name == "vllm:generation_tokens"]
        return metric.value

    def shutdown(self) -> bool:
        self.llm.collective_rpc("cleanup", args=())
        del self.llm
        return True


@ray.remote(num_cpus=0)
class SkyRLServer:
    """Serves an engine over HTTP from its own event loop."""

    async def start(self, port: int, key: str, **kwargs: Any) -> None:
        import uvicorn

        from raycore import AsyncLLM
        from raycore.server.app import build_app
        from raycore.server.options import server_options

        self.engine = await AsyncLLM.create(**kwargs)
        app = build_app(self.engine, server_options("policy", {"enable_admin_endpoints": True, "api_key": [key]}))
        self.server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
        self.task = asyncio.create_task(self.server.serve())
        while not self.server.started:
            assert not self.task.done()
            await asyncio.sleep(0.05)

    async def kill_a_rank(self) -> None:
        os.kill(self.engine.engine_infos[1].worker_pids[-1], signal.SIGKILL)

    async def state(self) -> tuple[int, list[str]]:
        return self.engine.get_num_unfinished_requests(), [str(rank.state) for rank in self.engine.ranks]

    async def shutdown(self) -> None:
        self.server.should_exit = True
        await self.task
        await asyncio.to_thread(self.engine.shutdown)
