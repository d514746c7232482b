"""A rank's engine gives what transformers and sentence-transformers compute from prompts, whatever the schedule."""

from __future__ import annotations

import numpy as np
import pytest
from pooled_equality import PoolingCheckpoints, check_every_schedule, configured, pool
from pooling_checkpoints import CASES, prompts

from raycore.messages import EngineRequest
from raycore.parts.pooling.client.pooling import PLACEHOLDER, resolved
from raycore.pooling_params import PoolingParams


@pytest.fixture(scope="module")
def pooling_checkpoints(tmp_path_factory):
    return PoolingCheckpoints(lambda: tmp_path_factory.mktemp("pooling"))


@pytest.mark.parametrize("name", CASES)
def test_every_form_gives_the_references_results(pooling_checkpoints, make_core, name):
    check_every_schedule(name, pooling_checkpoints, make_core)


@pytest.mark.parametrize("name", ["last", "mean_of_a_model_that_generates"])
def test_bits_do_not_depend_on_the_schedule_with_batch_invariance(pooling_checkpoints, make_core, name):
    path, _ = pooling_checkpoints[name]
    found = []
    for budget in (24, 2048):
        core = make_core(configured(name, path, block_size=8, max_num_batched_tokens=budget, batch_invariant=True))
        found.append(pool(core, "embed", prompts())[0])
        found.append([pool(core, "embed", [prompt])[0][0] for prompt in prompts()])
    if name != "last":
        found = found[2:]  # a mean is a sum over chunks, and those of the first budget are others
    assert all(np.array_equal(*pair) for other in found[1:] for pair in zip(other, found[0], strict=True))


def test_requests_of_different_kinds_share_steps(pooling_checkpoints, make_core):
    path, expected = pooling_checkpoints["sentence_transformers"]
    core = make_core(configured("sentence_transformers", path, block_size=8))
    spec = core.config.model.spec.pooling
    kinds = [
        PoolingParams(),
        PoolingParams(dimensions=8),
        PoolingParams(use_activation=False),
        PoolingParams(task="token_embed", dimensions=16),
        PoolingParams(dimensions=16, use_activation=False),
    ]
    for seq_id, params in enumerate(kinds):
        pooling = resolved(params, None, spec)
        core.submit(EngineRequest(seq_id, str(seq_id), prompts()[3], PLACEHOLDER, seed=0, pooling=pooling))
    found = {seq_id: np.ndarray(each.shape, np.float32, each.data) for seq_id, each in core.step().pooled}
    whole = expected[3]["embed"]
    np.testing.assert_allclose(found[0], whole, atol=2e-5)
    np.testing.assert_allclose(found[1], whole[:8] / np.linalg.norm(whole[:8]), atol=2e-5)
    np.testing.assert_allclose(found[2] / np.linalg.norm(found[2]), whole, atol=2e-5)
    assert not np.isclose(np.linalg.norm(found[2]), 1.0)
    assert found[3].shape == (33, 16)
    np.testing.assert_allclose(found[4], found[2][:16], atol=2e-5)


def test_a_prompt_may_be_as_long_as_the_model(pooling_checkpoints, make_core):
    path, _ = pooling_checkpoints["last"]
    core = make_core(configured("last", path, block_size=8, max_model_len=40))
    (result,), _ = pool(core, "token_embed", [prompts()[4][:40]])
    assert result.shape == (40, 64)


def test_logits_are_calibrated_before_the_activation(pooling_checkpoints, make_core):
    path, expected = pooling_checkpoints["score"]
    config = configured("score", path, pooler_config={"logit_mean": 0.5, "logit_sigma": 2.0})
    found, _ = pool(make_core(config), "score", prompts())
    logits = [np.log(each["score"] / (1 - each["score"])) for each in expected]
    np.testing.assert_allclose(found, [1 / (1 + np.exp(-(each - 0.5) / 2.0)) for each in logits], atol=1e-4)


def test_random_weights_have_a_head(pooling_checkpoints, make_core):
    path, _ = pooling_checkpoints["classes"]
    found, _ = pool(make_core(configured("classes", path, load_format="dummy")), "classify", prompts())
    np.testing.assert_allclose([each.sum() for each in found], 1.0, atol=1e-5)
    assert not np.allclose(found[0], found[1])
