"""What a GPU's worker runs, kernels included, gives the tokens of plain torch."""

from __future__ import annotations

import interpreted_triton  # noqa: F401  # before whatever imports Triton
import msgspec
import pytest
import torch
from small_model import SPEC, make_runner, make_weights, new_request, plan, tokens_of

from raycore.messages import StepPlan
from raycore.models.spec import ModelSpec
from raycore.runner.decode_graphs import DecodeGraphs
from raycore.runner.runner import ModelRunner
from raycore.sampling_params import SamplingParams

SMALL = msgspec.structs.replace(SPEC, num_layers=2, layer_windows=[None, 7])
OTHER_PARTS = msgspec.structs.replace(
    SMALL, attention_softcap=0.4, sinks=True, logits_softcap=0.6, norm_offset=1.0, gate="gelu"
)
PROMPTS = [[5, 80, 33, 2, 61, 17, 90, 44, 44], [8, 71, 23], [12, 5, 9, 30, 31, 32, 33], [50]]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.5, top_p=0.9, logprobs=2),
    SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.3, top_k=20),
    SamplingParams(temperature=0.0, prompt_logprobs=1, min_tokens=3),
]


def plans() -> list[StepPlan]:
    """A chunked prompt, whole prompts, decodes beside them, decodes alone, and a slot that changes hands."""
    requests = [
        new_request(slot, prompt, range(6 * slot, 6 * slot + 6), params=params)
        for slot, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    heir = new_request(1, PROMPTS[0][:4], range(40, 46), params=PARAMS[2])
    return [
        plan([1, 0], [3, 5], new_requests=requests[:2]),
        plan([1, 3, 0, 2], [1, 1, 4, 7], new_requests=requests[2:]),
        plan([0, 1, 2, 3]),
        plan([0, 2, 3, 1], [1, 1, 1, 4], freed_slots=[1], new_requests=[heir]),
        plan([0, 1, 2, 3]),
        plan([2, 0]),
        plan([0, 2]),
    ]


def run(runner: ModelRunner) -> list[tuple[list[int], list[list[int]], list[list[int]]]]:
    """Each step's tokens, likely tokens, and likely tokens of the prompt. Two steps are in flight."""
    launched, results = [], []
    for step in plans():
        launched.append(runner.launch(step))
        if len(launched) == 2:
            results.append(launched.pop(0).result())
    results.append(launched[0].result())
    return [
        (
            tokens_of(result),
            [entry.token_ids for _, entry in result.logprobs],
            [entry.token_ids for _, _, entries in result.prompt_logprobs for entry in entries],
        )
        for result in results
    ]


# a graph replays whatever kernels there are
@pytest.mark.parametrize(("spec", "has_graphs"), [(SMALL, True), (OTHER_PARTS, False)], ids=["graphs", "other parts"])
def test_the_gpu_path_gives_the_tokens_of_plain_torch(spec: ModelSpec, has_graphs: bool) -> None:
    expected = run(make_runner(spec, make_weights(spec)))
    runner = make_runner(spec, make_weights(spec), backend="triton", is_shared=False, has_graphs=has_graphs)
    assert run(runner) == expected


def test_attention_can_be_plain_torch_between_kernels() -> None:
    weights = make_weights(OTHER_PARTS)
    runner = make_runner(OTHER_PARTS, weights, backend="triton", attention_by="torch", is_shared=False)
    assert run(runner) == run(make_runner(OTHER_PARTS, make_weights(OTHER_PARTS)))


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e4m3fn])
def test_batch_invariant_logits_have_the_same_bits_in_chunks_and_beside_others(cache_dtype: torch.dtype) -> None:
    spec = msgspec.structs.replace(SMALL, num_layers=1, layer_windows=[7])
    prompt, others = PROMPTS[0], [PROMPTS[2], PROMPTS[1]]
    alone, together = [
        make_runner(
            spec,
            make_weights(spec),
            backend="triton",
            is_shared=False,
            batch_invariant=True,
            cache_dtype=cache_dtype,
        )
        for _ in "ab"
    ]
    logits: dict[ModelRunner, list[torch.Tensor]] = {alone: [], together: []}
    for runner, rows in logits.items():
        compute = runner._network.logits
        runner._network.logits = lambda hidden, compute=compute, rows=rows: rows.append(compute(hidden)) or rows[-1]
    request = new_request(2, prompt, [30, 7, 19, 4])
    for step in (plan([2], [len(prompt)], new_requests=[request]), plan([2]), plan([2])):
        alone.execute(step)
    neighbors = [new_request(slot, other, range(40 + 6 * slot, 46 + 6 * slot)) for slot, other in enumerate(others)]
    for step in (
        plan([1, 2], [3, 5], new_requests=[neighbors[1], request]),
        plan([1, 2, 0], [1, 4, 7], new_requests=[neighbors[0]]),
        plan([0, 2, 1]),
        plan([2, 1]),
    ):
        together.execute(step)
    found = [logits[together][1][1], logits[together][2][1], logits[together][3][0]]
    assert all(torch.equal(row, own[0]) for row, own in zip(found, logits[alone], strict=True))


class Recorded:
    """Stands in for a CUDA graph: computes again, and counts how often."""

    def __init__(self) -> None:
        self.num_captures = self.num_launches = 0

    def __call__(self, compute):
        self.num_captures += 1

        def launch():
            self.num_launches += 1
            return compute()

        return launch


def test_a_cuda_graph_is_captured_when_a_batch_size_comes_again() -> None:
    capture = Recorded()
    graphs = DecodeGraphs(capture)
    for size in (1, 2, 2, 1, 2, 4):
        assert graphs.run(size, lambda size=size: size) == size
    assert (capture.num_captures, capture.num_launches) == (2, 3)


def test_steps_are_computed_without_a_cuda_graph_if_its_capture_fails(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(compute):
        raise RuntimeError("no memory is left")

    graphs = DecodeGraphs(refuse)
    assert [graphs.run(2, lambda: "computed") for _ in range(4)] == ["computed"] * 4
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA graphs, so decoding is slower: capturing one for 2 rows failed: no memory is left"
    ]
