"""Several prompts as one stream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from raycore.client.ask import Ask
from raycore.client.inputs import ParsedPrompt
from raycore.sampling_params import SamplingParams
from raycore.server.generation.jobs import Job, run_streaming


def test_a_slow_reader_of_several_requests_gets_only_the_newest_outputs(engine):
    async def read():
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        jobs = [Job(Ask(ParsedPrompt(None, [5, 6, 7]), params, str(i)), params) for i in range(3)]
        lengths = {job.request_id: [] for job in jobs}
        async with aclosing(run_streaming(engine, jobs)) as outputs:
            async for output in outputs:
                lengths[output.request_id].append(len(output.outputs[0].token_ids))
                for _ in range(20):  # steps of the engine for each look
                    await asyncio.sleep(0)
        return lengths

    for lengths in asyncio.run(read()).values():
        assert lengths == sorted(set(lengths))
        assert lengths[-1] == 100
        assert len(lengths) < 20
    assert engine.num_underway == 0
