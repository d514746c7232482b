"""Launching a step never waits for a GPU, so that the next one can be launched before it has finished."""

from __future__ import annotations

from typing import Literal

import interpreted_triton  # before whatever imports Triton
import msgspec
import pytest
import torch
from no_waiting import NoWaiting
from sampling_values import CHANGING_DRAWS
from small_model import SPEC, make_runner, make_weights, new_request, plan, tokens_of
from triton.runtime.interpreter import GridExecutor

from raycore.parts.pooling.layers.heads import random_heads
from raycore.parts.pooling.layers.pooler import Pooler
from raycore.parts.pooling.models.pooling import HeadLinear, PoolingSpec
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams

SMALL = msgspec.structs.replace(SPEC, num_layers=1, layer_windows=[None])


@pytest.fixture(autouse=True)
def _kernels_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton's interpreter does with tensors is not what the host does."""
    launch = GridExecutor.__call__

    def launch_unseen(*args, **kwargs):
        with torch._C.DisableTorchFunction():
            return launch(*args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch_unseen)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.1},
        {"temperature": 0.7, "logprobs": 3, "logit_bias": {3: 1.0}, "min_tokens": 5, "stop_token_ids": [4]},
        {"temperature": 0.0, "allowed_token_ids": [1, 5, 9]},
        CHANGING_DRAWS,
        *({"temperature": 0.8, name: value} for name, value in CHANGING_DRAWS.items()),
    ],
    ids=lambda params: ", ".join(params),
)
def test_steady_decodes_never_wait_for_the_device(params: dict) -> None:
    runner = make_runner(SMALL, make_weights(SMALL), backend="triton", is_shared=False, has_graphs=True)
    requests = [
        new_request(0, [5, 80], range(6), params=SamplingParams(**params)),
        new_request(1, [3], range(6, 12), params=SamplingParams(temperature=0.0)),
    ]
    steps = [runner.launch(plan([1, 0], [1, 2], new_requests=requests))]
    with NoWaiting():
        steps += [runner.launch(plan([0, 1])) for _ in range(3)]
    assert all(min(tokens_of(step.result())) >= 0 for step in steps)


@pytest.mark.parametrize("sequence", ["LAST", "MEAN", "CLS"])
def test_steps_that_pool_never_wait_for_the_device(sequence: Literal["LAST", "MEAN", "CLS"]) -> None:
    head = [HeadLinear("score.weight", 3, SMALL.hidden_size)]
    spec = PoolingSpec(
        tasks=["embed", "token_classify"], sequence=sequence, embedding_size=8, token_classify=head, num_labels=3
    )
    pooler = Pooler(spec, random_heads(spec, SMALL.names, 0, interpreted_triton.DEVICE))
    runner = make_runner(SMALL, make_weights(SMALL), backend="triton", is_shared=False, pooler=pooler)
    requests = [new_request(slot, [5, 80, 7, 5], range(3 * slot, 3 * slot + 3)) for slot in range(3)]
    for request, params in zip(
        requests,
        [
            PoolingParams(task="embed", dimensions=4),
            PoolingParams(task="embed", use_activation=False),
            PoolingParams(task="token_classify", step_tag_id=5, returned_token_ids=[2, 0]),
        ],
        strict=True,
    ):
        request.pooling = params
    with NoWaiting():
        steps = [
            runner.launch(plan([0, 1, 2], [4, 2, 1], new_requests=requests)),
            runner.launch(plan([1, 2], [2, 3])),
        ]
    found = [[(row, pooled.shape) for row, pooled in step.result().pooled] for step in steps]
    assert found == [[(0, [4])], [(0, [SMALL.hidden_size]), (1, [2, 2])]]


def test_the_check_for_waits_finds_every_way_to_wait_for_the_device() -> None:
    x = torch.arange(4)
    for wait in (
        lambda: x.tolist(), lambda: x[0].item(), lambda: bool(x[0]), lambda: x.numpy(), lambda: x[x > 1],
        lambda: x.nonzero(), lambda: int(x[1]), lambda: x.to("cpu"), lambda: [0, 1, 2, 3][x[1]],
        lambda: torch.nonzero(x), lambda: x.__setitem__(x > 1, 0),
    ):  # fmt: skip
        with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
            wait()
