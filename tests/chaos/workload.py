"""Mixed requests, and what came of them."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from raycore import AsyncLLM, LoRARequest, PoolingParams, RequestFailed, SamplingParams
from raycore.demo import held_out_problems
from raycore.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput


class Request(NamedTuple):
    prompt: str | dict[str, Any]
    """A text, or one with images."""
    params: SamplingParams
    is_stream: bool
    """Whether the times of its outputs are noted."""
    adapter: LoRARequest | None = None
    pooling: PoolingParams | None = None
    """What it gets instead of tokens."""


@dataclass
class Stream:
    """The outputs of a streaming request."""

    times_s: list[float] = field(default_factory=list)
    dp_rank: int | None = None
    """The rank of the latest output."""


@dataclass
class Result:
    token_ids: list[list[int]]
    texts: list[str]
    logprobs: list[Any]
    reasons: list[Any]
    aborted: list[Result] = field(default_factory=list, compare=False)
    """What came of it before, each time that it was aborted and submitted again."""

    @staticmethod
    def of(output: RequestOutput) -> Result:
        parts = output.outputs
        return Result(
            [part.token_ids for part in parts],
            [part.text for part in parts],
            [part.logprobs for part in parts],
            [(part.finish_reason, part.stop_reason) for part in parts],
        )

    @staticmethod
    def of_pooled(output: PoolingRequestOutput[PoolingOutput]) -> Result:
        """The bytes of a result that isn't tokens stand in the place of log probabilities."""
        data = output.outputs.data
        return Result([], [], [(data.shape, data.tobytes())], [("stop", None)])

    @property
    def is_aborted(self) -> bool:
        """Whether any of its sequences was."""
        return any(reason == "abort" for reason, _ in self.reasons)

    def begins(self, whole: Result) -> bool:
        """Whether each sequence that was aborted is the beginning of that in `whole`, and the others are the same."""
        return all(
            ours == theirs[: len(ours)] if reason == ("abort", None) else (ours, reason) == (theirs, whole_reason)
            for ours, reason, theirs, whole_reason in zip(
                self.token_ids, self.reasons, whole.token_ids, whole.reasons, strict=True
            )
        )


def make_requests(
    count: int,
    seed: int,
    all_logprobs: bool = False,
    adapters: Sequence[LoRARequest] = (),
    num_prefixes: int = 0,
) -> list[Request]:
    """Greedy and seeded requests of many lengths. All, or some, request the two most likely tokens.

    Args:
        adapters: requests use these in turn, and none.
        num_prefixes: each prompt begins with one of so many long texts.
    """
    prefixes = ["".join(f"{a} + {b} = {a + b}\n" for b in range(20)) for a in range(num_prefixes)] or [""]
    in_turn = [None, *adapters]
    rnd = random.Random(seed)
    problems = [prompt for prompt, _ in held_out_problems(3, 200)]
    requests: list[Request] = []
    for i in range(count):
        shots = "".join(f"{a} + {a} = {2 * a}\n" for a in rnd.sample(range(99), rnd.randrange(9)))
        params: dict[str, Any] = {"max_tokens": rnd.randrange(60, 400), "ignore_eos": True}
        params |= {"temperature": 0.0} if rnd.random() < 0.5 else {"temperature": 0.9, "seed": i, "top_p": 0.95}
        if rnd.random() < 0.3 or all_logprobs:
            params["logprobs"] = 2
        if rnd.random() < 0.2:
            params["stop"] = ["7 7", "99", "\n5"]
        if "seed" in params and rnd.random() < 0.2:
            params["n"] = 2
        prompt = prefixes[i % len(prefixes)] + shots + rnd.choice(problems)
        adapter = in_turn[i % len(in_turn)]
        requests.append(Request(prompt, SamplingParams(**params), rnd.random() < 0.6, adapter))
    return requests


def make_pooled_requests(count: int, seed: int, adapters: Sequence[LoRARequest] = ()) -> list[Request]:
    """Requests for embeddings of texts of many lengths, or of all their tokens. `adapters`: as in `make_requests`."""
    kinds = [
        PoolingParams(task="embed"),
        PoolingParams(task="token_embed"),
        PoolingParams(task="embed", use_activation=False),
    ]
    rnd = random.Random(seed)
    return [
        request._replace(
            prompt=str(request.prompt) * rnd.randrange(1, 4),
            params=SamplingParams(),
            is_stream=False,
            pooling=kinds[i % 3],
        )
        for i, request in enumerate(make_requests(count, seed, adapters=adapters))
    ]


def make_image_requests(count: int, seed: int, placeholder: str) -> list[Request]:
    """Requests of many lengths about one image or two, some of which several requests have.

    `placeholder`: what stands for an image in a text.
    """
    rnd = random.Random(seed)
    images = [
        np.frombuffer(rnd.randbytes(3 * rows * columns), np.uint8).reshape(rows, columns, 3)
        for rows, columns in ((rnd.randrange(60, 220), rnd.randrange(60, 220)) for _ in range(12))
    ]
    requests: list[Request] = []
    for request in make_requests(count, seed):
        chosen = rnd.sample(images, rnd.randrange(1, 3))
        text = placeholder.join([str(request.prompt)[-100:], *(f" {index} " for index in range(len(chosen)))])
        requests.append(request._replace(prompt={"prompt": text, "multi_modal_data": {"image": chosen}}))
    return requests


async def run_all(
    llm: AsyncLLM, requests: Sequence[Request], concurrency: int, streams: dict[str, Stream], first_id: int = 0
) -> list[Result | Exception]:
    """The result of each request, or its error. A request that is aborted is submitted again."""
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int) -> Result | Exception:
        async with gate:
            try:
                return await _finish(llm, requests[index], f"request-{first_id + index}", streams)
            except Exception as error:
                return error

    return await asyncio.gather(*map(one, range(len(requests))))


async def _finish(llm: AsyncLLM, request: Request, request_id: str, streams: dict[str, Stream]) -> Result:
    aborted: list[Result] = []
    for attempt in itertools.count():
        output, name = None, f"{request_id}-{attempt}"
        if request.pooling is not None:
            try:
                async for each in llm.encode(
                    request.prompt, request.pooling, name, request.adapter, truncate_prompt_tokens=-1
                ):
                    return Result.of_pooled(each)
            except RequestFailed as error:
                if "was aborted" not in str(error):
                    raise
            continue
        async for output in llm.generate(request.prompt, request.params, name, lora_request=request.adapter):
            if request.is_stream:
                stream = streams.setdefault(request_id, Stream())
                stream.times_s.append(time.monotonic())
                stream.dp_rank = None if output.trace is None else output.trace.dp_rank
        assert output is not None
        result = Result.of(output)
        if not result.is_aborted:
            result.aborted = aborted
            return result
        aborted.append(result)
    raise AssertionError
