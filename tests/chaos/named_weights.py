"""Checkpoints whose answers name them, and the check of outputs whose weights have changed.

Of `NUM_VARIANTS` checkpoints, one gives only the tokens whose number leaves its own number as the remainder: all others
have the mean of these tokens' logits. So each token says by itself which checkpoint's head it comes from, and a wrong
version is seen even where two checkpoints would otherwise have agreed. All other weights differ, too, so a mixture of
two checkpoints gives other tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from chaos.run import start_engine
from raycore import RequestOutput, SamplingParams
from raycore.demo import demo_model_path
from raycore.outputs import WeightVersionSpan

NUM_VARIANTS = 4
HEAD = "lm_head.weight"

Tensors = list[tuple[str, torch.Tensor]]


def write_variants(model: str, directory: Path) -> list[Path]:
    """Write checkpoints of the same model with other weights, whose answers name them. Returns their paths."""
    paths: list[Path] = []
    for index in range(NUM_VARIANTS):
        path = directory / f"variant{index}"
        shutil.copytree(model, path)
        config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": False}
        (path / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(index)
        tensors = dict(tensors_of(path))
        tensors.setdefault(HEAD, tensors["model.embed_tokens.weight"].clone())
        for name, each in tensors.items():
            tensors[name] = (each.float() * (1 + 0.05 * torch.randn(each.shape, generator=generator))).to(each.dtype)
        is_own = torch.arange(len(tensors[HEAD])) % NUM_VARIANTS == index
        tensors[HEAD][~is_own] = tensors[HEAD][is_own].float().mean(0).to(tensors[HEAD].dtype)
        for file in path.glob("*.safetensors"):
            file.unlink()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        paths.append(path)
    return paths


def write_experts(directory: Path) -> Path:
    """Write a small random model with experts and the bundled model's tokenizer. Returns its path."""
    from elastic import write_model  # imported lazily: a benchmark of its own

    path = directory / "experts"
    path.mkdir()
    write_model(argparse.Namespace(hidden=128, expert_size=64, layers=2, experts=8, seed=0), path)
    shutil.copy(Path(demo_model_path(), "generation_config.json"), path)
    return path


def tensors_of(path: Path) -> Tensors:
    """Return all tensors of a checkpoint."""
    return [pair for file in sorted(path.glob("*.safetensors")) for pair in load_file(file).items()]


def variant_of(version: str) -> int:
    """The checkpoint that a version's weights are those of: names are `number-variant`."""
    return 0 if version == "default" else int(version.rpartition("-")[2])


def number_of(version: str) -> int:
    """Of a version: later ones have larger numbers."""
    return 0 if version == "default" else int(version.partition("-")[0])


@dataclass
class Answer:
    """An output, and what was known when its request was sent."""

    output: RequestOutput
    current: int
    """The number of the latest version then."""
    num_tokens: int
    """How many tokens were asked for."""

    @property
    def token_ids(self) -> Sequence[int]:
        return self.output.outputs[0].token_ids

    @property
    def spans(self) -> list[WeightVersionSpan]:
        return self.output.outputs[0].weight_versions or []


def problems(answer: Answer) -> list[str]:
    """What an output's versions and tokens contradict."""
    found: list[str] = []
    spans, token_ids = answer.spans, answer.token_ids
    numbers = [number_of(span.version) for span in spans]
    if len(token_ids) != answer.num_tokens:
        found.append(f"{len(token_ids)} tokens instead of {answer.num_tokens}")
    if [span.start for span in spans] != [0, *(span.end for span in spans[:-1])] or spans[-1].end != len(token_ids):
        found.append(f"parts that aren't one after the other: {spans}")
    if numbers != sorted(numbers) or numbers[0] < answer.current:
        found.append(f"versions {numbers}, although {answer.current} was current when the request came")
    for span in spans:
        strange = [each for each in token_ids[span.start : span.end] if each % NUM_VARIANTS != variant_of(span.version)]
        if strange:
            found.append(f"{len(strange)} tokens of another version than {span.version!r}")
    return found


def count_wrong_parts(answers: list[Answer], variants: list[Path], args: argparse.Namespace) -> tuple[int, int]:
    """Compute each part of each output again, by an engine that has started with the weights that the output names.

    Returns the numbers of parts that differ, and of all parts.
    """
    parts: defaultdict[int, dict[tuple[int, ...], set[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(set))
    for answer in answers:
        for span in answer.spans:
            known = (*answer.output.prompt_token_ids, *answer.token_ids[: span.start])
            parts[variant_of(span.version)][known].add(tuple(answer.token_ids[span.start : span.end]))
    num_wrong = sum(asyncio.run(_compare(variants[variant], each, args)) for variant, each in parts.items())
    return num_wrong, sum(len(found) for each in parts.values() for found in each.values())


async def _compare(path: Path, expected: dict[tuple[int, ...], set[tuple[int, ...]]], args: argparse.Namespace) -> int:
    llm = start_engine(argparse.Namespace(**vars(args) | {"model": str(path)}), 1, batch_invariant=True)

    async def tokens(prompt: tuple[int, ...], length: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        async for output in llm.generate({"prompt_token_ids": list(prompt)}, params, stream=False):
            return output.outputs[0].token_ids
        raise AssertionError("no output")

    try:
        lengths = {prompt: max(map(len, found)) for prompt, found in expected.items()}
        results = await asyncio.gather(*(tokens(prompt, length) for prompt, length in lengths.items()))
        return sum(
            tuple(result[: len(found)]) != found
            for result, each in zip(results, expected.values(), strict=True)
            for found in each
        )
    finally:
        llm.shutdown()
