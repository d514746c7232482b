"""EAGLE-3 heads draft for each dense family, and no output changes: a decoder gives the inputs of any of its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafting_checkpoints import head_config, random_head, write_checkpoint
from families import SIZES, make_checkpoint, prompts
from families.dense import DENSE
from families.paths import PATHS

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.errors import InvalidConfig
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

ALWAYS = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 8, 3)]}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
DENSE_FAMILIES = sorted((DENSE | PATHS).keys() - {"gemma3n"})
"""Layers of Gemma 3n have several streams of hidden states, which no head reads."""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head with random weights that reads the embeddings and the input of the second layer."""
    config = head_config(SIZES["hidden_size"], SIZES["vocab_size"], eagle_aux_hidden_state_layer_ids=[0, 1])
    return write_checkpoint(tmp_path_factory.mktemp("head") / "head", config, random_head(config))


def run(path: Path, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of each prompt, and how many were drafted."""
    sizes = {"num_threads": 1, "max_num_seqs": 6, "max_num_batched_tokens": 24, "block_size": 8}
    config = resolve(path, dtype="float32", num_gpu_blocks_override=100, **sizes, **options)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    found: list[list[int]] = [[] for _ in prompts()]
    for seq_id, prompt in enumerate(prompts()):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, GREEDY, seed=seq_id))
    while core.has_work():
        step = core.step()
        if step is not None:
            for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
                found[seq_id].append(token)
    core.scheduler.check_integrity()
    num_drafted = core.load().drafts.num_draft_tokens
    core.shutdown()
    return found, num_drafted


@pytest.mark.parametrize(("index", "family"), enumerate(DENSE_FAMILIES), ids=DENSE_FAMILIES)
def test_eagle3_drafts_change_no_token(head: Path, tmp_path: Path, index: int, family: str) -> None:
    path = make_checkpoint(family, tmp_path)
    expected, _ = run(path)
    settings = {"model": str(head)} | ALWAYS
    found, num_drafted = run(path, speculative_config=settings, max_concurrent_batches=1 + index % 2)
    assert found == expected
    assert num_drafted > 30


def test_a_head_for_several_streams_of_hidden_states_is_refused(head: Path, tmp_path: Path) -> None:
    path = make_checkpoint("gemma3n", tmp_path)
    with pytest.raises(InvalidConfig, match="Gemma3nForCausalLM, which has layers with several streams"):
        resolve(path, speculative_config={"model": str(head)} | ALWAYS)


@pytest.mark.parametrize("depth", [1, 2])
def test_draft_models_draft_for_what_transformers_code_computes(tmp_path: Path, depth: int) -> None:
    path, draft_model = make_checkpoint("gpt_neox", tmp_path), make_checkpoint("llama2", tmp_path)
    expected, _ = run(path, model_impl="transformers")
    settings = {"model": str(draft_model)} | ALWAYS
    options = {"model_impl": "transformers", "speculative_config": settings, "max_concurrent_batches": depth}
    found, num_drafted = run(path, **options)
    assert found == expected
    assert num_drafted > 30
