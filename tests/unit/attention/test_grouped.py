"""Layers in groups, whose windows give blocks back, attend as layers that each keep everything.

A scheduler plans the steps of some requests, with few blocks, so that those of windows are used again and again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fake_engine_core import VOCAB, next_token
from native_kernels import needs_kernels
from small_model import CPU, SPEC, int32
from torch import Tensor

from raycore.attention.grouped import GroupedAttention, LayerPlace
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.spec import Attention, AttentionSpec, MixerConstants
from raycore.cache_layout import CacheLayout, CacheLimits, LayerCacheSpec, divide_layers
from raycore.config import CacheConfig, SchedulerConfig
from raycore.messages import EngineRequest, StepPlan, StepResult
from raycore.models.rotation import Rotation
from raycore.sampling_params import SamplingParams
from raycore.scheduler.prefixes import Prefixes
from raycore.scheduler.scheduler import Scheduler
from raycore.step.batch import SlotBatch, StepInputs
from raycore.step.device_batch import DeviceBatch, StepTensors
from raycore.worker.compute_backend import ComputeBackend

WINDOWS: list[int | None] = [6, 6, None, 6, 6, None, 6, 6]
MODEL = msgspec.structs.replace(
    SPEC, num_layers=len(WINDOWS), layer_windows=WINDOWS, rotations=[Rotation(10000.0), Rotation(100.0), None, None] * 2
)
BLOCK_SIZE = 4
MAX_LEN = 64
NUM_SLOTS = 3
LIMITS = CacheLimits(BLOCK_SIZE, MAX_LEN, 12)
WIDTH = (MODEL.num_heads + 2 * MODEL.num_kv_heads) * MODEL.head_dim
ROW_BLOCKS = MAX_LEN // BLOCK_SIZE + 1


@cache
def heads_of(layer: int, context: tuple[int, ...]) -> Tensor:
    """Queries, keys and values of a layer that follow from the tokens up to their own, as in a model."""
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(hash((layer, *context))))


class Side:
    """One of two caches for the same requests."""

    def __init__(
        self, layout: CacheLayout | None, num_blocks: int, backend: str, device: torch.device = CPU, **options: Any
    ) -> None:
        """`layout`: None: each layer keeps everything, in blocks of its own."""
        groups = None if layout is None else layout.stage_layers(range(len(WINDOWS)))
        host = SlotBatch(NUM_SLOTS, MAX_LEN, BLOCK_SIZE, 1 if layout is None else layout.num_groups)
        self._device = device
        self.batch = DeviceBatch(host, device, is_shared=options.pop("is_shared", True))
        spec = AttentionSpec.of(MODEL, 1, [MixerConstants()] * len(WINDOWS), MAX_LEN, torch.float32, device)
        num_layers = len(WINDOWS) if layout is None else layout.layers_per_group
        sizes = num_layers, num_blocks, MODEL.num_kv_heads, BLOCK_SIZE, MODEL.head_dim
        # the k-th layers of all groups have the same memory
        place = {layer: index for group in groups or [range(num_layers)] for index, layer in enumerate(group)}
        kv = KVTensors(*sizes, torch.float32, device).of_layers([place[layer] for layer in range(len(WINDOWS))])
        made = ComputeBackend("torch", backend, device, cache_dtype=torch.float32, **options)
        self.attention: Attention = made.attention(
            spec, kv, max_model_len=MAX_LEN, max_num_seqs=NUM_SLOTS, max_rows=NUM_SLOTS, groups=groups
        )

    def compute(self, plan: StepPlan) -> tuple[StepInputs, list[Tensor]]:
        """A step's inputs, and each layer's result."""
        self.batch.apply(plan)
        step, tensors = self.batch.advance(plan)
        self.attention.begin(step, tensors)
        known = self.batch.token_ids
        contexts = [
            tuple(known[slot, : position + 1].tolist())
            for slot, position in zip(step.token_slots.tolist(), step.positions.tolist(), strict=True)
        ]
        return step, [
            self.attention(layer, torch.stack([heads_of(layer, context) for context in contexts]).to(self._device))
            for layer in range(len(WINDOWS))
        ]


def without_groups(plan: StepPlan) -> tuple[list[StepPlan], StepPlan]:
    """The same step with blocks that are never given back, and steps before it, which fill cached prefixes."""
    new_requests = []
    for new in plan.new_requests:
        row = np.arange(new.slot * ROW_BLOCKS, (new.slot + 1) * ROW_BLOCKS)
        new_requests.append(msgspec.structs.replace(new, num_computed_tokens=0, block_ids=int32(row)))
    first = StepPlan(-1, freed_slots=plan.freed_slots, new_requests=new_requests)
    before = [
        StepPlan(-1, int32([new.slot]), int32([new.num_computed_tokens]))
        for new in plan.new_requests
        if new.num_computed_tokens
    ]
    step = msgspec.structs.replace(plan, freed_slots=[], new_requests=[], new_block_slots=b"", new_block_ids=b"")
    return [first, *before], step


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "torch", "batch_invariant": False},
        {"backend": "torch", "batch_invariant": False, "is_shared": False},
        {"backend": "torch", "batch_invariant": True},
        pytest.param({"backend": "native", "batch_invariant": True}, marks=needs_kernels),
    ],
    ids=["torch", "torch with memory of its own", "batch-invariant torch", "native"],
)
def test_groups_that_give_blocks_back_attend_as_layers_that_keep_everything(options: dict[str, Any]) -> None:
    num_cached = check_groups(options, (45, 7, 40, 44, 21))
    assert num_cached > 0


def check_groups(options: dict[str, Any], lengths: tuple[int, ...], num_spare: int = 24, max_tokens: int = 14) -> int:
    """Compare requests with prompts of these lengths. Returns how many of their tokens were found in the cache.

    `num_spare`: how many more blocks there are than the longest request could need.
    """
    layers = [LayerCacheSpec("full" if window is None else "window", 1, window) for window in WINDOWS]
    layout = divide_layers(layers, LIMITS)
    assert [len(group.layers) for group in layout.groups] == [2, 2, 2, 2]
    num_blocks = layout.num_blocks_for(MAX_LEN) + num_spare
    scheduler = Scheduler(
        SchedulerConfig(NUM_SLOTS, LIMITS.max_step_tokens, MAX_LEN),
        CacheConfig(BLOCK_SIZE, True, 0.9),
        num_blocks,
        VOCAB,
        layout=layout,
        parts=[Prefixes()],
    )
    grouped = Side(layout, num_blocks, **options)
    plain = Side(None, NUM_SLOTS * ROW_BLOCKS, **options)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 60).tolist()
    params = SamplingParams(max_tokens=max_tokens)
    for seq_id, length in enumerate(lengths):
        scheduler.submit(EngineRequest(seq_id, str(seq_id), prompt[:length], params, 0))
    num_cached = num_taken = 0
    while (plan := scheduler.schedule()) is not None:
        scheduler.check_integrity()
        num_cached += sum(new.num_computed_tokens for new in plan.new_requests)
        num_taken += (len(plan.new_block_ids) + sum(len(new.block_ids) for new in plan.new_requests)) // 4
        before, same = without_groups(plan)
        for each in before:
            plain.batch.apply(each) if not each.slots else plain.compute(each)
        step, found = grouped.compute(plan)
        _, expected = plain.compute(same)
        for layer in range(len(WINDOWS)):
            assert torch.equal(found[layer], expected[layer]), (plan.step, layer)
        token_ids = np.array(
            [
                next_token(grouped.batch.token_ids[slot, :position].tolist(), 0)
                for slot, position in zip(step.sampled_slots.tolist(), step.next_positions.tolist(), strict=True)
            ]
        )
        for side in (grouped, plain):
            side.batch.host.receive(step, token_ids)
        counts = np.bincount(step.sampled, minlength=len(step.slots))
        scheduler.update(plan, StepResult(plan.step, int32(token_ids), int32(counts)))
    assert not scheduler.has_work()
    assert num_taken > num_blocks, "no block is used again"
    return num_cached


class Noting:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        self.calls.append((step.block_tables.tolist(), tensors.block_tables_SM.tolist()))

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        self.calls.append(layer)
        return qkv_TO + layer


def test_each_layer_is_computed_where_it_belongs() -> None:
    batch = DeviceBatch(SlotBatch(1, 8, 4, num_groups=2), CPU)
    batch.host.group_tables[1] = 5
    step, tensors = batch.advance(StepPlan(0))
    first, second, state = Noting(), Noting(), Noting()
    places = [LayerPlace(first, 0, 0), LayerPlace(state, 0), LayerPlace(second, 0, 1), LayerPlace(second, 1, 1)]
    # the last layer keeps a state, too
    attention = GroupedAttention(dict(enumerate(places)) | {7: LayerPlace(state, 1)})
    attention.begin(step, tensors)
    for layer, expected in [(0, 0), (1, 0), (2, 0), (3, 1), (7, 1)]:
        assert attention(layer, torch.zeros(1, 1)).item() == expected
    zeros, fives = [[0, 0, 0]], [[5, 5, 5]]
    assert first.calls == [(zeros, zeros), 0]
    assert state.calls == [(zeros, zeros), 0, 1]
    assert second.calls == [(fives, fives), 0, 1]
