"""The times of a request."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, disable_log_stats=False)
    (output,) = llm.generate("27 + 58 =", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    metrics = output.metrics
    assert metrics.num_generation_tokens == 8
    assert 0 < metrics.first_token_latency < 60
    assert metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts


if __name__ == "__main__":
    main()
