"""Prompts with images in one engine, and what transformers generates from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vision_checkpoints import IMAGE, Prompt, Prompts, greedy, image, make_vision_checkpoint

from raycore.config import EngineConfig, resolve
from raycore.engine.core import EngineCore
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams

NUM_TOKENS = 12
_MOST_SEEDS = 8
"""Of the weights, of which some give the same tokens for all prompts."""
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass
class Case:
    """A checkpoint, prompts for it, and what transformers generates from them."""

    path: Path
    prompts: list[Prompt]
    expected: list[list[int]]


def _prompts(path: Path) -> list[Prompt]:
    prompts = Prompts(path)
    return [
        prompts.make(f"What is in this image? {IMAGE} Describe it.", [image(120, 90)]),
        prompts.make(f"What is in this image? {IMAGE} Describe it.", [image(120, 90, 1)]),
        prompts.make(f"{IMAGE} and{IMAGE} What is in that one?", [image(90, 150, 2), image(230, 60, 3)]),
        prompts.make("Describe the colours, please.", []),
        prompts.make(f"{IMAGE}", [image(200, 200, 1)]),
    ]


def make_case(kind: str, directory: Path, **text_sizes: Any) -> Case:
    """Return prompts with one and several images, with text around them, and with none."""
    for seed in range(_MOST_SEEDS):
        path = make_vision_checkpoint(kind, directory, seed, **text_sizes)
        made = _prompts(path)
        expected = greedy(path, made, NUM_TOKENS)
        if len({tuple(tokens) for tokens in expected}) == len(expected):
            return Case(path, made, expected)
    raise AssertionError("prompts should matter")


def config_of(path: Path, **options: Any) -> EngineConfig:
    """Return a small engine's configuration."""
    sizes = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return resolve(path, **(sizes | options))


class Prompting:
    """Submits prompts to an engine, and runs its steps."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._num_submitted = 0

    def generate(self, prompts: list[Prompt], begun: list[list[int]] | None = None) -> list[list[int]]:
        """Return each prompt's tokens. `begun`: those that another engine has generated."""
        first = self._num_submitted
        for prompt, output in zip(prompts, begun or [[] for _ in prompts], strict=True):
            seq_id, self._num_submitted = self._num_submitted, self._num_submitted + 1
            features = {"features": prompt.features, "feature_data": [*prompt.data], "output_token_ids": output}
            self.core.submit(EngineRequest(seq_id, str(seq_id), prompt.token_ids, GREEDY, seed=0, **features))
        outputs: list[list[int]] = [[] for _ in prompts]
        while self.core.has_work():
            step = self.core.step()
            if step is None:
                continue
            assert not step.missing_features
            for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
                outputs[seq_id - first].append(token)
        return outputs
