"""A trainer's log probabilities have the bits of engines' with several workers, also where shards have the weights."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from native_kernels import needs_kernels
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from raycore import LLM, SamplingParams
from raycore.trainer import logprobs

OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "num_threads": 1, "max_model_len": 64, "num_gpu_blocks_override": 64}
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [30] * 9]
NUM_NEW = 8
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS)) if kind == "experts" else None
    return (model or LlamaForCausalLM(LlamaConfig(**SIZES))).eval()


def packed(sequences: list[list[int]]) -> dict[str, Tensor]:
    """All sequences in one row."""
    ids = [token for sequence in sequences for token in sequence]
    positions = [index for sequence in sequences for index in range(len(sequence))]
    return {"ids_BL": torch.tensor([ids]), "position_ids": torch.tensor([positions])}


def rollouts(path: Path, tp_size: int) -> tuple[list[list[int]], list[list[float]]]:
    """The sequences that an engine samples, and the log probabilities of their new tokens."""
    params = [
        SamplingParams(temperature=1.0, max_tokens=NUM_NEW, logprobs=0, ignore_eos=True, detokenize=False, seed=index)
        for index in range(len(PROMPTS))
    ]
    options = {**OPTIONS, "tensor_parallel_size": tp_size, "skip_tokenizer_init": True, "standby_delay_s": None}
    with LLM(str(path), batch_invariant=True, **options) as llm:
        made = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
    outputs = [each.outputs[0] for each in made]
    sequences = [[*prompt, *each.token_ids] for prompt, each in zip(PROMPTS, outputs, strict=True)]
    return sequences, [[entry[token].logprob for token, entry in _pairs(each)] for each in outputs]


def _pairs(output: Any) -> list[tuple[int, Any]]:
    return list(zip(output.token_ids, output.logprobs, strict=True))


def ends(found_BL: Tensor, sequences: list[list[int]]) -> list[list[float]]:
    """The log probabilities of the new tokens of packed sequences."""
    stops = torch.tensor([len(each) for each in sequences]).cumsum(0).tolist()
    return [found_BL[0, stop - 1 - NUM_NEW : stop - 1].tolist() for stop in stops]


@needs_kernels
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.timeout(240)
def test_numbers_have_the_bits_of_an_engines_with_several_workers(ray_cluster, tmp_path: Path, kind: str) -> None:
    model = make_model(kind)
    model.save_pretrained(tmp_path)
    for tp_size in (1, 2, 4):
        sequences, expected = rollouts(tmp_path, tp_size)
        with torch.no_grad():
            assert ends(logprobs(model, **packed(sequences), **OPTIONS), sequences) == expected, tp_size
        found_BL = logprobs(model, **packed(sequences), **OPTIONS)
        assert ends(found_BL.detach(), sequences) == expected, tp_size
        found_BL.sum().backward()
        assert all(weight.grad is not None for weight in model.parameters())
        model.zero_grad()


def train(rank: int, folder: str, kind: str, sequences: list[list[int]]) -> None:
    """One of two processes that share a model's parameters. Saves what it computes: numbers, and its gradients."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    model: Any = make_model(kind)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    own = sequences[rank * 2 : rank * 2 + 2]
    with torch.no_grad():
        without_BL = logprobs(model, **packed(own), **OPTIONS)
    found_BL = logprobs(model, **packed(own), **OPTIONS)
    (found_BL.sum() * 2).backward()  # of which shards get the mean
    gradients = {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
    torch.save((without_BL, found_BL.detach(), gradients), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.timeout(240)
def test_shards_of_parameters_change_neither_numbers_nor_gradients(tmp_path: Path, kind: str) -> None:
    model, sequences = make_model(kind), [[*each, *range(40, 48)] for each in PROMPTS]
    whole = [logprobs(model, **packed(each), **OPTIONS) for each in (sequences[:2], sequences[2:])]
    sum(each.sum() for each in whole).backward()  # pyright: ignore
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=train, args=(rank, str(tmp_path), kind, sequences)) for rank in range(2)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
        assert each.exitcode == 0
    for rank, expected_BL in enumerate(whole):
        without_BL, found_BL, gradients = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(without_BL, expected_BL)
        assert torch.equal(found_BL, expected_BL)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(gradients[name], weight.grad, atol=1e-4, rtol=1e-3)
