"""With `batch_invariant=True`, a request's outcome doesn't depend on what runs beside it, nor on which rank it runs."""

from __future__ import annotations

import pytest
from number_formats import BATCH_INVARIANT

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path
from raycore.kernels import library

PROMPTS = [f"{first} + {second} =" for first, second in ((3, 4), (27, 58), (91, 9), (12, 12))] + [
    "Once upon a time there was a number. " * 5 + "12 + 30 =",
    "1 + 1 = 2\n" * 11 + "1 + 2 =",
]
GREEDY = SamplingParams(temperature=0, max_tokens=10, logprobs=3, prompt_logprobs=1, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.1, top_p=0.95, seed=5, max_tokens=10, logprobs=3, ignore_eos=True)


def start(**options: object) -> LLM:
    return LLM(demo_model_path(), num_threads=1, standby_delay_s=None, **options)


def outcomes(llm: LLM, prompts: list[str], params: SamplingParams) -> list[object]:
    """Tokens and all log probabilities; `==` on floats is equality of bits."""
    made = llm.generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in made]


@pytest.fixture(scope="module", params=BATCH_INVARIANT)
def mode(request) -> dict[str, object]:
    return request.param


@pytest.fixture(scope="module")
def expected(ray_cluster, mode) -> dict[str, list[object]]:
    """Each request alone on one rank, without prefix caching."""
    with start(enable_prefix_caching=False, **mode) as llm:
        return {
            name: [outcomes(llm, [prompt], params)[0] for prompt in PROMPTS]
            for name, params in (("greedy", GREEDY), ("seeded", SEEDED))
        }


@pytest.mark.parametrize("dp", [1, 2])
def test_batched_requests_give_the_same_bits_as_each_request_alone(ray_cluster, mode, expected, dp) -> None:
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 12}
    with start(data_parallel_size=dp, **limits, **mode) as llm:
        for _ in range(2):  # the second time finds prefixes
            assert outcomes(llm, PROMPTS, GREEDY) == expected["greedy"]
            assert outcomes(llm, PROMPTS, SEEDED) == expected["seeded"]


def test_tensor_parallel_ranks_keep_the_bits(ray_cluster, mode, expected) -> None:
    with start(tensor_parallel_size=2, max_num_batched_tokens=24, max_num_seqs=8, **mode) as llm:
        alone = [outcomes(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]
        assert outcomes(llm, PROMPTS, GREEDY) == alone
        if library.load() is None:
            pytest.skip("without native kernels, oneDNN may add up in another order for half of the outputs")
        assert alone == expected["greedy"]
        assert outcomes(llm, PROMPTS, SEEDED) == expected["seeded"]


def test_stages_give_the_bits_of_a_single_worker(ray_cluster, mode, expected) -> None:
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 12}
    with start(pipeline_parallel_size=3, **limits, **mode) as llm:
        for _ in range(2):  # the second time finds prefixes
            assert outcomes(llm, PROMPTS, GREEDY) == expected["greedy"]
            assert outcomes(llm, PROMPTS, SEEDED) == expected["seeded"]
