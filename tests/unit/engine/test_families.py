"""Adapters, and weights in 8 bits, for every family, beside transformers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, NUM_NEW_TOKENS, auto_class, make_checkpoint, prompts, reference
from mixed_requests import prepare
from native_kernels import needs_kernels
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from raycore.checkpoint.model_spec import load_model_spec
from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.lora.request import LoRARequest
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
DENSE, ATTENTION = (
    r"(?!.*(vision_tower|linear_attn|mamba)).*(_proj|_fc|\.(w[123]|fc[12]|fc_\w+|dense\w*|query_key_value))",
    r"(?!.*vision_(model|tower)).*(self_attn(?!.*(kv_b|gate)_proj).*_proj(_with_mqa)?|mixer\.[qkvo]_proj)",
)
"""What adapters change in families without experts, and in the others. PEFT takes a gate of attention for an expert's.
"""
LARGEST_ERROR = 0.15
"""Weights and inputs in 8 bits may change log probabilities by this share of how much these differ, at the median."""


def generate(path: Path, params: SamplingParams, lora: LoRARequest | None = None, **options: Any) -> EngineOutputs:
    config = resolve(path, dtype="float32", num_threads=1, max_num_seqs=8, max_num_batched_tokens=24, **options)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    outputs = EngineOutputs()
    for seq_id, prompt in enumerate(prompts()):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, params, seed=0, lora=lora))
        outputs.tokens.append([])
        outputs.prompt_logprobs.append([])
    prepare(core)
    while core.has_work():
        step = core.step()
        if step is None:
            continue
        for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
            outputs.tokens[seq_id].append(token)
        for seq_id, _, entries in step.prompt_logprobs:
            outputs.prompt_logprobs[seq_id] += [entry.logprobs[0] for entry in entries]
    core.shutdown()
    return outputs


class EngineOutputs:
    """By prompt."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.prompt_logprobs: list[list[float]] = []
        """Of the prompt's own tokens."""


# PEFT takes no part of Mamba-2, and raycore none of Mamba-1
@pytest.mark.parametrize("family", [each for each in FAMILIES if "mamba" not in each and each != "gpt_oss_mxfp4"])
def test_an_adapter_gives_the_tokens_of_merged_weights(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    network = auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(1)
    spec = load_model_spec(path)
    # to PEFT, all families of latent attention have experts
    modules = DENSE if spec.moe is None and spec.latent is None else ATTENTION
    adapted = get_peft_model(network, LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = reference(tmp_path / "merged")
    assert expected[:2] != reference(path, prompts()[:2])
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    assert generate(path, GREEDY, adapter, enable_lora=True).tokens == expected


@needs_kernels
@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if not family.startswith(("gpt_oss", "llama4", "glm_moe_dsa"))]
)
def test_weights_in_8_bits_change_log_probabilities_little(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    if FAMILIES[family].is_plain and load_model_spec(path).moe is not None:
        pytest.skip("other families have these experts")
    network = auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, dtype=torch.float32)
    outputs = generate(path, SamplingParams(max_tokens=1, prompt_logprobs=0), quantization="int8")
    expected: list[float] = []
    for prompt in prompts():
        with torch.inference_mode():
            logprobs_TV = network(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected += logprobs_TV[range(len(prompt) - 1), prompt[1:]].tolist()
    found, exact = torch.tensor([*itertools.chain(*outputs.prompt_logprobs)]), torch.tensor(expected)
    error, spread = (found - exact).abs().median(), (exact - exact.median()).abs().median()
    assert 0 < error < LARGEST_ERROR * spread
