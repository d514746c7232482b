"""Streams only what is new."""

import asyncio
import os

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=os.environ["MODEL"], max_model_len=256))
    kinds = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
    outputs = {}
    for kind in kinds:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, output_kind=kind)
        outputs[kind] = [
            each async for each in engine.generate(request_id=kind.name, prompt="27 + 58 =", sampling_params=params)
        ]
    deltas, cumulative, final = outputs.values()
    assert "".join(each.outputs[0].text for each in deltas) == final[0].outputs[0].text
    assert sum(len(each.outputs[0].token_ids) for each in deltas) == 20
    assert cumulative[-1].outputs[0].text == final[0].outputs[0].text
    assert len(final) == 1
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
