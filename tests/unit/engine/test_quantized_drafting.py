"""Draft models draft for targets with quantized weights, and no output changes, whatever the weights are kept in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dequantized import WRITTEN
from families import make_checkpoint
from native_kernels import needs_kernels

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

NUM_DRAFTED = 3
NUM_NEW = 12
PROMPTS = [[5, 9, 33, 2], [61, 17], [8, 44, 44, 7, 23, 12, 3, 50, 41, 6, 30]]
ALWAYS = {"num_speculative_tokens": NUM_DRAFTED, "num_speculative_tokens_per_batch_size": [(1, 8, NUM_DRAFTED)]}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model with the vocabulary of the quantized checkpoints."""
    return make_checkpoint("llama2", tmp_path_factory.mktemp("draft"), vocab_size=64, max_position_embeddings=64)


def run(path: Path, draft_model: Path | None = None, **options: Any) -> tuple[list[list[Any]], int, int]:
    """The tokens of each prompt and their log probabilities, and how many were drafted, and right."""
    if draft_model is not None:
        options |= {"speculative_config": {"model": str(draft_model)} | ALWAYS}
    sizes = {"num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": 8, "max_model_len": 48}
    config = resolve(path, skip_tokenizer_init=True, num_gpu_blocks_override=40, **sizes, **options)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=NUM_NEW, logprobs=0, ignore_eos=True)
        for temperature in (0, 1.0, 0)
    ]
    found: list[list[Any]] = [[] for _ in PROMPTS]
    logprobs: list[list[Any]] = [[] for _ in PROMPTS]
    for seq_id, prompt in enumerate(PROMPTS):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, params[seq_id], seed=seq_id))
    while core.has_work():
        step = core.step()
        if step is not None:
            for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
                found[seq_id].append(token)
            for seq_id, entry in step.logprobs:
                logprobs[seq_id] += entry.logprobs
    drafts = core.load().drafts
    core.shutdown()
    found = [tokens + each for tokens, each in zip(found, logprobs, strict=True)]
    return found, drafts.num_draft_tokens, sum(drafts.accepted_per_position)


def check(path: Path, other: Path, **options: Any) -> None:
    """Check drafts of another model, and of the same checkpoint, whose weights are then kept as numbers."""
    expected, _, _ = run(path, **options)
    for depth, draft_model in ((1, other), (2, other), (1, path)):
        found, num_drafted, num_right = run(path, draft_model, **options, max_concurrent_batches=depth)
        assert found == expected
        assert num_drafted > 10
        assert draft_model == other or num_right > num_drafted / 2


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize("checkpoint", sorted(each.name for each in WRITTEN.iterdir()))
def test_outputs_of_quantized_targets_stay_the_same(checkpoint: str, backend: str, other: Path) -> None:
    check(WRITTEN / checkpoint, other, attention_backend=backend, batch_invariant=True, dtype="float32")


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_of_a_target_that_is_quantized_at_start_stay_the_same(other: Path, dtype: str) -> None:
    check(other, other, quantization="int8", batch_invariant=True, dtype=dtype)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_outputs_of_a_target_in_a_gguf_file_stay_the_same(other: Path, kind: str, tmp_path: Path) -> None:
    gguf_files = pytest.importorskip("gguf_files", reason="needs the extra gguf")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 64, "max_position_embeddings": 64}
    file = gguf_files.write_gguf(make_checkpoint("llama2", tmp_path, **sizes), "llama2", tmp_path / "model.gguf", kind)
    check(file, other, batch_invariant=True, dtype="bfloat16")
