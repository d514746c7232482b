"""Models whose layers keep other things than keys and values of all tokens: those of a window, or a state."""

from __future__ import annotations

import random
from typing import Any

from simulation.cluster.deployments.deployment import Deployment, dummy_model

_WINDOWS = [(8, 62), (20, 68), (64, 83)]
"""Windows, and the fewest blocks of 8 tokens that a request of 256 tokens may need with four groups of layers."""


def drawn(draw: random.Random) -> Deployment:
    num_ranks, num_stages, num_workers = draw.choice([(1, 1, 1), (2, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1), (3, 1, 1)])
    options = with_windows(draw) if draw.random() < 0.5 else with_states(draw)
    return Deployment(options, num_ranks, num_stages, num_workers, num_repeats=draw.choice([0, 4, 8]))


def with_windows(draw: random.Random) -> dict[str, Any]:
    """Options of a model whose layers have windows, with few blocks."""
    window, num_blocks = draw.choice(_WINDOWS)
    model = dummy_model("Olmo3ForCausalLM", sliding_window=window)
    return model | {"num_gpu_blocks_override": num_blocks + draw.choice([0, 8, 64])}


def with_states(draw: random.Random) -> dict[str, Any]:
    """Options of a model whose layers keep states."""
    delta = dummy_model("Qwen3_5ForCausalLM", linear_num_key_heads=2, linear_num_value_heads=2)
    kinds = ["mamba", "attention", "mamba", "attention"]
    mamba = dummy_model(
        "GraniteMoeHybridForCausalLM", num_local_experts=0, layer_types=kinds, shared_intermediate_size=64
    )
    prefixes = {"mamba_block_size": draw.choice([8, 16, 32]), "num_prefix_states": draw.choice([1, 4, 16])}
    return draw.choice([delta, mamba]) | prefixes
