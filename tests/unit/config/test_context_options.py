"""Which workers may hold different tokens' keys and values, and how they and the cache's blocks are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycore.config import EngineConfig, resolve
from raycore.errors import InvalidConfig

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
LATENT = SHAPE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}

DIFFERING = SHAPE | {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "num_attention_heads": 12,
    "hidden_size": 96,
    "head_dim": 8,
    "v_head_dim": 8,
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "dense"],
    "sliding_window": 16,
    "swa_num_attention_heads": 12,
    "swa_num_key_value_heads": 3,
    "swa_head_dim": 8,
    "swa_v_head_dim": 8,
    "partial_rotary_factor": 0.5,
}
"""Six workers have three copies of the key-value heads of one layer, and two of the other's."""


@pytest.fixture
def configure(tmp_path: Path):
    def configure(shape: dict[str, Any] = SHAPE, **options: Any) -> EngineConfig:
        (tmp_path / "config.json").write_text(json.dumps(shape))
        return resolve(str(tmp_path), load_format="dummy", **options)

    return configure


def test_neither_divides_anything_by_default(configure) -> None:
    config = configure(tensor_parallel_size=4, block_size=8)
    assert (config.parallel.context_parallel_size, config.parallel.world_size) == (1, 4)
    assert config.tokens_per_block == config.cache_limits.block_size == 8


def test_decodes_of_copies_of_heads_are_divided_without_more_workers(configure) -> None:
    config = configure(tensor_parallel_size=8, decode_context_parallel_size=4, block_size=8)
    assert config.parallel.world_size == 8
    assert config.tokens_per_block == config.cache_limits.block_size == 32
    assert config.cache.block_size == 8


def test_all_tensor_parallel_workers_may_divide_latents(configure) -> None:
    for size in (1, 2, 4):
        config = configure(LATENT, tensor_parallel_size=4, decode_context_parallel_size=size, block_size=8)
        assert (config.parallel.world_size, config.tokens_per_block) == (4, 8 * size)
    assert configure(LATENT, prefill_context_parallel_size=3, block_size=8).tokens_per_block == 24


def test_latents_are_not_divided_over_more_workers_than_have_them(configure) -> None:
    with pytest.raises(InvalidConfig, match=r"have the same latents: 4, with tensor_parallel_size=4\. .* \[1, 2, 4\]$"):
        configure(LATENT, tensor_parallel_size=4, decode_context_parallel_size=3)
    with pytest.raises(InvalidConfig, match=r"have the same latents: 1, .* \[1\]: only tensor-parallel workers share"):
        configure(LATENT, decode_context_parallel_size=2)


def test_prefills_are_divided_over_more_workers(configure) -> None:
    config = configure(tensor_parallel_size=4, prefill_context_parallel_size=3, pipeline_parallel_size=2, block_size=8)
    assert (config.parallel.stage_size, config.parallel.world_size) == (12, 24)
    assert config.executor.backend == "ray"
    assert config.tokens_per_block == 24
    places = [config.parallel.place(worker) for worker in range(24)]
    assert places == [(stage, share, rank) for stage in range(2) for share in range(3) for rank in range(4)]


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (
            {"tensor_parallel_size": 8, "decode_context_parallel_size": 3},
            ["decode_context_parallel_size=3", "tensor_parallel_size=8", "num_key_value_heads=2", "one of [1, 2, 4]"],
        ),
        ({"tensor_parallel_size": 4, "decode_context_parallel_size": 4}, ["one of [1, 2]"]),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, ["one of [1]", "more workers than"]),
        ({"decode_context_parallel_size": 2}, ["one of [1]"]),
        (
            {"prefill_context_parallel_size": 2, "executor_backend": "inline"},
            ["prefill_context_parallel_size=2 needs 2", "executor_backend='ray'"],
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_works(configure, options, fragments) -> None:
    with pytest.raises(InvalidConfig) as raised:
        configure(**options)
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_every_kind_of_heads_has_to_be_divided(configure) -> None:
    for size, num in ((2, 3), (3, 2)):
        found = f"decode_context_parallel_size={size} doesn't divide .*key-value heads: {num}, .*Choose one of \\[1\\]"
        with pytest.raises(InvalidConfig, match=found):
            configure(DIFFERING, tensor_parallel_size=6, decode_context_parallel_size=size, block_size=8)


@pytest.mark.parametrize("method", [{"method": "ngram", "prompt_lookup_max": 2}, {"method": "draft_model"}])
def test_drafts_are_allowed(configure, tmp_path, method) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    guesses = {"num_speculative_tokens": 2} | method
    if guesses["method"] == "draft_model":
        guesses["model"] = str(tmp_path)
    assert configure(prefill_context_parallel_size=2, speculative_config=guesses).max_drafts == 2


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "omit it"),
        ({"prefill_context_parallel_size": 2}, "omit it"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "prefill_context_parallel_size": 2},
            "omit them",
        ),
    ],
)
def test_contexts_of_which_tokens_are_selected_are_not_divided(configure, options: dict[str, int], advice: str) -> None:
    shape = LATENT | {"architectures": ["DeepseekV32ForCausalLM"], "index_head_dim": 16}
    with pytest.raises(InvalidConfig, match=f"has attention to selected tokens: {advice}"):
        configure(shape, **options)
