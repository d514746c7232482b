"""Streams the outputs of several requests from the asynchronous engine, and aborts one."""

import asyncio
import os

from vllm import AsyncEngineArgs, SamplingParams
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.utils import random_uuid


async def answer(engine, prompt):
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = [output.outputs[0].text async for output in engine.generate(prompt, params, random_uuid())]
    assert texts == sorted(texts, key=len)
    return texts[-1].strip()


async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=os.environ["MODEL"], max_model_len=256))
    try:
        answers = await asyncio.gather(*(answer(engine, f"{number} + 11 =") for number in range(20, 30)))
        assert answers == [str(number + 11) for number in range(20, 30)]
        long = engine.generate("1 + 1 =", SamplingParams(max_tokens=200, ignore_eos=True), "long")
        async for output in long:
            if not output.finished:
                await engine.abort("long")
        assert output.outputs[0].finish_reason == "abort"
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
