"""LoRA adapters on several workers: with tensor parallelism, and with stages and data-parallel ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import make_checkpoint
from peft import LoraConfig, get_peft_model
from peft_adapters import save_demo_adapter
from transformers import AutoModelForCausalLM

from raycore import LLM, InvalidRequest, RequestFailed, SamplingParams
from raycore.demo import demo_model_path
from raycore.lora.request import LoRARequest

NUM_TOKENS = 10
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [[20, 31, 42, 53], [60, 12, 17, 90, 44], [33, 33, 70]]
LIMITS = {"max_model_len": 128, "num_threads": 1, "standby_delay_s": None}


class Reference(NamedTuple):
    """What transformers computes in float32 for each prompt."""

    tokens: list[list[int]]
    logprobs_V: list[torch.Tensor]
    """Of the first of these tokens."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[LoRARequest | None, Reference]]:
    """Adapters, also none, and what transformers computes with them merged into the weights."""
    directory = tmp_path_factory.mktemp("adapters")
    made = [save_demo_adapter(directory, seed) for seed in (1, 2)]
    requests = [LoRARequest(path.name, seed, str(path)) for seed, (path, _) in enumerate(made, start=1)]
    return [(None, reference(demo_model_path()))] + [
        (request, reference(merged)) for request, (_, merged) in zip(requests, made, strict=True)
    ]


def reference(model: Path | str) -> Reference:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    continued = [list(ids) for ids in PROMPTS]
    with torch.inference_mode():
        logprobs_V = [network(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in PROMPTS]
        for ids in continued * NUM_TOKENS:
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    return Reference([ids[-NUM_TOKENS:] for ids in continued], logprobs_V)


@pytest.mark.parametrize(
    "sizes",
    [{"tensor_parallel_size": 2, "max_loras": 2}, {"pipeline_parallel_size": 2, "data_parallel_size": 2}],
    ids=["tp2", "pp2-dp2"],
)
def test_adapters_give_the_tokens_of_merged_weights(
    ray_cluster, adapters, sizes: dict[str, Any], tmp_path: Path
) -> None:
    with LLM(demo_model_path(), dtype="float32", enable_lora=True, max_cpu_loras=2, **sizes, **LIMITS) as llm:
        prompts = [ids for _ in adapters for ids in PROMPTS]
        chosen = [adapter for adapter, _ in adapters for _ in PROMPTS]
        for _ in range(2):
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=chosen)
            found = [output.outputs[0].token_ids for output in outputs]
            assert found == [ids for _, expected in adapters for ids in expected.tokens]

        # what is wrong with an adapter is said at once, or by the workers, and nobody else notices
        adapter = adapters[1][0]
        assert adapter is not None
        copied = tmp_path / "copy"
        shutil.copytree(adapter.lora_path, copied)
        with pytest.raises(InvalidRequest, match="adapter_config"):
            llm.generate(PROMPTS[0], PARAMS, use_tqdm=False, lora_request=LoRARequest("none", 8, str(tmp_path)))
        changed = LoRARequest("copy", 9, str(copied))
        llm._client.checks.adapters.check(changed)
        weights = copied / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(RequestFailed, match=r"adapter_model\.safetensors"):
            llm.generate(PROMPTS[0], PARAMS, use_tqdm=False, lora_request=changed)
        (output,) = llm.generate(PROMPTS[0], PARAMS, use_tqdm=False, lora_request=adapter)
        assert output.outputs[0].token_ids == adapters[1][1].tokens[0]


@pytest.mark.parametrize("family", ["gemma3", "gemma3_multimodal", "glm4", "hunyuan", "lfm2", "phi3"])
def test_adapters_of_other_model_families_give_the_tokens_of_merged_weights(
    ray_cluster, family: str, tmp_path: Path
) -> None:
    """Projections that share a tensor or have other names, such as those of convolutions, rotations of pairs in another
    order, and other norms."""
    path = make_checkpoint(family, tmp_path)
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(1)
    modules = r"(?!.*vision_tower).*_proj"
    adapted = get_peft_model(network, LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    with LLM(str(path), dtype="float32", enable_lora=True, tensor_parallel_size=2, **LIMITS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=adapter)
    assert [output.outputs[0].token_ids for output in outputs] == reference(tmp_path / "merged").tokens


@pytest.mark.parametrize("name", ["gpt_neox", "phi3"])
def test_ranks_divide_adapters_of_models_by_transformers(ray_cluster, name: str, tmp_path: Path) -> None:
    """Linear layers whose outputs or inputs are divided, and such that get all inputs or return all outputs."""
    path = make_checkpoint(name, tmp_path)
    adapter, merged = save_demo_adapter(tmp_path, 1, path)
    request, options = LoRARequest("adapter", 1, str(adapter)), {"model_impl": "transformers", "dtype": "float32"}
    with LLM(str(path), enable_lora=True, tensor_parallel_size=2, **options, **LIMITS) as llm:
        chosen = [None] * len(PROMPTS) + [request] * len(PROMPTS)
        outputs = llm.generate(PROMPTS * 2, PARAMS, use_tqdm=False, lora_request=chosen)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == reference(path).tokens + reference(merged).tokens


# rounding errors of bfloat16 depend on the instruction set: up to 0.10 with AVX2
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.02)])
def test_adapters_give_the_logits_of_merged_weights(ray_cluster, adapters, dtype: str, tolerance: float) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    with LLM(demo_model_path(), dtype=dtype, enable_lora=True, **LIMITS) as llm:
        for adapter, expected in adapters[1:]:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=adapter)
            for output, expected_V, plain_V in zip(
                outputs, expected.logprobs_V, adapters[0][1].logprobs_V, strict=True
            ):
                (found,) = output.outputs[0].logprobs
                ids = torch.tensor(list(found))
                found_20 = torch.tensor([entry.logprob for entry in found.values()])
                torch.testing.assert_close(found_20, expected_V[ids], rtol=0, atol=tolerance)
                assert (plain_V[ids] - expected_V[ids]).abs().max() > 5 * tolerance, "else the adapter changes little"


def test_an_engine_without_enable_lora_refuses_requests_with_adapters(ray_cluster, adapters) -> None:
    adapter = adapters[1][0]
    with LLM(demo_model_path(), **LIMITS) as llm:
        with pytest.raises(InvalidRequest, match="needs an engine with enable_lora=True"):
            llm.generate(PROMPTS[0], PARAMS, use_tqdm=False, lora_request=adapter)
        for given, message in (("adapter", "isn't a LoRARequest"), ([adapter], "1 entries for 3 prompts")):
            with pytest.raises(InvalidRequest, match=message):
                llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=given)  # type: ignore[arg-type]
