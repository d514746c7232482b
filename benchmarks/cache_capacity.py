"""How many tokens the same memory holds if windows free their blocks, and if keys and values are compressed.

    python benchmarks/cache_capacity.py [--gib 16]

Computes this from the shapes of models alone, with the functions that divide an engine's layers into groups: no engine
runs, and neither torch nor a checkpoint is needed. Prints a Markdown table for a cache in bfloat16 on one worker.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from raycore.cache_layout import CacheLayout, CacheLimits, LayerCacheSpec, WorkerCacheSpec, divide_layers

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 2048
LENGTHS = (8192, 32768)
BYTES = 2
"""Of a number."""


class Shape(NamedTuple):
    """What a model keeps of a token in each layer."""

    name: str
    layers: list[LayerCacheSpec]
    before: list[LayerCacheSpec]
    """The same without windows or compression."""


def plain(num_kv_heads: int, head_dim: int) -> LayerCacheSpec:
    """A layer that keeps keys and values of all tokens."""
    return LayerCacheSpec("full", BLOCK_SIZE * 2 * num_kv_heads * head_dim * BYTES)


def windowed(name: str, num_layers: int, every: int, window: int, num_kv_heads: int, head_dim: int) -> Shape:
    """A model in which each `every`th layer sees all tokens, and the others those in the window."""
    full = plain(num_kv_heads, head_dim)
    short = LayerCacheSpec("window", full.block_bytes, window)
    layers = [full if (layer + 1) % every == 0 else short for layer in range(num_layers)]
    return Shape(name, layers, [full] * num_layers)


def latent(name: str, num_layers: int, num_heads: int, key_dim: int, value_dim: int, latent_dim: int) -> Shape:
    """A model with multi-head latent attention, and one whose heads have keys and values of these sizes."""
    compressed = LayerCacheSpec("latent", BLOCK_SIZE * latent_dim * BYTES)
    full = LayerCacheSpec("full", BLOCK_SIZE * num_heads * (key_dim + value_dim) * BYTES)
    return Shape(name, [compressed] * num_layers, [full] * num_layers)


SHAPES = [
    windowed("Gemma 3 1B", 26, 6, 512, 1, 256),
    windowed("Gemma 3 4B", 34, 6, 1024, 4, 256),
    windowed("Gemma 3 27B", 62, 6, 1024, 16, 128),
    windowed("gpt-oss-20b", 24, 2, 128, 8, 64),
    windowed("gpt-oss-120b", 36, 2, 128, 8, 64),
    latent("DeepSeek-V3", 61, 128, 128 + 64, 128, 512 + 64),
]


def tokens_in(num_bytes: int, layers: list[LayerCacheSpec], length: int) -> tuple[int, CacheLayout]:
    """Return how many tokens of sequences of this length the memory holds, and the groups."""
    layout = divide_layers(layers, CacheLimits(BLOCK_SIZE, length, MAX_STEP_TOKENS))
    num_blocks = num_bytes // layout.block_bytes(WorkerCacheSpec(tuple(layers)))
    return layout.num_tokens_in(num_blocks), layout


def describe(layout: CacheLayout) -> str:
    """Return the groups, such as `1 full + 6 window, of up to 4 layers`."""
    kinds = [group.kind for group in layout.groups]
    counts = " + ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"{counts}, of up to {layout.layers_per_group} layers"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=16.0, help="size of the cache (default: %(default)s)")
    num_bytes = int(parser.parse_args().gib * 2**30)
    print("| model | groups | sequences of | tokens before | tokens | times as many |\n|---|---|---|---|---|---|")
    for shape in SHAPES:
        for length in LENGTHS:
            before, _ = tokens_in(num_bytes, shape.before, length)
            after, layout = tokens_in(num_bytes, shape.layers, length)
            numbers = f"{length:,} | {before:,} | {after:,} | {after / before:.1f}"
            print(f"| {shape.name} | {describe(layout)} | {numbers} |")


if __name__ == "__main__":
    main()
