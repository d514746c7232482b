"""An engine that only encodes images, and one that takes its embeddings: each image is encoded once, for both."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from image_prompts import GREEDY, Case, make_case
from openai_servers import KEY, raycore_server
from vision_checkpoints import IMAGE, QWEN3, image
from waiting import eventually

from raycore import LLM, AsyncLLM, SamplingParams
from raycore.errors import InvalidRequest

TEXT = f"What is in this image? {IMAGE} Describe it.".replace(IMAGE, "<|vision_start|><|image_pad|><|vision_end|>")
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "standby_delay_s": None}
ONE_TOKEN = SamplingParams(max_tokens=1)
PROXY = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "image_proxy.py"))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(QWEN3, tmp_path_factory.mktemp("images"))


def shared(folder: Path, role: str) -> dict[str, Any]:
    return {"ec_connector": "ECStoreConnector", "ec_connector_extra_config": {"path": str(folder)}, "ec_role": role}


def start(case: Case, folder: Path, role: str, **options: Any) -> LLM:
    return LLM(str(case.path), ec_transfer_config=shared(folder, role), **OPTIONS, **options)


def prompts(*seeds: int) -> list[dict[str, Any]]:
    return [{"prompt": TEXT, "multi_modal_data": {"image": image(120, 90, seed)}} for seed in seeds]


def counter() -> Any:
    """What workers call. It is nested, so that it is pickled by value: workers can't import this module."""

    def counts_of(worker: Any) -> tuple[int, int]:
        store = worker._core.runner._source.images._store
        return store.num_loaded, store.num_saved

    return counts_of


def counts(llm: LLM) -> tuple[int, int]:
    """How many embeddings all workers have loaded and saved."""
    loaded, saved = zip(*llm.collective_rpc(counter()), strict=True)
    return sum(loaded), sum(saved)


def tokens(llm: LLM, *seeds: int) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts(*seeds), GREEDY, use_tqdm=False)]


@pytest.mark.timeout(240)
def test_images_are_encoded_elsewhere_and_killed_encoders_cost_no_token(ray_cluster, case: Case, tmp_path: Path):
    with (
        start(case, tmp_path, "ec_producer", data_parallel_size=2) as encoders,
        start(case, tmp_path, "ec_consumer") as llm,
    ):
        encoders.generate(prompts(0), ONE_TOKEN, use_tqdm=False)
        assert counts(encoders) == (0, 1)
        assert tokens(llm, 0) == case.expected[:1]
        assert counts(llm) == (1, 0)
        with pytest.raises(InvalidRequest, match="only encodes images"):
            encoders.generate(prompts(0), GREEDY, use_tqdm=False)
        # each engine has a number of ranks of its own
        encoders.scale(1)
        assert (len(encoders.engine_infos), len(llm.engine_infos)) == (1, 1)
        # an image that nobody has encoded is encoded by the engine that needs it
        victim = encoders.engine_infos[0].pid
        os.kill(victim, signal.SIGKILL)
        llm.reset_prefix_cache()
        assert tokens(llm, 0, 1) == case.expected[:2]
        assert counts(llm) == (1, 0), "workers have the first one still"
        # what takes the rank's place offers embeddings again
        assert eventually(lambda: [info.pid for info in encoders.engine_infos] not in ([], [victim]))
        encoders.generate(prompts(2, 3), ONE_TOKEN, use_tqdm=False)
        assert counts(encoders) == (0, 2)
        expected = tokens(llm, 2, 3)
        assert counts(llm) == (3, 0)
    with LLM(str(case.path), **OPTIONS) as alone:
        assert tokens(alone, 2, 3) == expected


@pytest.mark.timeout(240)
def test_workers_that_divide_the_encoder_take_each_others_embeddings_also_after_sleep(
    ray_cluster, case: Case, tmp_path: Path
):
    sizes = {"tensor_parallel_size": 2}
    with (
        start(case, tmp_path, "ec_producer", **sizes) as encoders,
        start(case, tmp_path, "ec_consumer", **sizes) as llm,
    ):
        for level in (1, 2):
            encoders.sleep(level)
            encoders.wake_up()
            encoders.generate(prompts(level - 1), ONE_TOKEN, use_tqdm=False)
        assert tokens(llm, 0, 1) == case.expected[:2]
        assert counts(llm) == (4, 0), "two for each worker"


def picture_part(seed: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    image(120, 90, seed).save(buffer, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"},
    }


@pytest.mark.timeout(240)
def test_a_proxy_has_images_encoded_first(ray_cluster, case: Case, tmp_path: Path):
    content = [picture_part(0), {"type": "text", "text": "What is in these images?"}, picture_part(1)]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    async def ask(client: TestClient[Any, Any], model: str, key: str) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        answer = await client.post("/v1/chat/completions", json={**body, "model": model}, headers=headers)
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["message"]["content"]

    async def answers() -> None:
        async with (
            await AsyncLLM.create(str(case.path), ec_transfer_config=shared(tmp_path, "ec_producer"), **OPTIONS) as one,
            await AsyncLLM.create(str(case.path), ec_transfer_config=shared(tmp_path, "ec_consumer"), **OPTIONS) as two,
        ):
            with raycore_server(one) as encoder, raycore_server(two) as engine:
                app = PROXY["make_app"]([encoder.root], [engine.root])
                async with TestClient(TestServer(app)) as client:
                    found = await ask(client, engine.model, KEY)
                assert await one.collective_rpc(counter()) == [(0, 2)]
                assert await two.collective_rpc(counter()) == [(2, 0)]
                # without an encoder, images are encoded by the engine
                await two.reset_prefix_cache()
                await two.reset_encoder_cache()
                for file in tmp_path.rglob("*.kv"):
                    file.unlink()
                app = PROXY["make_app"](["http://127.0.0.1:9"], [engine.root])
                async with TestClient(TestServer(app)) as client:
                    assert await ask(client, engine.model, KEY) == found

    asyncio.run(answers())
