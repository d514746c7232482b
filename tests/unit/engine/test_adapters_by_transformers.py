"""Adapters of models that transformers' code computes: any linear layer of theirs, whatever its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import NUM_NEW_TOKENS, make_checkpoint, prompts, reference
from mixed_requests import prepare
from native_kernels import needs_kernels
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from raycore.checkpoint.model_spec import load_model_spec
from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.errors import InvalidAdapter
from raycore.executor.inline import InlineExecutor
from raycore.lora.request import LoRARequest
from raycore.messages import EngineRequest
from raycore.parts.adapters.checkpoint.spec import LoraSpec
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
SOME = {
    "stablelm": ["k_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense_4h_to_h"],
    "opt": ["out_proj", "fc1"],
    "gpt2": ["c_attn"],
    "deepseek_v3_heads": ["kv_b_proj"],
    "llama3": ["q_proj", "gate_proj"],
}
"""Networks, and the linear layers that the second adapter changes. The first one changes all."""
ATTENTION = {"deepseek_v3_heads": r".*self_attn.*_proj(_with_mqa)?"}
"""What it changes where PEFT adapts experts, too."""


def generate(path: Path, adapters: Sequence[LoRARequest | None], **options: Any) -> list[list[int]]:
    """Return the tokens after each prompt. The prompts' requests have the adapters in turn."""
    options |= {"model_impl": "transformers", "enable_lora": True, "max_loras": 2}
    config = resolve(path, dtype="float32", num_threads=1, max_num_seqs=8, max_num_batched_tokens=24, **options)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    tokens: list[list[int]] = [[] for _ in prompts()]
    for seq_id, prompt in enumerate(prompts()):
        adapter = adapters[seq_id % len(adapters)]
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, GREEDY, seed=0, lora=adapter))
    prepare(core)
    while core.has_work():
        step = core.step()
        if step is not None:
            for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
                tokens[seq_id].append(token)
    core.shutdown()
    return tokens


def save_adapter(path: Path, directory: Path, seed: int, **options: Any) -> tuple[LoRARequest, list[list[int]]]:
    """Write an adapter for a checkpoint. Returns it, and what transformers generates with merged weights."""
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapted = get_peft_model(network, LoraConfig(lora_alpha=8, init_lora_weights=False, **options))
    adapted.save_pretrained(str(directory / "adapter"))
    adapted.merge_and_unload().save_pretrained(directory / "merged")
    return LoRARequest(f"adapter {seed}", seed, str(directory / "adapter")), reference(directory / "merged")


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize("name", SOME)
def test_each_request_gets_the_tokens_of_its_own_merged_weights(name: str, backend: str, tmp_path: Path) -> None:
    path = make_checkpoint(name, tmp_path)
    one, of_one = save_adapter(path, tmp_path / "one", 1, r=4, target_modules=ATTENTION.get(name, "all-linear"))
    two, of_two = save_adapter(path, tmp_path / "two", 2, r=3, use_rslora=True, target_modules=SOME[name])
    by_adapter = [reference(path), of_one, of_two]
    expected = [by_adapter[index % 3][index] for index in range(len(prompts()))]
    for index in range(1, len(expected)):
        assert len({tuple(each[index]) for each in by_adapter}) == 3, "adapters change the tokens"
    assert generate(path, [None, one, two], attention_backend=backend) == expected


def refused(path: Path, directory: Path, **options: Any) -> str:
    """Return why an adapter is refused."""
    network = AutoModelForCausalLM.from_pretrained(path)
    get_peft_model(network, LoraConfig(r=4, **options)).save_pretrained(str(directory))
    with pytest.raises(InvalidAdapter) as error:
        LoraSpec.read(directory, load_model_spec(path, "transformers"), 16)
    return str(error.value)


def test_modules_that_adapters_cannot_change_are_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint("gpt_neox", tmp_path)
    head = refused(path, tmp_path / "head", target_modules=["query_key_value", "lm_head"])
    assert "tensor 'base_model.model.lm_head.base_layer.weight': adapters of the head aren't supported" in head
    norm = refused(path, tmp_path / "other", target_modules=["query_key_value"], modules_to_save=["input_layernorm"])
    assert "modules_to_save=['input_layernorm']: expected no value" in norm
    embedding = refused(path, tmp_path / "embedding", target_modules=["embed_in"])
    assert "embed_in.lora_embedding_A': adapters of embeddings aren't supported" in embedding


def test_the_error_of_an_unknown_module_names_those_that_there_are(tmp_path: Path) -> None:
    path = make_checkpoint("gpt_neox", tmp_path)
    adapter, _ = save_adapter(path, tmp_path, 1, r=4, target_modules=["dense"])
    file = Path(adapter.lora_path) / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("dense", "out_proj"): each for name, each in tensors.items()}, file)
    with pytest.raises(InvalidAdapter) as error:
        LoraSpec.read(Path(adapter.lora_path), load_model_spec(path, "transformers"), 16)
    assert "tensor 'base_model.model.gpt_neox.layers.0.attention.out_proj.lora_A.weight': " in str(error.value)
    known = "attention.query_key_value, gpt_neox.layers.*.attention.dense, gpt_neox.layers.*.mlp.dense_h_to_4h"
    assert f"only lora_A and lora_B of gpt_neox.layers.*.{known}" in str(error.value)
    assert "in GPTNeoXForCausalLM" in str(error.value)


def test_an_adapter_of_another_size_or_another_network_is_refused(tmp_path: Path) -> None:
    path, other = make_checkpoint("gpt_neox", tmp_path), make_checkpoint("opt", tmp_path)
    adapter, _ = save_adapter(path, tmp_path, 1, r=4, target_modules=["dense"])
    wide = load_model_spec(make_checkpoint("gpt_neox", tmp_path / "wide", hidden_size=128), "transformers")
    with pytest.raises(InvalidAdapter, match=r"attention\.dense\.lora_A.*shape \(4, 64\): expected \(4, 128\)"):
        LoraSpec.read(Path(adapter.lora_path), wide, 16)
    with pytest.raises(InvalidAdapter, match=r"only .* of model\.decoder\.layers.*in OPTForCausalLM"):
        LoraSpec.read(Path(adapter.lora_path), load_model_spec(other, "auto"), 16)
