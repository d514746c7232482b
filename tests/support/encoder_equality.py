"""Results of encoders that equal those of transformers and sentence-transformers, on any workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encoder_checkpoints import make_encoder, reference
from pooled_equality import TOLERANCE, Results, pool
from torch import Tensor

from raycore.config import EngineConfig, resolve
from raycore.engine.core import EngineCore

LENGTHS = (5, 40, 37, 1, 90, 40, 3, 128, 64, 17)
"""More tokens than a step has, and more prompts than run at a time."""


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Prompts that have ids of all vocabularies."""
    rnd = random.Random(1)
    return [[rnd.randrange(3, 90) for _ in range(length)] for length in lengths]


def references(path: Path, all_prompts: list[list[int]]) -> list[Results]:
    """What transformers makes of each prompt, by task."""
    network = reference(path)
    with torch.inference_mode():
        return [_results(network, torch.tensor([prompt])) for prompt in all_prompts]


def _results(network: Any, token_ids: Tensor) -> Results:
    name = type(network).__name__
    if name.endswith("ForSequenceClassification"):
        return {"classify": network(token_ids).logits[0].softmax(-1).numpy()}
    if name.endswith("ForTokenClassification"):
        return {"token_classify": network(token_ids).logits[0].softmax(-1).numpy()}
    hidden_LD = torch.nn.functional.normalize(network.base_model(token_ids).last_hidden_state[0], dim=-1)
    return {"embed": hidden_LD[0].numpy(), "token_embed": hidden_LD.numpy()}


def configured(path: Path, **options: Any) -> EngineConfig:
    """The configuration of an engine whose steps have about as many tokens as the longest prompt."""
    options = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 130, **options}
    return resolve(str(path), **options)


def check_results(
    architecture: str, directory: Path, make_core: Callable[[EngineConfig], EngineCore], **options: Any
) -> None:
    """Check that all tasks of an architecture give transformers' results, also after an interruption."""
    path = make_encoder(directory, architecture)
    expected = references(path, prompts())
    core = make_core(configured(path, **options))
    spec = core.config.model.spec.pooling
    assert spec is not None
    assert set(spec.tasks) == set(expected[0])
    for task in spec.tasks:
        for interrupts in (False, True):
            found, num_cached = pool(core, task, prompts(), interrupts=interrupts)
            assert num_cached == 0
            for each, results in zip(found, expected, strict=True):
                np.testing.assert_allclose(each, results[task], atol=TOLERANCE)
