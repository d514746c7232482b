"""What a caller tells a connector of the user's, and what that answers, through a whole engine and its server."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from asgi_client import Client
from number_formats import DTYPE

from raycore import AsyncLLM, RequestOutput, SamplingParams
from raycore.demo import demo_model_path
from raycore.server import ServerOptions, build_app

TOLD = {"a": [1, {"b": None}]}
MESSAGES = [{"role": "user", "content": "a"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [15, 16], "n": 2, "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "n": 2, "max_tokens": 4},
    "/v1/responses": {"input": "a", "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4, "model": "demo"},
    "/inference/v1/generate": {"token_ids": [15, 16], "sampling_params": {"n": 2, "max_tokens": 4}},
}
OPTIONS: dict[str, Any] = {
    "num_threads": 1,
    "max_model_len": 256,
    "dtype": DTYPE,
    "kv_transfer_config": {
        "kv_connector": "AnsweringConnector",
        "kv_connector_module_path": "answering_connector",
        "kv_connector_extra_config": {"greeting": "hello"},
    },
}


def test_a_connector_of_the_users_hears_callers_and_answers_them(ray_cluster: Any) -> None:
    async def scenario() -> None:
        async with AsyncLLM(demo_model_path(), data_parallel_size=2, **OPTIONS) as llm:
            await _doors(llm)
            await _a_dead_rank(llm)

    asyncio.run(scenario())


async def _doors(llm: AsyncLLM) -> None:
    client = Client(build_app(llm, ServerOptions(("demo",))))
    for path, body in DOORS.items():
        answer = (await client.call("POST", path, body | {"kv_transfer_params": TOLD})).json
        told = [answer["kv_transfer_params"], *(each["kv_transfer_params"] for each in answer.get("choices", ()))]
        assert len(told) == (3 if "choices" in answer else 1)
        assert [each["heard"] for each in told] == [TOLD] * len(told)
        silent = (await client.call("POST", path, body)).json
        assert silent["kv_transfer_params"]["heard"] is None
        refused = await client.call("POST", path, body | {"kv_transfer_params": {"bad": 1}})
        assert refused.status == 400
        assert "bad isn't known here" in refused.json["error"]["message"]


async def _a_dead_rank(llm: AsyncLLM) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=150, ignore_eos=True, extra_args={"kv_transfer_params": TOLD})
    victim = llm.engine_infos[1].pid
    outputs: list[RequestOutput] = []
    async for output in llm.generate({"prompt_token_ids": [15, 16, 17]}, params, data_parallel_rank=1):
        outputs.append(output)
        if len(outputs) == 5:
            os.kill(victim, signal.SIGKILL)
    output = outputs[-1]
    told = [each.kv_transfer_params for each in output.outputs]
    assert output.kv_transfer_params == told[0]
    for each, sequence in zip(told, output.outputs, strict=True):
        assert each is not None
        assert (each["heard"], each["last_token"]) == (TOLD, sequence.token_ids[-1])
        assert each["pid"] != victim
