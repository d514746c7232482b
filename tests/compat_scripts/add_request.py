"""Adds a request to the asynchronous engine, and takes its outputs one by one."""

import asyncio
import os

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def take(engine, request_id, params):
    stream = await engine.add_request(request_id, "27 + 58 =", params)
    lengths, output = [], None
    while output is None or not output.finished:
        output = await stream.get()
        lengths.append(len(output.outputs[0].token_ids))
    return lengths, output


async def main():
    args = AsyncEngineArgs(model=os.environ["MODEL"], max_model_len=256, stream_interval=10)
    engine = AsyncLLM.from_engine_args(args)
    try:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (lengths, output), (others, _) = await asyncio.gather(take(engine, "a", params), take(engine, "b", params))
        assert output.request_id.startswith("a")
        assert output.outputs[0].text.strip().startswith("85")
        # the first token, then about ten at a time
        assert len(lengths) <= 4, lengths
        assert lengths[-1] == others[-1] == 24
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
