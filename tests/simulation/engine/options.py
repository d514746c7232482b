"""The engine's configuration that a seed draws."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import msgspec

from raycore.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.rotation import Rotation
from raycore.models.spec import ModelSpec
from raycore.parts.drafts.config.drafter import DrafterConfig
from raycore.parts.drafts.config.speculative import SpeculativeConfig

WORKER, MASKED_WORKER = "simulation.worker.worker.SimulatedWorker", "simulation.worker.masked.MaskedWorker"
EOS = 2
CHECKPOINT = "checkpoint"
MAX_MODEL_LEN = 96


@dataclass(frozen=True)
class Options:
    """What is drawn, and what isn't in the configuration."""

    config: EngineConfig
    pools: bool


def drawn(draw: random.Random) -> Options:
    """Options of any kind: each is drawn alone, so that all combinations come."""
    pools = draw.random() < 0.1
    vocab_size = draw.choice([8, 32, 64])
    spec = model_spec(vocab_size, draw.choice([[None], [None], [None, 8], [None, 8], [16, 8]]), draw.random() < 0.2)
    speculative, drafter = None if pools else _speculation(draw), None
    if speculative is not None and speculative.method == "draft_model":
        count = speculative.num_speculative_tokens
        drafter = DrafterConfig("drafter", model_spec(vocab_size, [None], False), None, count, 1, MAX_MODEL_LEN)
    block_size = draw.choice([2, 4, 4, 8])
    num_groups = len(set(spec.layer_windows))
    num_ranks = draw.choice([1, 1, 1, 2, 3])
    most_seqs = draw.choice([2, 4, 8, 16])
    one = -(-MAX_MODEL_LEN // block_size) * num_groups
    config = EngineConfig(
        model=ModelConfig(
            model=CHECKPOINT,
            tokenizer=CHECKPOINT,
            spec=spec,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            load_format="dummy",
            enable_prompt_embeds=draw.random() < 0.4,
        ),
        cache=CacheConfig(
            block_size,
            draw.random() < 0.85,
            0.9,
            one + int(one * draw.choice([0.2, 0.5, 1.0, 4.0])),
            mamba_block_size=block_size * draw.choice([1, 2, 4]),
            num_prefix_states=draw.choice([1, 4, 16]),
        ),
        scheduler=SchedulerConfig(
            most_seqs,
            draw.choice([most_seqs, 16, 32, 128]) if most_seqs <= 16 else 32,
            MAX_MODEL_LEN,
            draw.choice(["fcfs", "fcfs", "priority"]),
            draw.choice([0, 0, 8]),
            async_scheduling=draw.random() < 0.6,
        ),
        parallel=ParallelConfig(
            worker_cls=WORKER,
            data_parallel_size=num_ranks,
            enable_expert_parallel=num_ranks > 1,
            dp_sync_interval=draw.choice([1, 1, 4]),
        ),
        executor=ExecutorConfig("inline"),
        lora=LoRAConfig(enable_lora=draw.random() < 0.5, max_loras=draw.choice([1, 2]), max_cpu_loras=3),
        device="cpu",
        speculative_config=speculative,
        drafter=drafter,
    )
    return Options(config, pools)


def with_masks(options: Options) -> Options:
    """The same with workers that take masks."""
    parallel = msgspec.structs.replace(options.config.parallel, worker_cls=MASKED_WORKER)
    return replace(options, config=msgspec.structs.replace(options.config, parallel=parallel))


def model_spec(vocab_size: int, windows: list[int | None], has_states: bool) -> ModelSpec:
    """A model whose sizes mean nothing to simulated workers."""
    num_layers = len(windows)
    state = None
    if has_states:
        state = DeltaSpec([False] * num_layers, 1, 4, 4, 2, num_k_heads=1, is_interleaved=False)
    return ModelSpec(
        architecture="SimulatedForCausalLM",
        model_type="simulated",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rotations=[Rotation(10000.0)] * num_layers,
        layer_windows=windows,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_MODEL_LEN,
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=[EOS],
        generation_defaults={},
        state=state,
    )


def _speculation(draw: random.Random) -> SpeculativeConfig | None:
    method = draw.choice([None, None, None, "ngram", "suffix", "draft_model", "draft_model"])
    if method is None:
        return None
    count = draw.choice([1, 2, 4])
    return SpeculativeConfig(
        method,
        count,
        model="drafter" if method == "draft_model" else None,
        prompt_lookup_min=1,
        prompt_lookup_max=2,
        num_speculative_tokens_per_batch_size=draw.choice([None, [(1, 64, count)]]),
    )
