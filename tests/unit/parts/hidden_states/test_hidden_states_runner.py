"""The final hidden states that requests ask for, beside transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import auto_class, make_checkpoint, prompts
from numpy.typing import NDArray
from transformers import AutoConfig

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

NUM_NEW_TOKENS = 24
PARAMS = SamplingParams(
    temperature=0,
    max_tokens=NUM_NEW_TOKENS,
    ignore_eos=True,
    return_hidden_states=True,
    return_prompt_hidden_states=True,
)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}, {"num_gpu_blocks_override": 6, "block_size": 8}],
    ids=["whole prompts", "chunks", "preemptions"],
)
def test_hidden_states_are_those_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint("llama3", tmp_path)
    network = auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, dtype=torch.float32)
    config = resolve(path, dtype="float32", num_threads=1, max_model_len=40, **options)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    texts = [prompt[:12] for prompt in prompts()[:4]]
    tokens: list[list[int]] = [[] for _ in texts]
    states: list[dict[int, NDArray[np.float32]]] = [{} for _ in texts]
    for seq_id, text in enumerate(texts):
        core.submit(EngineRequest(seq_id, str(seq_id), text, PARAMS, seed=0))
    while core.has_work():
        step = core.step()
        if step is None:
            continue
        for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
            tokens[seq_id].append(token)
        for seq_id, (part, first, num_tokens, data) in step.reports:
            assert part == "hidden_states"
            states[seq_id] |= dict(enumerate(np.frombuffer(data, np.float32).reshape(num_tokens, -1), start=first))
    assert (core.load().num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    core.shutdown()
    for text, output, found in zip(texts, tokens, states, strict=True):
        with torch.inference_mode():
            expected = network(torch.tensor([text + output[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        assert found.keys() == set(range(len(text) + NUM_NEW_TOKENS - 1))
        np.testing.assert_allclose([found[position] for position in sorted(found)], expected, atol=1e-4)
