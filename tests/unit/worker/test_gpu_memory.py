"""How a GPU's memory is divided."""

from __future__ import annotations

import json

import pytest
from caches import cache_of

from raycore.config import SchedulerConfig, resolve
from raycore.messages import StepPlan
from raycore.worker.gpu_memory import MemoryUse
from raycore.worker.rank import WorkerRank
from raycore.worker.worker import Worker
from raycore.worker.worst_steps import worst_steps

GIB = 1 << 30
DESCRIPTION = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}


def use_of(total: float, utilization: float, *, free: float, weights: float = 16, step: float = 3) -> MemoryUse:
    """Sizes in GiB."""
    sizes = {"total": total, "free": free, "weights": weights, "step": step}
    in_bytes = {name: int(n * GIB) for name, n in sizes.items()}
    return MemoryUse(utilization=utilization, adapters=GIB, graphs=GIB // 4, **in_bytes)


def test_the_cache_gets_the_rest_of_the_workers_part_of_gpu_memory() -> None:
    use = use_of(80, 0.9, free=80 - 16 - 0.5)
    assert use.left == int((72 - 16 - 3 - 1 - 0.25 - 0.5) * GIB)


def test_a_workers_part_of_gpu_memory_does_not_depend_on_other_processes() -> None:
    use = use_of(80, 0.4, free=30)
    assert use.left == int((32 - 16 - 3 - 1 - 0.25 - 1) * GIB)


def test_the_cache_gets_no_more_gpu_memory_than_other_processes_leave() -> None:
    use = use_of(80, 0.9, free=10)
    assert use.left == int((10 - 3 - 1 - 0.25) * GIB)


def test_the_table_of_gpu_memory_adds_up_and_names_options_to_lower() -> None:
    use = use_of(24, 0.9, free=2.5, weights=16, step=1)
    assert use.table().splitlines() == [
        "    21.60 GiB  gpu_memory_utilization=0.9 of 24.00 GiB",
        "   -16.00 GiB  weights: use more workers (tensor_parallel_size, pipeline_parallel_size)",
        "    -1.00 GiB  LoRA adapters: lower max_loras or max_lora_rank",
        "    -1.00 GiB  the largest step: lower max_num_batched_tokens or max_num_seqs",
        "    -0.25 GiB  CUDA graphs: enforce_eager=True needs none",
        "    -1.00 GiB  CUDA itself",
        "    -2.10 GiB  taken by other processes: end those that you don't need",
        "     0.25 GiB  left",
    ]


@pytest.mark.parametrize("max_drafts", [0, 5])
@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(4, 64), (1, 64), (8, 1000), (3, 3), (3, 12)])
def test_worst_steps_reach_the_limits_and_leave_no_state_behind(
    tmp_path, num_seqs: int, num_tokens: int, max_drafts: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DESCRIPTION))
    limits = {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens, "max_model_len": 200}
    worker = Worker(resolve(str(tmp_path), load_format="dummy", num_threads=1, **limits), WorkerRank(0, 0, 1, 0, 1))
    worker.init_device()
    worker.load_model()
    worker.initialize_cache(cache_of(worker, 1))
    prompts, decodes, end = worst_steps(SchedulerConfig(num_seqs, num_tokens, 200), 16, max_drafts)
    counts = [len(request.token_ids) // 4 - request.num_computed_tokens for request in prompts.new_requests]
    assert sum(counts) == min(num_tokens, num_seqs * 199)
    assert len(counts) <= num_seqs
    assert len(decodes.new_requests) == num_seqs
    assert decodes.num_step_tokens == num_seqs * min(1 + max_drafts, num_tokens // num_seqs)
    assert end.freed_slots == list(range(num_seqs))
    for plan in (prompts, decodes, end, StepPlan(3)):
        worker.execute_model(plan)
