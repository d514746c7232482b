"""What belongs to a worker's share of the weights."""

import msgspec
import pytest
import torch
from expert_checkpoints import QWEN
from small_model import SPEC

from raycore.checkpoint.stages import Stage, split_layers
from raycore.errors import InvalidConfig
from raycore.weights.share import WeightShare


def share(spec=SPEC, tp_rank=0, tp_size=1, **options) -> WeightShare:
    return WeightShare(spec, torch.float32, tp_rank, tp_size, **options)


def test_a_weight_share_without_a_stage_is_of_the_whole_model() -> None:
    alone, whole = share(), share(stage=Stage.whole(SPEC))
    assert alone.layers == whole.layers == range(SPEC.num_layers)
    assert alone.has_embedding
    assert alone.has_head


def test_the_first_stage_has_the_embedding_and_the_last_one_the_head() -> None:
    stages = [share(stage=stage) for stage in split_layers(SPEC, 2)]
    assert [(each.has_embedding, each.has_head) for each in stages] == [(True, False), (False, True)]
    assert [layer for each in stages for layer in each.layers] == list(range(SPEC.num_layers))
    assert share(stage=split_layers(SPEC, 2)[1], embeds=True).has_embedding, "a head that drafts reads it"


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ranks_divide_the_vocabulary_and_the_rows(tp_size: int) -> None:
    spec = msgspec.structs.replace(SPEC, vocab_size=13)
    shares = [share(spec, tp_rank, tp_size) for tp_rank in range(tp_size)]
    num_rows = -(-13 // tp_size)
    assert [(each.vocab_start, each.num_vocab_rows) for each in shares] == [
        (i * num_rows, num_rows) for i in range(tp_size)
    ]
    qkv = [spec.mixers[0].linears(spec, each.tp_rank, tp_size)[0].outputs for each in shares]
    assert sum(queries.num for queries, _, _ in qkv) == spec.num_heads * spec.head_dim
    assert [each.adds_biases for each in shares] == [True, False][:tp_size]


def test_a_model_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="tensor_parallel_size=3"):
        share(SPEC, 0, 3)
    with pytest.raises(InvalidConfig, match="tensor_parallel_size=3"):
        share(QWEN, 0, 3)


def test_memory_is_allocated_on_the_device_in_the_models_dtype() -> None:
    out = WeightShare(SPEC, torch.bfloat16, device=torch.device("meta")).empty(2, 3)
    assert (out.dtype, out.device.type, tuple(out.shape)) == (torch.bfloat16, "meta", (2, 3))
