"""Engine configurations for unit tests, none of which needs Ray or a checkpoint."""

from typing import Any

from raycore.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, ParallelConfig, SchedulerConfig
from raycore.models.rotation import Rotation
from raycore.models.spec import ModelSpec

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rotations=[Rotation(10000.0)] * 2,
    layer_windows=[None, None],
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    dtype="float32",
    bos_token_id=None,
    eos_token_ids=[2],
    generation_defaults={},
)


def make_config(spec: ModelSpec = SPEC, **options: Any) -> EngineConfig:
    """A small engine's configuration; `options` are `resolve()`'s, without a checkpoint to read."""
    length = options.get("max_model_len", 256)
    return EngineConfig(
        model=ModelConfig(
            model="model",
            tokenizer="model",
            spec=spec,
            dtype=options.get("dtype", "float32"),
            max_model_len=length,
            load_format="dummy",
        ),
        cache=CacheConfig(
            options.get("block_size", 16),
            options.get("enable_prefix_caching", True),
            0.9,
            options.get("num_gpu_blocks_override"),
        ),
        scheduler=SchedulerConfig(options.get("max_num_seqs", 8), options.get("max_num_batched_tokens", 64), length),
        parallel=ParallelConfig(options.get("tensor_parallel_size", 1), options.get("data_parallel_size", 1)),
        executor=ExecutorConfig("inline"),
    )
