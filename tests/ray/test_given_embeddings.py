"""Prompts of embeddings, and beam search, with a model that is divided in both ways, in Python and over HTTP."""

from __future__ import annotations

import asyncio
import io
from base64 import b64encode
from pathlib import Path

import pytest
import torch
from openai_servers import raycore_server
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from raycore import AsyncLLM, BeamSearchParams, SamplingParams
from raycore.demo import demo_model_path
from raycore.errors import InvalidRequest

OPTIONS = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_threads": 1, "max_num_batched_tokens": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True, length_penalty=0.0)
SEVERAL = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True, n=2, prompt_logprobs=0)
IDS = [[(5 * index + 7 * each) % 200 + 20 for index in range(140)] for each in range(3)]
(FILE,) = Path(demo_model_path()).glob("*.safetensors")
ROWS = load_file(FILE)["model.embed_tokens.weight"]


def test_a_divided_model_computes_embeddings_as_tokens(ray_cluster):
    async def ask() -> None:
        async with await AsyncLLM.create(
            demo_model_path(), enable_prompt_embeds=True, dtype="float32", **OPTIONS
        ) as engine:
            plain = await asyncio.gather(*(last(engine, ids, GREEDY) for ids in IDS))
            given = [{"prompt_embeds": ROWS[ids], "prompt_token_ids": ids} for ids in IDS]
            outputs = await asyncio.gather(*(last(engine, each, GREEDY) for each in given))
            assert tokens(outputs) == tokens(plain)
            assert [each.prompt_token_ids for each in outputs] == IDS
            plain, output = await last(engine, IDS[0], SEVERAL), await last(engine, given[0], SEVERAL)
            assert tokens([output]) == tokens([plain])
            assert prompt_logprobs(output) == pytest.approx(prompt_logprobs(plain), abs=1e-4)
            with pytest.raises(InvalidRequest, match="prompt_logprobs=0 needs the prompt's tokens"):
                await last(engine, {"prompt_embeds": ROWS[IDS[0]]}, SEVERAL)
            with raycore_server(engine) as api:
                texts = await asyncio.to_thread(complete, api)
                beams = await asyncio.to_thread(search, api)
            assert texts[0] == texts[1]
            assert texts[2] != texts[0]
            for prompt in (IDS[0], given[0]):
                output = await engine.beam_search(prompt, BEAMS)
                assert [each.token_ids for each in output.outputs] == beams_of_transformers()
            assert [each.text for each in output.outputs] == beams

    asyncio.run(ask())


def beams_of_transformers() -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    given = {
        "do_sample": False,
        "early_stopping": False,
        "length_penalty": 0.0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    found = model.generate(torch.tensor(IDS[:1]), num_beams=4, num_return_sequences=4, max_new_tokens=10, **given)
    return [each[len(IDS[0]) :] for each in found.tolist()]


def search(api) -> list[str]:
    extra = {"use_beam_search": True, "ignore_eos": True, "length_penalty": 0.0}
    answer = api.client.completions.create(model=api.model, prompt=IDS[0], n=4, max_tokens=10, extra_body=extra)
    return [choice.text for choice in answer.choices]


async def last(engine, prompt, params):
    return [output async for output in engine.generate(prompt, params, stream=False)][-1]


def tokens(outputs) -> list[list[list[int]]]:
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def prompt_logprobs(output) -> list[float]:
    return [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]


def complete(api) -> list[str]:
    """The texts that follow the first prompt's tokens, and the embeddings of the first two."""
    fields = {"model": api.model, "max_tokens": 8, "temperature": 0}
    plain = api.client.completions.create(prompt=IDS[0], extra_body={"ignore_eos": True}, **fields)
    extra = {"ignore_eos": True, "prompt_embeds": [encoded(ids) for ids in IDS[:2]]}
    answer = api.client.completions.create(prompt=None, extra_body=extra, **fields)
    return [plain.choices[0].text, *[choice.text for choice in answer.choices]]


def encoded(ids: list[int]) -> str:
    file = io.BytesIO()
    torch.save(ROWS[ids], file)
    return b64encode(file.getvalue()).decode()
