"""Engines that pool, with several workers and ranks: results are transformers' own, also after deaths."""

from __future__ import annotations

import asyncio
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from equality import reload
from faults import signal_in_step
from peft import LoraConfig, get_peft_model
from pooled_equality import TOLERANCE, PoolingCheckpoints, assert_equal, check_every_schedule
from pooling_checkpoints import CASES, CLASS_TOKENS, prompts
from transformers import AutoModel

from raycore import LLM, AsyncLLM, InvalidRequest, PoolingParams, RequestFailed
from raycore.engine.core import EngineCore
from raycore.errors import InvalidInput
from raycore.lora.request import LoRARequest

# workers can't import a test module, so what they are to call travels whole
cloudpickle.register_pickle_by_value(sys.modules[reload.__module__])

LIMITS = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "standby_delay_s": None}
SHAPES = [(2, 1, 1, 1), (1, 2, 1, 1)]


@pytest.fixture(scope="module")
def pooling_checkpoints(tmp_path_factory):
    return PoolingCheckpoints(lambda: tmp_path_factory.mktemp("pooling"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("workers", SHAPES, ids=["tp2", "pp2"], indirect=True)
def test_every_form_gives_the_references_results(workers, pooling_checkpoints, name):
    check_every_schedule(
        name,
        pooling_checkpoints,
        lambda config: EngineCore(config, workers.for_engine(config)),
        tensor_parallel_size=workers.shape["tensor_parallel_size"],
        pipeline_parallel_size=workers.shape["pipeline_parallel_size"],
    )


@pytest.fixture(scope="module")
def llm(ray_cluster, pooling_checkpoints):
    path, _ = pooling_checkpoints["mean_of_a_model_that_generates"]
    options = CASES["mean_of_a_model_that_generates"].options
    with LLM(str(path), data_parallel_size=2, max_num_batched_tokens=24, **LIMITS, **options) as llm:
        yield llm


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_a_killed_rank_changes_no_result(llm, pooling_checkpoints, task):
    _, expected = pooling_checkpoints["mean_of_a_model_that_generates"]
    victim = llm.engine_infos[0]  # of those that serve: the last victim's replacement may still be starting
    signal_in_step(llm, victim.dp_rank, victim.pid, num_steps=3)
    found = llm.encode(prompts() * 4, pooling_task=task, use_tqdm=False)
    assert_equal([each.outputs.data for each in found], expected * 4, task)
    assert [each.prompt_token_ids for each in found] == prompts() * 4
    counts = llm.read_metrics().counts.values()
    assert sum(each.num_output_tokens for each in counts) == 0
    assert sum(each.num_finished["stop"] for each in counts) % 24 == 0


def test_sleep_and_an_interrupted_call_leave_an_engine_that_pools(llm, pooling_checkpoints):
    _, expected = pooling_checkpoints["mean_of_a_model_that_generates"]
    llm.sleep(level=2)
    llm.wake_up()
    found = llm.embed(prompts(), use_tqdm=False)
    assert_equal([np.array(each.outputs.embedding) for each in found], expected, "embed")


def test_calls_that_the_model_has_not_name_its_tasks(llm):
    assert llm.get_supported_tasks() == ("embed", "token_embed")
    for call, message in (
        (
            lambda: llm.generate("t1"),
            "supports only the tasks 'embed', 'token_embed', not 'generate'.*runner=\"generate\"",
        ),
        (lambda: llm.classify("t1"), "task='classify' isn't supported by this model, which has 'embed', 'token_embed'"),
        (lambda: llm.encode("t1", pooling_task="embedding"), "task='embedding' isn't one of 'embed'"),
        (lambda: llm.encode("t1", PoolingParams(task="token_embed"), pooling_task="embed"), "task='token_embed'"),
        (lambda: llm.encode("t1", [PoolingParams()] * 2), "2 pooling_params for 1 prompts"),
        (lambda: llm.encode("t1", {"task": "embed"}), "isn't PoolingParams"),
        (lambda: llm.embed([[1] * 257]), "257 tokens, more than max_model_len=256"),
        (lambda: llm.embed("t1", truncate_prompt_tokens=257), "truncate_prompt_tokens=257 isn't from 1"),
        (lambda: llm.score(["t1", "t2"], ["t1"]), "2 texts can't be paired with 1"),
        (lambda: llm.score([], "t1"), r"data_1=\[\] isn't a text"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            call()
    with pytest.raises(InvalidInput, match=r"reload_weights.*which pools, can't be replaced"):
        llm.reload_weights()
    assert len(llm.embed([[1] * 257], truncate_prompt_tokens=-1)[0].prompt_token_ids) == 256


def test_a_score_is_the_cosine_of_embeddings(llm):
    texts = ["t1 t2 t3", "t9 t8", "t1 t2 t3"]
    rows = np.array([each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)])
    scores = [each.outputs.score for each in llm.score(texts[0], texts, use_tqdm=False)]
    np.testing.assert_allclose(scores, rows @ rows[0], atol=1e-6)
    assert scores[0] == pytest.approx(1.0)
    assert scores[1] < 0.9


def test_a_model_with_two_tokens_for_yes_and_no_scores_pairs(ray_cluster, pooling_checkpoints):
    path, _ = pooling_checkpoints["reranker"]
    expected_of = CASES["reranker"].reference

    async def scores(engine: AsyncLLM) -> list[float]:
        assert await engine.get_supported_tasks() == ("classify", "token_classify", "score")
        outputs = [each async for each in engine.encode("t4 t5", PoolingParams(task="score"), "pair")]
        assert [each.request_id for each in outputs] == ["pair"]
        return [float(each.outputs.data[0]) for each in outputs]

    async def run() -> list[float]:
        options = {**LIMITS, **CASES["reranker"].options}
        async with await AsyncLLM.create(str(path), tensor_parallel_size=2, **options) as engine:
            pending = asyncio.ensure_future(anext(engine.encode([[1] * 200][0], request_id="aborted")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await engine.abort("aborted")
            with pytest.raises(RequestFailed, match="aborted"):
                await pending
            return await scores(engine)

    with torch.inference_mode():
        expected = expected_of(path, [4, 5])["score"].item()
    assert asyncio.run(run()) == [pytest.approx(expected, abs=TOLERANCE)]
    assert len(CLASS_TOKENS) == 2


def test_adapters_change_embeddings(ray_cluster, pooling_checkpoints, tmp_path):
    path, expected = pooling_checkpoints["last"]
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(AutoModel.from_pretrained(path, dtype=torch.float32), config).eval()
    adapted.save_pretrained(str(tmp_path))
    with torch.inference_mode():
        hidden = [adapted(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts()]
    with_adapter = [{"embed": torch.nn.functional.normalize(each, dim=-1).numpy()} for each in hidden]
    adapter = LoRARequest("adapter", 1, str(tmp_path))
    with LLM(str(path), tensor_parallel_size=2, enable_lora=True, max_lora_rank=8, **LIMITS) as llm:
        found = llm.encode(prompts() * 2, lora_request=[adapter] * 6 + [None] * 6, use_tqdm=False)
    assert_equal([each.outputs.data for each in found[:6]], with_adapter, "embed")
    assert_equal([each.outputs.data for each in found[6:]], expected, "embed")
