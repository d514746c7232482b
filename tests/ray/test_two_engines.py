"""Two engines behind the examples' proxy: one computes prompts, the other one generates what follows."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from number_formats import DTYPE
from two_engines import proxied, served

from raycore import AsyncLLM
from raycore.demo import demo_model_path
from raycore.parts.transfers.worker import WorkerTransfers

CHANCE = random.Random(7)
PROMPTS = [[CHANCE.randrange(10, 90) for _ in range(length)] for length in (70, 150, 260, 333)]
ASKED = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PATH = "/v1/completions"
Tokens = list[int]


def engine(role: str, secret_file: Path) -> AsyncLLM:
    extra = {"secret_file": str(secret_file), "min_fetch_tokens": 16}
    return AsyncLLM(
        demo_model_path(),
        num_threads=1,
        max_model_len=512,
        dtype=DTYPE,
        block_size=16,
        batch_invariant=True,
        kv_transfer_config={
            "kv_connector": "DisaggregationConnector",
            "kv_role": role,
            "engine_id": role,
            "kv_connector_extra_config": extra,
        },
    )


class Caller:
    """Asks engines, or the proxy."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def post(self, url: str, path: str = PATH, **body: Any) -> tuple[int, Any]:
        async with self._session.post(url + path, json=ASKED | body) as answer:
            return answer.status, await answer.json()

    async def tokens(self, url: str, prompt: Tokens, **body: Any) -> Tokens:
        status, answer = await self.post(url, prompt=prompt, **body)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    async def streamed(self, url: str, prompt: Tokens) -> Tokens:
        found: Tokens = []
        async with self._session.post(url + PATH, json=ASKED | {"prompt": prompt, "stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    found += json.loads(line[6:])["choices"][0]["token_ids"]
        return found

    async def all_tokens(self, url: str) -> list[Tokens]:
        asks = [self.streamed if index % 2 else self.tokens for index in range(len(PROMPTS))]
        return await asyncio.gather(*(ask(url, prompt) for ask, prompt in zip(asks, PROMPTS, strict=True)))


async def counts(llm: AsyncLLM) -> Counter[str]:
    def of_worker(worker: Any) -> Counter[str]:
        return worker._parts[WorkerTransfers].connector.counts

    return sum((Counter(each) for each in await llm.collective_rpc(of_worker)), Counter[str]())


def test_prompts_are_computed_in_one_engine_and_go_on_in_another(ray_cluster: Any, tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text("a secret of both engines")

    async def scenario() -> None:
        async with (
            engine("kv_producer", secret_file) as first,
            engine("kv_consumer", secret_file) as second,
            served(first) as prefill,
            served(second) as decode,
            proxied(prefill, decode) as proxy,
            ClientSession() as session,
        ):
            caller = Caller(session)
            expected = [await caller.tokens(decode, prompt) for prompt in PROMPTS]
            await second.reset_prefix_cache()
            assert await caller.all_tokens(proxy) == expected
            found = await counts(second)
            assert (found["read"], found["failed"]) == (sum(len(prompt) // 16 for prompt in PROMPTS), 0)
            chat = {"messages": [{"role": "user", "content": "a word " * 20}]}
            answers = [await caller.post(url, "/v1/chat/completions", **chat) for url in (proxy, decode)]
            assert answers[0][1]["choices"] == answers[1][1]["choices"]
            assert (await counts(second))["fetches"] == len(PROMPTS) + 1
            await _forgeries(caller, prefill, decode)
            # the first engine's rank dies when it has answered, and then all of it is gone
            await second.reset_prefix_cache()
            told = await _told(caller, prefill, PROMPTS[3])
            os.kill(first.engine_infos[0].pid, signal.SIGKILL)
            assert await caller.tokens(decode, PROMPTS[3], kv_transfer_params=told) == expected[3]
            assert await caller.all_tokens(proxy) == expected
            await second.reset_prefix_cache()
            async with proxied("http://127.0.0.1:9", decode) as lonely:
                assert await caller.all_tokens(lonely) == expected

    asyncio.run(scenario())


async def _told(caller: Caller, prefill: str, prompt: Tokens) -> dict[str, Any]:
    status, answer = await caller.post(
        prefill, prompt=prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
    )
    assert status == 200
    return answer["kv_transfer_params"]


async def _forgeries(caller: Caller, prefill: str, decode: str) -> None:
    told = await _told(caller, prefill, PROMPTS[0])
    assert told.keys() == {"do_remote_prefill", "remote_engine_id", "remote_ticket"}
    assert told["remote_engine_id"] == "kv_producer"
    ticket = told["remote_ticket"]
    changed = ticket[:40] + ("A" if ticket[40] != "A" else "B") + ticket[41:]
    for forged in (
        {"remote_ticket": "unknown"},
        {"remote_ticket": changed},
        {"remote_host": "10.0.0.7", "remote_port": 5600},
        {"remote_workers": ["an address"]},
        {"remote_engine_id": "another"},
    ):
        status, answer = await caller.post(decode, prompt=PROMPTS[0], kv_transfer_params=told | forged)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["message"].startswith("kv_transfer_params")
    status, answer = await caller.post(prefill, prompt=PROMPTS[0], kv_transfer_params=told)
    assert (status, "kv_producer" in answer["error"]["message"]) == (400, True)
