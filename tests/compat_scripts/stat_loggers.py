"""A class of the script's that gets the engine's figures."""

import asyncio
import os
import time
import typing

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot
from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class Figures(StatLoggerBase):
    made: typing.ClassVar[list] = []

    def __init__(self, vllm_config, engine_index=0):
        self.max_model_len = vllm_config.model_config.max_model_len
        self.engine_index = engine_index
        self.started = False
        self.logs = 0
        self.tokens = self.prompts = 0
        self.finished = []
        self.made.append(self)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        assert isinstance(scheduler_stats, SchedulerStats)
        assert isinstance(iteration_stats, IterationStats)
        assert 0.0 <= scheduler_stats.kv_cache_usage <= 1.0
        assert engine_idx == self.engine_index
        self.tokens += iteration_stats.num_generation_tokens
        self.prompts += iteration_stats.num_prompt_tokens
        self.finished += iteration_stats.finished_requests

    def log_engine_initialized(self):
        self.started = True

    def log(self):
        self.logs += 1


async def main():
    args = AsyncEngineArgs(model=os.environ["MODEL"], max_model_len=256, disable_log_stats=False)
    engine = AsyncLLM.from_engine_args(args, stat_loggers=[Figures, RayPrometheusStatLogger])
    (figures,) = Figures.made
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    async for output in engine.generate("27 + 58 =", params, request_id="1"):
        num_prompt = len(output.prompt_token_ids)
    deadline = time.monotonic() + 60
    while not figures.finished and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    await engine.do_log_stats()
    while not figures.logs and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert figures.started
    assert (figures.max_model_len, figures.tokens, figures.prompts) == (256, 6, num_prompt)
    (finished,) = figures.finished
    assert str(finished.finish_reason) == "length"
    assert (finished.num_prompt_tokens, finished.num_generation_tokens) == (num_prompt, 6)
    assert finished.e2e_latency >= finished.inference_time >= finished.decode_time > 0
    assert figures.logs == 1
    (generated,) = [each for each in get_metrics_snapshot() if each.name == "vllm:generation_tokens"]
    assert isinstance(generated, Counter)
    assert generated.value == 6
    engine.shutdown()
    assert get_metrics_snapshot() == []


if __name__ == "__main__":
    asyncio.run(main())
