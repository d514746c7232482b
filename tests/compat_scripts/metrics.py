"""The engine's metrics."""

import os

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, disable_log_stats=False)
    prompts = ["27 + 58 =", "11 + 12 ="]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    found = {metric.name: metric for metric in llm.get_metrics()}
    assert isinstance(found["vllm:num_requests_running"], Gauge)
    generated = found["vllm:generation_tokens"]
    assert isinstance(generated, Counter)
    assert generated.value == 8
    times = found["vllm:time_to_first_token_seconds"]
    assert isinstance(times, Histogram)
    assert times.count == 2
    assert times.sum > 0


if __name__ == "__main__":
    main()
