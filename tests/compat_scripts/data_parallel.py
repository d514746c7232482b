"""Two ranks that share the requests."""

import asyncio
import os

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def answer(engine, number):
    params = SamplingParams(temperature=0, max_tokens=8)
    async for output in engine.generate(f"{number} + 11 =", params, f"request-{number}"):
        text = output.outputs[0].text
    return text.strip()


async def main():
    args = AsyncEngineArgs(model=os.environ["MODEL"], max_model_len=256, data_parallel_size=2)
    engine = AsyncLLM.from_engine_args(args)
    try:
        answers = await asyncio.gather(*(answer(engine, number) for number in range(20, 36)))
        assert answers == [str(number + 11) for number in range(20, 36)]
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
