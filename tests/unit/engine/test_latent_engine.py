"""Engines with latent attention: neither drafts nor other requests change a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import NUM_NEW_TOKENS, make_checkpoint, prompts, reference

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
DRAFTERS = ["deepseek_v3", "deepseek_v3_dense", "llama2"]
TARGETS = ["deepseek_v3", "glm_moe_dsa"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_checkpoint(family, tmp_path_factory.mktemp("checkpoints")) for family in {*DRAFTERS, *TARGETS}}


def generate(path: Path, only: list[int] | None = None, **options: Any) -> list[list[int]]:
    """The tokens of all prompts, or of some alone."""
    options = {"dtype": "float32", "max_num_batched_tokens": 24} | options
    config = resolve(path, num_threads=1, max_num_seqs=8, block_size=8, **options)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    outputs: dict[int, list[int]] = {}
    for seq_id, prompt in enumerate(prompts()):
        if only is None or seq_id in only:
            core.submit(EngineRequest(seq_id, str(seq_id), prompt, GREEDY, seed=0))
            outputs[seq_id] = []
    while core.has_work():
        step = core.step()
        if step is not None:
            for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
                outputs[seq_id].append(token)
    core.shutdown()
    return list(outputs.values())


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_drafts_change_no_token(checkpoints: dict[str, Path], drafter: str | None, backend: str) -> None:
    """Of n-grams, of an ordinary model, of the target itself, and of another model with latent attention."""
    target = checkpoints["deepseek_v3"]
    own = {"method": "ngram", "prompt_lookup_max": 3} if drafter is None else {"model": str(checkpoints[drafter])}
    speculative = {"num_speculative_tokens": 3} | own
    found = generate(target, speculative_config=speculative, attention_backend=backend)
    assert found == reference(target)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_drafts_of_n_grams_change_no_token_where_tokens_are_selected(
    checkpoints: dict[str, Path], backend: str
) -> None:
    target = checkpoints["glm_moe_dsa"]
    speculative = {"num_speculative_tokens": 3, "method": "ngram", "prompt_lookup_max": 3}
    assert generate(target, speculative_config=speculative, attention_backend=backend) == reference(target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("family", TARGETS)
def test_a_request_gets_the_same_tokens_alone_and_in_chunks(
    checkpoints: dict[str, Path], family: str, backend: str, dtype: str
) -> None:
    path, options = checkpoints[family], {"dtype": dtype, "attention_backend": backend, "batch_invariant": True}
    together = generate(path, **options)
    assert generate(path, [3], max_num_batched_tokens=2048, **options) == [together[3]]
    assert generate(path, num_gpu_blocks_override=12, **options) == together
