"""The pooler makes results of hidden states that come in chunks, and forgets requests that lose their slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from raycore.errors import InvalidCheckpoint
from raycore.messages import NewRequest, StepPlan
from raycore.models.spec import TensorNames
from raycore.parts.pooling.layers.heads import Heads, load_heads, random_heads
from raycore.parts.pooling.layers.pooler import Pooler
from raycore.parts.pooling.models.pooling import HeadActivation, HeadLinear, HeadNorm, HeadRows, PoolingSpec
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.step.batch import SlotBatch

CPU = torch.device("cpu")
SIZE = 4
BLOCK = np.zeros(1, np.int32).tobytes()


class Steps:
    """Steps of a worker whose final hidden states are given. Prompts are of token 1, with token 9 as every third."""

    def __init__(self, spec: PoolingSpec, heads: Heads | None = None) -> None:
        self.pooler = Pooler(spec, heads or random_heads(spec, TensorNames(), 0, CPU))
        self.batch = SlotBatch(4, 32, 32)

    def run(self, counts: dict[int, int], states: dict[int, torch.Tensor], **plan: Any) -> dict[int, np.ndarray]:
        """Compute the next `counts[slot]` tokens of slots. Returns the results by slot."""
        slots = np.array(list(counts), np.int32)
        made = StepPlan(0, slots.tobytes(), np.array(list(counts.values()), np.int32).tobytes(), **plan)
        self.pooler.apply(made)
        self.batch.apply(made)
        step = self.batch.advance(made)
        chunks = zip(counts, step.starts, step.counts, strict=True)
        hidden_TD = torch.cat([states[slot][start : start + count] for slot, start, count in chunks])
        needs_all = self.pooler.wants_all_rows(step.slots)
        pooled = self.pooler.start(
            step, self.batch.token_ids, hidden_TD if needs_all else None, hidden_TD[step.sampled_rows]
        )
        assert pooled is not None
        return {int(slots[row]): np.ndarray(each.shape, np.float32, each.data) for row, each in pooled.entries()}


def new(slot: int, length: int, computed: int = 0, **params: Any) -> NewRequest:
    token_ids = np.ones(length, np.int32)
    token_ids[::3] = 9
    pooling = PoolingParams(**params)
    return NewRequest(slot, token_ids.tobytes(), length, computed, BLOCK, SamplingParams(), 0, pooling=pooling)


def spec_of(sequence: str = "LAST", **fields: Any) -> PoolingSpec:
    return PoolingSpec(tasks=["embed", "token_embed"], sequence=sequence, embedding_size=SIZE, **fields)  # pyright: ignore


def random_states(*lengths: int) -> dict[int, torch.Tensor]:
    torch.manual_seed(0)
    return {slot: torch.randn(length, SIZE) for slot, length in enumerate(lengths)}


@pytest.mark.parametrize(
    ("sequence", "pool"),
    [("LAST", lambda h: h[-1]), ("CLS", lambda h: h[0]), ("MEAN", lambda h: h.mean(0))],
)
def test_chunks_of_several_requests_give_each_its_result(sequence, pool):
    states = random_states(7, 3, 5)
    steps = Steps(spec_of(sequence))
    assert steps.run({0: 4, 1: 1}, states, new_requests=[new(0, 7), new(1, 3)]) == {}
    found = steps.run({1: 2, 0: 1, 2: 5}, states, new_requests=[new(2, 5, use_activation=False)])
    assert set(found) == {1, 2}
    found |= steps.run({0: 2}, states, freed_slots=[1, 2])
    for slot, each in found.items():
        expected = pool(states[slot])
        expected = expected if slot == 2 else functional.normalize(expected, dim=-1)
        np.testing.assert_allclose(each, expected, atol=1e-6)


@pytest.mark.parametrize("sequence", ["CLS", "MEAN"])
def test_a_request_that_gets_its_slot_again_begins_anew(sequence):
    states = random_states(6, 6)
    steps = Steps(spec_of(sequence))
    assert steps.run({0: 4}, states, new_requests=[new(0, 6)]) == {}
    # it is preempted, and the slot goes to a request with other states
    found = steps.run({0: 6}, {0: states[1]}, freed_slots=[0], new_requests=[new(0, 6)])
    expected = functional.normalize(states[1][0] if sequence == "CLS" else states[1].mean(0), dim=-1)
    np.testing.assert_allclose(found[0], expected, atol=1e-6)


def test_results_of_tokens_are_in_order_and_only_tags_count():
    states = random_states(8, 8)
    steps = Steps(spec_of("MEAN"))
    requests = [new(0, 8, task="token_embed"), new(1, 8, task="token_embed", step_tag_id=9, dimensions=2)]
    assert steps.run({0: 3, 1: 5}, states, new_requests=requests) == {}
    found = steps.run({0: 5, 1: 3}, states)
    np.testing.assert_allclose(found[0], functional.normalize(states[0], dim=-1), atol=1e-6)
    np.testing.assert_allclose(found[1], functional.normalize(states[1][[0, 3, 6], :2], dim=-1), atol=1e-6)


def test_a_prompt_without_tags_has_no_results():
    steps = Steps(spec_of())
    found = steps.run({0: 2}, random_states(2), new_requests=[new(0, 2, task="token_embed", step_tag_id=5)])
    assert found[0].shape == (0, SIZE)


def test_only_requests_that_take_all_states_make_a_step_compute_them():
    states = random_states(5, 5)
    steps = Steps(spec_of("LAST"))
    steps.run({0: 2, 1: 2}, states, new_requests=[new(0, 5), new(1, 5, task="token_embed")])
    assert steps.pooler.wants_all_rows(np.array([0, 1]))
    assert not steps.pooler.wants_all_rows(np.array([0]))
    steps.run({0: 1}, states, freed_slots=[1])
    assert not steps.pooler.wants_all_rows(np.array([1]))
    with pytest.raises(AssertionError, match="cached tokens"):
        steps.pooler.apply(StepPlan(0, new_requests=[new(1, 5, computed=4, task="token_embed")]))


def test_a_worker_that_does_not_report_only_knows_which_rows_are_needed():
    pooler = Pooler(spec_of("MEAN"), None)
    pooler.apply(StepPlan(0, new_requests=[new(0, 5)]))
    assert pooler.wants_all_rows(np.array([0]))
    batch = SlotBatch(4, 32, 32)
    plan = StepPlan(0, bytes(4), np.array([5], np.int32).tobytes(), new_requests=[new(0, 5)])
    batch.apply(plan)
    hidden = torch.randn(5, SIZE)
    assert pooler.start(batch.advance(plan), batch.token_ids, hidden, hidden[-1:]) is None


PARTS = [
    HeadLinear("dense.weight", 6, SIZE, "dense.bias"),
    HeadActivation("gelu"),
    HeadNorm("norm.weight", 6, 1e-3, "norm.bias"),
    HeadLinear("linear.weight", 3, 6, folder="2_Dense"),
]


def test_heads_compute_their_parts_in_order_in_float32(tmp_path):
    torch.manual_seed(1)
    own = {"dense.weight": torch.randn(6, SIZE), "dense.bias": torch.randn(6)}
    own |= {"norm.weight": torch.randn(6), "norm.bias": torch.randn(6)}
    own = {name: tensor.bfloat16() for name, tensor in own.items()}
    last = torch.randn(3, 6)
    (tmp_path / "2_Dense").mkdir()
    save_file(own, tmp_path / "model.safetensors")
    save_file({"linear.weight": last}, tmp_path / "2_Dense" / "model.safetensors")
    spec = PoolingSpec(tasks=["classify"], embedding_size=SIZE, classify=PARTS, num_labels=3, class_activation="tanh")
    states = random_states(5)
    steps = Steps(spec, load_heads(spec, TensorNames(), tmp_path, CPU))
    (found,) = steps.run({0: 5}, {0: states[0].bfloat16()}, new_requests=[new(0, 5)]).values()
    wide = {name: tensor.float() for name, tensor in own.items()}
    x = functional.linear(states[0].bfloat16().float()[-1], wide["dense.weight"], wide["dense.bias"])
    x = functional.layer_norm(functional.gelu(x), (6,), wide["norm.weight"], wide["norm.bias"], 1e-3)
    np.testing.assert_allclose(found, torch.tanh(last @ x), atol=1e-5)


def test_a_head_of_tokens_has_their_rows(tmp_path):
    table = torch.randn(10, SIZE)
    save_file({"model.embed_tokens.weight": table}, tmp_path / "model.safetensors")
    state = torch.randn(1, SIZE)
    for is_difference, expected in ((False, table[[7, 2]] @ state[0]), (True, (table[2] - table[7]) @ state[0])):
        rows = HeadRows("embedding", 10, SIZE, [7, 2], is_difference)
        heads = {"classify": [rows], "token_classify": [rows]}
        spec = PoolingSpec(tasks=["classify", "token_classify"], embedding_size=SIZE, **heads)
        steps = Steps(spec, load_heads(spec, TensorNames(), tmp_path, CPU))
        (found,) = steps.run({0: 1}, {0: state}, new_requests=[new(0, 1, use_activation=False)]).values()
        np.testing.assert_allclose(found, expected.reshape(-1), atol=1e-5)
        if not is_difference:
            asked = new(0, 1, use_activation=False, task="token_classify", returned_token_ids=[2])
            (found,) = steps.run({0: 1}, {0: state}, freed_slots=[0], new_requests=[asked]).values()
            np.testing.assert_allclose(found, [[expected[1]]], atol=1e-5)


def test_a_head_of_another_shape_is_refused_by_name(tmp_path):
    save_file({"score.weight": torch.zeros(3, SIZE)}, tmp_path / "model.safetensors")
    head = [HeadLinear("score.weight", 2, SIZE)]
    spec = PoolingSpec(tasks=["classify"], embedding_size=SIZE, classify=head)
    with pytest.raises(
        InvalidCheckpoint, match=r"score.weight .* has shape \(3, 4\), but config.json implies \(2, 4\)"
    ):
        load_heads(spec, TensorNames(), tmp_path, CPU)
