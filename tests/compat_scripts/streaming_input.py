"""A prompt that comes piece by piece while the engine continues it."""

import asyncio
import os

from vllm import AsyncEngineArgs, SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def last_of(stream):
    async for output in stream:
        last = output
    return last


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=os.environ["MODEL"], max_model_len=256))
    ids = list(engine.tokenizer.encode("27 + 58 ="))
    queue = asyncio.Queue()

    async def pieces():
        while (piece := await queue.get()) is not None:
            yield StreamingInput(prompt=TokensPrompt(prompt_token_ids=piece))

    params = SamplingParams(temperature=0, max_tokens=1, output_kind=RequestOutputKind.DELTA)
    queue.put_nowait(ids[:2])
    seen = []
    async for output in engine.generate(pieces(), params, request_id="streamed"):
        seen.append(output)
        if len(seen) == 1:
            queue.put_nowait(ids[2:])
            queue.put_nowait(None)
    assert [each.finished for each in seen] == [*[False] * (len(seen) - 1), True]
    assert all(each.request_id == "streamed" for each in seen)
    assert seen[-1].prompt_token_ids == ids
    made = [list(each.outputs[0].token_ids) for each in seen]
    whole = await last_of(
        engine.generate(TokensPrompt(prompt_token_ids=ids), SamplingParams(temperature=0, max_tokens=1))
    )
    assert list(whole.outputs[0].token_ids) in made

    async def longer():
        yield StreamingInput("27 + 58 =", SamplingParams(temperature=0, max_tokens=5))
        yield StreamingInput(" 1")

    last = await last_of(engine.generate(longer(), SamplingParams(temperature=0, max_tokens=2)))
    first = await last_of(engine.generate("27 + 58 =", SamplingParams(temperature=0, max_tokens=5)))
    kept = [*ids, *first.outputs[0].token_ids[:-1]]
    assert last.prompt_token_ids[: len(kept)] == kept
    assert last.prompt_token_ids[len(kept) :]
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
