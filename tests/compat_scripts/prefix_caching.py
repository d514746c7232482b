"""The second request with a prefix finds it in the cache."""

import os

from vllm import LLM, SamplingParams

PREFIX = "11 + 12 = 23\n40 - 15 = 25\n60 + 31 = 91\n52 - 21 = 31\n"


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=512, enable_prefix_caching=True, block_size=32)
    params = SamplingParams(temperature=0, max_tokens=8)
    (first,) = llm.generate(PREFIX + "27 + 58 =", params)
    (second,) = llm.generate(PREFIX + "34 + 45 =", params)
    assert not first.num_cached_tokens
    assert second.num_cached_tokens >= 16
    assert second.num_cached_tokens % 32 == 0
    assert llm.reset_prefix_cache()
    (third,) = llm.generate(PREFIX + "34 + 45 =", params)
    assert not third.num_cached_tokens
    assert third.outputs[0].text == second.outputs[0].text


if __name__ == "__main__":
    main()
