"""What requests ask of a model that pools is completed by what its checkpoint says, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.errors import InvalidRequest
from raycore.parts.pooling.client.pooling_params import resolved_pooling_params
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams

EMBEDS = PoolingSpec(tasks=["embed", "token_embed"], embedding_size=64, is_matryoshka=True, dimensions=48)
STEPS = PoolingSpec(tasks=["token_classify"], embedding_size=64, num_labels=3, step_tag_id=7, returned_token_ids=[2, 0])


def test_what_is_not_given_is_the_checkpoints():
    assert resolved_pooling_params(EMBEDS, None) == PoolingParams(
        task="embed", dimensions=48, skip_reading_prefix_cache=False
    )
    asked = PoolingParams(task="token_embed", dimensions=8, use_activation=False)
    assert resolved_pooling_params(EMBEDS, asked) == PoolingParams(
        task="token_embed", dimensions=8, use_activation=False, skip_reading_prefix_cache=True
    )
    assert asked.skip_reading_prefix_cache is None, "the caller's own object is unchanged"
    assert resolved_pooling_params(STEPS, PoolingParams()) == PoolingParams(
        task="token_classify", step_tag_id=7, returned_token_ids=[2, 0], skip_reading_prefix_cache=True
    )
    assert resolved_pooling_params(STEPS, PoolingParams(returned_token_ids=[1])).returned_token_ids == [1]


@pytest.mark.parametrize(
    ("spec", "params", "message"),
    [
        (EMBEDS, {"task": "classify"}, "task='classify' isn't supported by this model: it has embed, token_embed"),
        (EMBEDS, {"task": ["embed"]}, "task=\\['embed'\\]"),
        (EMBEDS, {"dimensions": 0}, "dimensions=0 isn't in \\[1, 64\\]"),
        (EMBEDS, {"dimensions": 65}, "dimensions=65 isn't in \\[1, 64\\]"),
        (EMBEDS, {"dimensions": 8.0}, "dimensions=8.0 isn't an integer"),
        (EMBEDS, {"dimensions": True}, "dimensions=True isn't an integer"),
        (EMBEDS, {"use_activation": 1}, "use_activation=1"),
        (EMBEDS, {"step_tag_id": 1}, "step_tag_id=1, but task='embed'"),
        (EMBEDS, {"returned_token_ids": [1]}, "returned_token_ids=\\[1\\], but task='embed'"),
        (STEPS, {"dimensions": 2}, "dimensions=2, but task='token_classify' has no embeddings"),
        (STEPS, {"returned_token_ids": []}, "returned_token_ids=\\[\\]"),
        (STEPS, {"returned_token_ids": [0, 3]}, "returned_token_ids contains 3"),
        (STEPS, {"returned_token_ids": "1"}, "returned_token_ids='1'"),
    ],
)
def test_what_the_model_cannot_do_is_refused(spec: PoolingSpec, params: dict[str, Any], message: str):
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        resolved_pooling_params(spec, PoolingParams(**params))


def test_only_models_trained_for_it_give_the_beginning_of_an_embedding():
    whole = PoolingSpec(tasks=["embed"], embedding_size=64)
    with pytest.raises(InvalidRequest, match=r"dimensions=8, but the beginning .*is_matryoshka"):
        resolved_pooling_params(whole, PoolingParams(dimensions=8))
    some = PoolingSpec(tasks=["embed"], embedding_size=64, is_matryoshka=True, matryoshka_dimensions=[16, 32])
    assert resolved_pooling_params(some, PoolingParams(dimensions=32)).dimensions == 32
    with pytest.raises(InvalidRequest, match=r"dimensions=31 isn't one of those .* 16, 32"):
        resolved_pooling_params(some, PoolingParams(dimensions=31))
