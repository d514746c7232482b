"""Requests with LoRA adapters get what a model gives them into whose weights the adapter was merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mixed_requests import run
from number_formats import BATCH_INVARIANT
from peft_adapters import save_demo_adapter

from raycore.lora.request import LoRARequest

LIMITS = {"max_num_seqs": 12, "max_num_batched_tokens": 96, "block_size": 8, "dtype": "float32"}
OPTIONS = {"r": 6, "rank_pattern": {"q_proj": 3}}, {"target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[LoRARequest, Path]]:
    """Adapters, and merged models."""
    directory = tmp_path_factory.mktemp("adapters")
    made = [save_demo_adapter(directory, seed, **options) for seed, options in enumerate(OPTIONS, start=1)]
    return [(LoRARequest(path.name, seed, str(path)), merged) for seed, (path, merged) in enumerate(made, start=1)]


@pytest.fixture(scope="module")
def expected(adapters: list[tuple[LoRARequest, Path]]) -> dict[int, Any]:
    """What each request gets: every third one from the model itself, the others from one of the merged models."""
    outputs = [run({}, model, **LIMITS)[0] for model in (None, *(merged for _, merged in adapters))]
    return {seq_id: outputs[seq_id % 3][seq_id] for seq_id in outputs[0]}


def tokens(outputs: dict[int, Any]) -> dict[int, list[int]]:
    return {seq_id: output["tokens"] for seq_id, output in outputs.items()}


@pytest.mark.parametrize("max_loras", [1, 2])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_adapters_give_the_tokens_of_merged_weights(adapters, expected, backend: str, max_loras: int) -> None:
    """Prompts share prefixes, also among requests with different adapters."""
    in_turn = [None, *(adapter for adapter, _ in adapters)]
    options = {"enable_lora": True, "max_loras": max_loras, "max_cpu_loras": 2, "attention_backend": backend}
    found, _ = run({}, adapters=in_turn, **options, **LIMITS)
    assert tokens(found) == tokens(expected)
    assert len({tuple(each) for each in tokens(found).values()}) > 20


def test_requests_with_adapters_are_preempted_and_aborted(adapters, expected) -> None:
    in_turn = [None, *(adapter for adapter, _ in adapters)]
    options = {"enable_lora": True, "max_loras": 2, "num_gpu_blocks_override": 11}
    found, load = run({3: 5, 11: 1, 17: 9}, adapters=in_turn, **options, **LIMITS)
    assert load.num_preemptions > 0
    for seq_id, output in found.items():
        assert output["tokens"] == expected[seq_id]["tokens"][: len(output["tokens"])]
        assert seq_id in (3, 11, 17) or output["tokens"] == expected[seq_id]["tokens"]


@pytest.mark.parametrize("options", BATCH_INVARIANT)
def test_outputs_with_adapters_do_not_depend_on_the_batch(adapters, options: dict[str, Any]) -> None:
    in_turn = [None, *(adapter for adapter, _ in adapters)]
    options = LIMITS | options | {"enable_lora": True, "max_loras": 2}
    few, _ = run({}, adapters=in_turn, **(options | {"max_num_seqs": 2}))
    many, _ = run({}, adapters=in_turn, **options)
    assert few == many
